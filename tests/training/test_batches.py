"""Parts of the data, drawn at random."""

from collections import Counter, namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from secateur import InvalidTask
from secateur.training.batches import count, draw, to_device

LABELS = torch.arange(40) % 4


def loader(**options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(40.0), LABELS), batch_size=8, **options)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seen(batches: Any) -> list[int]:
    return [int(x) for images, _ in batches for x in images]


def test_everything_is_the_source_itself() -> None:
    source = loader()
    assert draw(source, 1.0, None, generator()) is source


def test_a_fraction_of_a_loader() -> None:
    part = seen(draw(loader(), 0.25, None, generator()))
    assert len(part) == len(set(part)) == 10
    assert sorted(part) == sorted(seen(draw(loader(), 0.25, None, generator())))
    assert sorted(part) != sorted(seen(draw(loader(), 0.25, None, generator(1))))


@pytest.mark.parametrize("kind", ["tensors", "targets", "subset"])
def test_examples_per_class(kind: str) -> None:
    class Listed(Dataset):
        targets = LABELS.tolist()

        def __getitem__(self, index: int) -> tuple[float, int]:
            return float(index), self.targets[index]

        def __len__(self) -> int:
            return 40

    dataset = {
        "tensors": loader().dataset,
        "targets": Listed(),
        "subset": Subset(Listed(), list(range(12, 40))),
    }[kind]
    part = draw(DataLoader(dataset, batch_size=5), 1.0, 3, generator())
    labels = [int(label) for _, labels in part for label in labels]
    assert Counter(labels) == {0: 3, 1: 3, 2: 3, 3: 3}
    if kind == "subset":
        assert min(seen(part)) >= 12


def test_a_class_with_fewer_examples_gives_all_it_has() -> None:
    dataset = TensorDataset(torch.arange(5.0), torch.tensor([0, 0, 0, 0, 1]))
    labels = [int(y) for _, ys in draw(DataLoader(dataset, batch_size=2), 1.0, 2, generator()) for y in ys]
    assert Counter(labels) == {0: 2, 1: 1}


def test_the_new_loader_collates_like_the_old_one() -> None:
    doubled = loader(collate_fn=lambda items: (torch.stack([2 * x for x, _ in items]), None))
    assert all(x % 2 == 0 for x in seen(draw(doubled, 0.5, None, generator())))


def test_whole_batches_of_anything_else() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(zip(torch.arange(40.0), LABELS, strict=True))

    for source in (DataLoader(Stream(), batch_size=8), [(torch.arange(8.0) + 8 * i, None) for i in range(5)]):
        part = list(draw(source, 0.4, None, generator()))
        assert len(part) == 2
        with pytest.raises(InvalidTask, match="examples per class can be drawn from"):
            draw(source, 1.0, 3, generator())


def test_a_dataset_without_labels() -> None:
    class Bare(Dataset):
        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return 4

    with pytest.raises(InvalidTask, match="Bare has no labels to draw examples per class by"):
        draw(DataLoader(Bare()), 1.0, 1, generator())


def test_counting() -> None:
    assert count(loader()) == 5
    assert count(type("Endless", (), {"__iter__": lambda self: iter(range(3))})()) == 3
    with pytest.raises(InvalidTask, match="only once"):
        count(x for x in range(3))
    with pytest.raises(InvalidTask, match="yields no batches"):
        count([])


def test_moving_keeps_the_nesting() -> None:
    pair = namedtuple("pair", "a b")
    batch = {"x": [torch.ones(2), "name"], "y": pair(torch.ones(1), (torch.zeros(1),))}
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"][0].is_meta
    assert moved["x"][1] == "name"
    assert isinstance(moved["y"], pair)
    assert moved["y"].b[0].is_meta
