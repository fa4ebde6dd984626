"""Parts of the data, drawn at random, and their way to the device."""

from collections import Counter, UserDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from sources import LABELS, Stream, generator, loader, seen
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from secateur.errors import InvalidData
from secateur.training.batches import count, draw, num_examples, prefetch, reseed, to_device
from secateur.training.shards import shard, weighted

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
    few = [y for _, ys in draw(DataLoader(dataset, batch_size=5), 1.0, 9, generator()) for y in ys.tolist()]
    assert Counter(few) == dict.fromkeys(range(4), 7 if kind == "subset" else 9)
    if kind == "subset":
        assert min(seen(part)) >= 12


def test_the_new_loader_collates_like_the_old_one() -> None:
    doubled = loader(collate_fn=lambda items: (torch.stack([2 * x for x, _ in items]), None))
    assert all(x % 2 == 0 for x in seen(draw(doubled, 0.5, None, generator())))
    assert seen(shard(doubled, 0, 4))[:3] == [0, 2, 16]


def test_whole_batches_of_anything_else() -> None:
    with pytest.raises(InvalidData):
        draw(DataLoader(Noise()), 1.0, 1, generator())  # of a dataset without labels
    for source in (DataLoader(Stream(), batch_size=8), [(torch.arange(8.0) + 8 * i, None) for i in range(5)]):
        part = list(draw(source, 0.4, None, generator()))
        assert len(part) == 2
        with pytest.raises(InvalidData):
            draw(source, 1.0, 3, generator())


def test_counting() -> None:
    assert count(loader()) == 5
    assert count(type("Endless", (), {"__iter__": lambda self: iter(range(3))})()) == 3
    for wrong in ((x for x in range(3)), [], lambda: [1]):
        with pytest.raises(InvalidData):
            count(wrong)  # pyright: ignore


def test_moving_keeps_the_nesting() -> None:
    pair = namedtuple("pair", "a b")
    batch = {"x": [torch.ones(2), "name"], "y": pair(torch.ones(1), (torch.zeros(1),))}
    moved = to_device(batch, torch.device("meta"))
    assert moved["x"][0].is_meta
    assert moved["x"][1] == "name"
    assert isinstance(moved["y"], pair)
    assert moved["y"].b[0].is_meta


def test_on_the_cpu_there_is_nothing_to_fetch_ahead() -> None:
    batches = [(torch.ones(2), 1), (torch.zeros(2), 2)]
    fetched = list(prefetch(batches, torch.device("cpu")))
    assert all(a[0] is b[0] and a[1] == b[1] for a, b in zip(fetched, batches, strict=True))
    assert next(prefetch(batches, torch.device("meta")))[0].is_meta


@on_gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_a_gpu_gets_every_batch_whole(pinned: bool) -> None:
    device = torch.device("cuda")
    batches = [(torch.full((1 << 22,), float(i)), {"number": i}) for i in range(20)]
    if pinned:
        batches = [(images.pin_memory(), rest) for images, rest in batches]
    sums = []
    for weight, (images, rest) in prefetch(weighted(batches), device):
        assert images.is_cuda
        assert weight == 1
        # Long work, after which the batch must still be what it was when it was handed out.
        busy = torch.ones(2048, 2048, device=device)
        for _ in range(10):
            busy = busy @ busy / 2048
        sums.append((rest["number"], (images * busy[0, 0]).mean()))
        del images
    assert [number for number, _ in sums] == [round(float(mean)) for _, mean in sums] == list(range(20))
    assert list(prefetch([], device)) == []


@on_gpu
def test_the_next_copy_is_under_way_while_the_present_batch_is_used() -> None:
    asked = []

    def source() -> Any:
        for i in range(3):
            asked.append(i)
            yield torch.ones(4)

    batches = prefetch(source(), torch.device("cuda"))
    next(batches)
    assert asked == [0, 1]


@pytest.mark.parametrize("how", [(0.5, None), (1.0, 3)])
def test_a_part_is_drawn_from_what_the_sampler_gives(how: tuple[float, int | None]) -> None:
    own = list(range(24))
    part = seen(draw(loader(sampler=SubsetRandomSampler(own)), *how, generator()))
    assert len(part) == len(set(part)) == 12
    assert set(part) <= set(own)
    weights = torch.where(torch.arange(40) < 4, 36.0, 4.0)  # a tenth of the examples, half of what is drawn
    torch.manual_seed(0)
    part = seen(draw(loader(sampler=WeightedRandomSampler(weights.tolist(), 400)), 0.5, None, generator()))
    assert len(part) == 200
    assert 70 < sum(x < 4 for x in part) < 130


def test_labels_are_the_second_tensor_or_names() -> None:
    class Named(TensorDataset):
        labels = tuple("abcd"[label] for label in LABELS)

    more = TensorDataset(torch.arange(40.0), LABELS, torch.arange(40))
    for dataset in (more, Named(torch.arange(40.0), torch.arange(40))):
        drawn = [int(x) for x, *_ in draw(DataLoader(dataset, batch_size=1), 1.0, 2, generator())]
        assert Counter(LABELS[drawn].tolist()) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_seeds_reach_the_samplers_own_generators() -> None:
    source = loader(sampler=RandomSampler(range(40), generator=generator(5)))
    first = seen(reseed(source, 1))
    assert seen(source) != first
    assert seen(reseed(source, 1)) == first


def test_workers_that_live_on_are_made_anew() -> None:
    source = loader(num_workers=1, persistent_workers=True, sampler=SubsetRandomSampler(range(20)), drop_last=True)
    fresh = reseed(source, 1)
    assert not fresh.persistent_workers
    torch.manual_seed(0)
    expected = seen(source)
    torch.manual_seed(0)
    assert seen(fresh) == expected
    assert len(expected) == 16
    assert len(seen(draw(fresh, 0.25, None, generator()))) == 5, "of examples, not of batches"


class Shifted(DataLoader):
    """Does something to every batch, as loaders that normalise or mix images do."""

    def __iter__(self) -> Any:
        for images, labels in super().__iter__():
            yield images + 1000, labels


def test_a_loader_with_an_iteration_of_its_own_keeps_it() -> None:
    dataset = TensorDataset(torch.arange(40.0), LABELS)
    source = Shifted(dataset, batch_size=8, num_workers=1, persistent_workers=True)
    assert seen(reseed(source, 0)) == [1000 + n for n in range(40)]
    assert not reseed(source, 0).persistent_workers
    part = seen(draw(source, 0.4, None, generator()))
    assert len(part) == 16
    assert min(part) >= 1000
    with pytest.raises(InvalidData):
        draw(source, 1.0, 2, generator())
    both = [int(x) for rank in (0, 1) for _, (images, _) in weighted(shard(source, rank, 2)) for x in images]
    assert sorted(both) == [1000 + n for n in range(40)]


class Wrapping(Shifted):
    """Iterates over a loader that it holds, as Accelerate's does."""

    def __init__(self, held: DataLoader) -> None:
        super().__init__(held.dataset, num_workers=1, persistent_workers=True)
        self.held = held

    def __iter__(self) -> Any:
        return iter(self.held)


class Noise(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_workers_of_a_loader_within_are_made_anew_too() -> None:
    source = Wrapping(DataLoader(Noise(), batch_size=4, num_workers=1, persistent_workers=True))
    passes = []
    for _ in range(2):
        torch.manual_seed(5)
        passes.append(torch.cat(list(reseed(source, 5))))
    assert torch.equal(*passes)


def test_no_part_ends_in_a_batch_of_one() -> None:
    fraction = 17 / 40
    assert [len(labels) for _, labels in draw(loader(), fraction, None, generator())] == [8, 8]
    assert [len(labels) for _, labels in draw(loader(), 1 / 40, None, generator())] == [1], "all there is"
    for share, sizes in ((0.5, [8, 8]), (0.1, [4])):
        assert [len(labels) for _, labels in draw(loader(drop_last=True), share, None, generator())] == sizes
    ones = DataLoader(TensorDataset(torch.arange(40.0), LABELS), batch_size=1)
    assert len(list(draw(ones, fraction, None, generator()))) == 17


class Numbers(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(10))


def test_streams_and_whole_batches_of_workers_that_live_on() -> None:
    source = DataLoader(Numbers(), batch_size=4, drop_last=True, num_workers=1, persistent_workers=True)
    assert [len(batch) for batch in reseed(source, 0)] == [4, 4]
    single = DataLoader(TensorDataset(LABELS), batch_size=None, num_workers=1, persistent_workers=True)
    assert len(list(reseed(single, 0))) == 40


def test_a_part_of_a_stream_is_loaded_as_it_is_needed() -> None:
    loaded: list[int] = []

    class Noting:
        def __iter__(self) -> Iterator[int]:
            for number in range(10):
                loaded.append(number)
                yield number

    part = draw(Noting(), 0.3, None, generator())
    del loaded[:]  # it was counted
    chosen = iter(part)
    first = next(chosen)
    assert loaded == list(range(first + 1))
    numbers = [first, *chosen]
    assert len(part) == len(numbers) == 3
    assert loaded == list(range(max(numbers) + 1))


def test_a_list_of_images_counts_them() -> None:
    images = [torch.zeros(3, 8, size) for size in (7, 9)]
    targets = [{"boxes": torch.zeros(number, 4)} for number in (1, 5)]
    assert num_examples((images, targets)) == num_examples([tuple(images), tuple(targets)]) == 2
    assert num_examples(((torch.zeros(5, 2, 3), torch.zeros(5, 2, 3)), torch.zeros(5))) == 5


@pytest.mark.parametrize("kind", [torch.tensor, numpy.array, lambda labels: [torch.tensor(label) for label in labels]])
def test_labels_of_every_kind_are_classes(kind: Callable[[list[int]], Any]) -> None:
    dataset = TensorDataset(torch.arange(40.0), LABELS)
    dataset.targets = kind(LABELS.tolist())  # pyright: ignore[reportAttributeAccessIssue]
    part = draw(DataLoader(dataset, batch_size=5), 1.0, 3, generator())
    assert Counter(int(label) for _, labels in part for label in labels) == dict.fromkeys(range(4), 3)


def test_labels_that_are_no_classes_are_refused() -> None:
    dataset = TensorDataset(torch.arange(40.0), LABELS)
    dataset.targets = numpy.eye(4)[LABELS].astype(int)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(InvalidData, match="one class for each"):
        draw(DataLoader(dataset, batch_size=5), 1.0, 3, generator())


def test_other_mappings_are_moved_too() -> None:
    batch = UserDict(image=torch.ones(2), label=3)
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is UserDict
    assert (moved["image"].device.type, moved["label"], batch["image"].device.type) == ("meta", 3, "cpu")


def test_no_training_data_at_all() -> None:
    with pytest.raises(InvalidData, match="no training data"):
        count(None)  # pyright: ignore[reportArgumentType]
