"""One process's part of every batch, where several processes train one model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from secateur.errors import InvalidData
from secateur.nested import map_tensors
from secateur.training.batches import loads_by_index, num_examples, rebuild


def shard(batches: Iterable[Any], rank: int, world: int) -> Iterable[Any]:
    """The part of every batch for process `rank` of `world`.

    A source may have a method `shard(rank, world)` for this. A DataLoader over a dataset with a length is rebuilt so
    that it loads the part only; of anything else every process loads whole batches and cuts them. Parts are contiguous
    and as even as possible; a batch with fewer examples than processes is left out. All processes must start from the
    same seed.
    """
    if world == 1 and rank == 0:
        return batches
    if hasattr(batches, "shard"):
        return batches.shard(rank, world)  # pyright: ignore
    # Without a batch sampler the dataset gives whole batches.
    if loads_by_index(batches) and batches.batch_sampler is not None:
        return LoaderShard(batches, rank, world)
    return CutBatches(batches, rank, world)


def weighted(batches: Iterable[Any]) -> Iterator[tuple[float, Any]]:
    """Pairs of a weight and a batch: for a part its size over the mean size of all parts, otherwise 1.

    The mean over processes of weight times mean loss is the mean loss of the whole batch.
    """
    if hasattr(batches, "weighted"):
        return batches.weighted()  # pyright: ignore
    return ((1.0, batch) for batch in batches)


def alike(batches: Iterable[Any]) -> bool:
    """Whether the parts of a batch that divides evenly have the same shapes in all processes, as far as is known."""
    return getattr(batches, "alike", False)


def full_size(batches: Any) -> int:
    """How many examples every batch but the last has at least; 0 where that is not known, or there is one batch."""
    world = batches.world if isinstance(batches, BatchShard) else 1
    size = getattr(batches.batches if isinstance(batches, BatchShard) else batches, "batch_size", None)
    try:
        several = len(batches) > 1  # pyright: ignore[reportArgumentType]
    except TypeError:
        several = True
    return size // world if isinstance(size, int) and several else 0


class BatchShard(ABC):
    """One process's part of every batch."""

    def __init__(self, batches: Any, rank: int, world: int) -> None:
        if not 0 <= rank < world:
            raise InvalidData("the rank of a process is out of range", got=rank, wanted=f"0 to {world - 1}")
        size = getattr(batches, "batch_size", None)
        if isinstance(size, int) and size < world:
            raise InvalidData("batches are too small", got=size, wanted=f"an example for each of {world} processes")
        self.batches, self.rank, self.world = batches, rank, world

    @property
    def alike(self) -> bool:
        """Whether parts of one size have one shape: they are cut from the same batch."""
        return True

    @abstractmethod
    def weighted(self) -> Iterator[tuple[float, Any]]:
        """Pairs of a weight and the part of a batch, as the function of that name gives them."""

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in self.weighted())

    def part(self, size: int) -> tuple[float, slice] | None:
        """Weight and place of the part in a batch of that size; None if some process would get nothing."""
        if size < self.world:
            return None
        here = slice(self.rank * size // self.world, (self.rank + 1) * size // self.world)
        return (here.stop - here.start) * self.world / size, here

    def count(self, examples: int, drop_last: bool) -> int:
        """The number of batches that so many examples make."""
        full, rest = divmod(examples, self.batches.batch_size)
        return full + (not drop_last and rest >= self.world)


class LoaderShard(BatchShard):
    """Part of a DataLoader's batches. Only the part is loaded; the order is the one that the loader would draw."""

    @property
    def alike(self) -> bool:
        return self.batches.collate_fn is default_collate  # another may fill up each part by itself

    def __len__(self) -> int:
        if not self.batches.batch_size:
            raise TypeError("a user's own batch sampler does not tell the size of its batches")
        return self.count(len(self.batches.sampler), self.batches.drop_last)

    def weighted(self) -> Iterator[tuple[float, Any]]:
        # Workers run ahead, so weights wait here for their batches, which come in the same order.
        weights: deque[float] = deque()
        parts = IndexParts(self, weights)
        loader = rebuild(self.batches, self.batches.dataset, batch_sampler=parts, generator=self.batches.generator)
        for batch in loader:
            yield weights.popleft(), batch


class IndexParts:
    """A batch sampler that cuts another's batches of indices, and notes the weight of each part."""

    def __init__(self, whole: LoaderShard, weights: deque[float]) -> None:
        self.whole, self.weights = whole, weights

    def __iter__(self) -> Iterator[list[Any]]:
        for indices in self.whole.batches.batch_sampler:
            part = self.whole.part(len(indices))
            if part is not None:
                self.weights.append(part[0])
                yield indices[part[1]]


class CutBatches(BatchShard):
    """Part of any other source's batches: every tensor is cut whose first axis is as long as the first tensor's.

    It has no length, since only the batches themselves show whether one is too small to be cut.
    """

    def weighted(self) -> Iterator[tuple[float, Any]]:
        for batch in self.batches:
            size = _size(batch)
            part = self.part(size)
            if part is not None:
                yield part[0], map_tensors(batch, lambda t, size=size, here=part[1]: _cut(t, size, here))


def _size(batch: Any) -> int:
    size = num_examples(batch)
    if isinstance(batch, (tuple, list)) and any(_is_listed(part) for part in batch):
        raise InvalidData(
            "a batch holds an object for each example, and cannot be cut into parts for several processes",
            remedy="Use a DataLoader over a dataset with a length",
        )
    if size is None:
        raise InvalidData(
            "a batch holds no tensor to cut into parts for several processes",
            got=type(batch).__name__,
            remedy="Give the source of the batches a method shard(rank, world)",
        )
    return size


def _is_listed(part: Any) -> bool:
    """Whether these are the targets of a detector: a dict for each image."""
    return isinstance(part, (tuple, list)) and bool(part) and all(isinstance(each, Mapping) for each in part)


def _cut(tensor: Tensor, size: int, here: slice) -> Tensor:
    return tensor[here] if tensor.dim() and tensor.shape[0] == size else tensor
