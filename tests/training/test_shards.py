"""The parts of every batch that many processes get."""

from typing import Any

import pytest
import torch
from sources import LABELS, Stream, generator, loader, seen
from torch.utils.data import DataLoader, Dataset

from secateur.errors import InvalidData
from secateur.training.batches import count, draw
from secateur.training.shards import shard, weighted


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


@pytest.mark.parametrize(
    ("source", "rank", "world", "got"),
    [(loader(), 2, 2, 2), (loader(), -1, 1, -1), (loader(), 0, 9, 8), ([["a", "b"]], 0, 2, "list")],
)
def test_processes_that_do_not_fit_are_refused(source: Any, rank: int, world: int, got: Any) -> None:
    with pytest.raises(InvalidData) as caught:
        list(shard(source, rank, world))
    assert caught.value.got == got
