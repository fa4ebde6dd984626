"""Parts of the data, drawn at random or cut for many processes, and their way to the device."""

from collections import Counter, namedtuple
from typing import Any

import pytest
import torch
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

from secateur import InvalidTask
from secateur.training.batches import count, draw, prefetch, reseed, shard, to_device, weighted

LABELS = torch.arange(40) % 4
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(zip(torch.arange(40.0), LABELS, strict=True))


class Uneven:
    """A batch sampler of the user's own, which does not tell its length."""

    def __iter__(self) -> Any:
        yield from ([0, 1, 2, 3, 4], [5, 6], [7], torch.randperm(20).tolist())


def sources() -> dict[str, Any]:
    listed = [(torch.arange(7.0) + 7 * i, LABELS[7 * i : 7 * i + 7]) for i in range(5)]
    dataset = loader().dataset
    return {
        "in order": DataLoader(dataset, batch_size=7),
        "shuffled": DataLoader(dataset, batch_size=7, shuffle=True),
        "full batches": DataLoader(dataset, batch_size=7, shuffle=True, drop_last=True),
        "own generator": DataLoader(dataset, batch_size=7, shuffle=True, generator=generator(3)),
        "own batches": DataLoader(dataset, batch_sampler=Uneven()),  # pyright: ignore
        "worker": DataLoader(dataset, batch_size=7, shuffle=True, num_workers=1),
        "stream": DataLoader(Stream(), batch_size=7),
        "batched stream": DataLoader(listed, batch_size=None),  # pyright: ignore
        "list": listed,
    }


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12, of workers
@pytest.mark.parametrize("world", [2, 3, 6])
@pytest.mark.parametrize("kind", sources())
def test_the_parts_of_all_processes_make_up_the_whole(kind: str, world: int) -> None:
    torch.manual_seed(0)
    whole = [batch for batch in sources()[kind] if len(batch[0]) >= world]
    parts = []
    for rank in range(world):
        part = shard(sources()[kind], rank, world)
        torch.manual_seed(0)
        parts.append(list(weighted(part)))
        assert count(part) == len(whole)
    for (images, labels), *cut in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat([part[0] for _, part in cut]), images)
        assert torch.equal(torch.cat([part[1] for _, part in cut]), labels)
        sizes = [len(part[0]) for _, part in cut]
        assert max(sizes) - min(sizes) <= 1
        assert [weight for weight, _ in cut] == [size * world / len(images) for size in sizes]


def test_every_pass_is_shuffled_anew_if_it_was_before() -> None:
    part = shard(loader(shuffle=True), 0, 2)
    assert seen(part) != seen(part)
    part = shard(loader(), 0, 2)
    assert seen(part) == seen(part) == [x for x in range(40) if x % 8 < 4]


def test_only_the_part_is_loaded() -> None:
    loaded = []

    class Watched(Dataset):
        def __getitem__(self, index: int) -> int:
            loaded.append(index)
            return index

        def __len__(self) -> int:
            return 12

    assert [batch.tolist() for batch in shard(DataLoader(Watched(), batch_size=4), 1, 2)] == [[2, 3], [6, 7], [10, 11]]
    assert loaded == [2, 3, 6, 7, 10, 11]


def test_passes_do_not_disturb_each_other() -> None:
    part = shard(DataLoader(list(range(11)), batch_size=5), 0, 2)  # pyright: ignore
    abandoned = weighted(part)
    next(abandoned)
    assert [weight for weight, _ in weighted(part)] == [0.8, 0.8]
    assert [weight for weight, _ in abandoned] == [0.8]


def test_a_loader_for_many_processes_collates_like_the_old_one() -> None:
    doubled = loader(collate_fn=lambda items: (torch.stack([2 * x for x, _ in items]), None))
    assert seen(shard(doubled, 0, 4))[:3] == [0, 2, 16]


def test_one_process_has_the_source_itself() -> None:
    for source in sources().values():
        assert shard(source, 0, 1) is source
    batches = [torch.ones(2), torch.ones(1)]
    assert all(w == 1 and a is b for (w, a), b in zip(weighted(shard(batches, 0, 1)), batches, strict=True))


def test_a_source_that_knows_how_is_asked() -> None:
    class Knows:
        def shard(self, rank: int, world: int) -> tuple[str, int, int]:
            return "asked", rank, world

    assert shard(Knows(), 1, 3) == ("asked", 1, 3)  # pyright: ignore


def test_what_is_not_of_the_batch_stays_whole() -> None:
    batch = {"images": torch.arange(4.0), "more": [torch.arange(8).reshape(4, 2), "name"], "scale": torch.tensor(3.0)}
    (cut,) = shard([{**batch, "weights": torch.ones(3)}], 1, 2)
    assert cut["images"].tolist() == [2, 3]
    assert cut["more"][0].tolist() == [[4, 5], [6, 7]]
    assert cut["more"][1] == "name"
    assert cut["scale"] == 3
    assert cut["weights"].shape == (3,)


@pytest.mark.parametrize("kind", ["shuffled", "list"])
def test_processes_share_what_is_drawn(kind: str) -> None:
    def drawn(rank: int, world: int) -> list[int]:
        torch.manual_seed(1)
        return seen(shard(draw(sources()[kind], 0.5, None, generator()), rank, world))

    parts = [drawn(rank, 2) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == sorted(drawn(0, 1))
    assert abs(len(parts[0]) - len(parts[1])) <= 3


def test_processes_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidTask, match="rank goes from 0 to 1, got 2"):
        shard(loader(), 2, 2)
    with pytest.raises(InvalidTask, match="batches of 8 cannot be cut into 9 parts"):
        shard(loader(), 0, 9)
    with pytest.raises(InvalidTask, match="a batch of type list holds no tensor to cut"):
        list(shard([["a", "b"]], 0, 2))


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


def test_a_last_batch_that_is_dropped_is_dropped_from_a_part_too() -> None:
    part = draw(loader(drop_last=True), 0.5, None, generator())
    assert [len(labels) for _, labels in part] == [8, 8]
    assert [len(labels) for _, labels in draw(loader(drop_last=True), 0.1, None, generator())] == [4]


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


def test_streams_and_whole_batches_of_workers_that_live_on() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(10))

    source = DataLoader(Stream(), batch_size=4, drop_last=True, num_workers=1, persistent_workers=True)
    assert [len(batch) for batch in reseed(source, 0)] == [4, 4]
    single = DataLoader(TensorDataset(LABELS), batch_size=None, num_workers=1, persistent_workers=True)
    assert len(list(reseed(single, 0))) == 40
