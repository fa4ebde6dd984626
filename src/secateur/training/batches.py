"""Batches: from any source, to the model's device, parts of them, and shares for many processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from secateur.errors import InvalidTask
from secateur.nested import map_tensors


def device_of(model: nn.Module) -> torch.device:
    return next((t.device for t in model.parameters()), torch.device("cpu"))


def to_device(batch: Any, device: torch.device) -> Any:
    """The same nesting of tuples, lists and dicts with every tensor on the device."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def on_device(batches: Iterable[Any], model: nn.Module) -> Iterator[Any]:
    device = device_of(model)
    for batch in batches:
        yield to_device(batch, device)


def prefetch(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches on the device; to a GPU the next one is copied while the present one is used."""
    if device.type != "cuda":
        for batch in batches:
            yield to_device(batch, device)
        return
    beside = torch.cuda.Stream(device)
    copied: deque[Any] = deque()
    for batch in batches:
        if not copied and _is_on(batch, device):
            yield batch
            continue
        if copied:
            # Waited for before the next copy is begun, so that it is not waited for as well.
            hand_over(copied[0], beside, device)
        with torch.cuda.stream(beside):
            copied.append(to_device(batch, device))
        if len(copied) > 1:
            yield copied.popleft()
    if copied:
        hand_over(copied[0], beside, device)
        yield copied.popleft()


def _is_on(batch: Any, device: torch.device) -> bool:
    elsewhere: list[Tensor] = []
    map_tensors(batch, lambda tensor: elsewhere.append(tensor) if tensor.device != device else None)
    return not elsewhere


def hand_over(batch: Any, beside: torch.cuda.Stream, device: torch.device) -> None:
    """Let the present stream use what was made on the one beside it."""
    present = torch.cuda.current_stream(device)
    present.wait_stream(beside)
    # The memory must not be given to a later copy while the present stream still reads it.
    map_tensors(batch, lambda tensor: tensor.record_stream(present))


def count(batches: Iterable[Any]) -> int:
    """How many batches there are; sources without a length are gone through once."""
    check_repeats(batches, "training")
    try:
        number = len(batches)  # pyright: ignore[reportArgumentType]
    except TypeError:
        number = sum(1 for _ in batches)
    if not number:
        raise InvalidTask("the training data yields no batches")
    return number


def check_repeats(batches: Iterable[Any] | None, what: str) -> None:
    """Raise for a generator and its like, and for what holds no batches at all."""
    if batches is not None and not any(hasattr(batches, name) for name in ("__iter__", "__getitem__")):
        raise InvalidTask(f"the {what} data must be a DataLoader or a list of batches, got {type(batches).__name__}")
    if isinstance(batches, Iterator):
        raise InvalidTask(f"the {what} data can be gone through only once: pass a DataLoader or a list")


def draw(batches: Iterable[Any], fraction: float, per_class: int | None, generator: torch.Generator) -> Iterable[Any]:
    """A part of the data, drawn at random: this fraction of it, or this many examples per class.

    A source with a method `subset(fraction, per_class, generator)` is asked; a DataLoader over a dataset with a length
    is rebuilt over part of it; of anything else whole batches are taken.
    """
    if fraction == 1 and per_class is None:
        return batches
    if hasattr(batches, "subset"):
        return batches.subset(fraction, per_class, generator)  # pyright: ignore
    if isinstance(batches, DataLoader) and batches.batch_size and not _streams(batches):
        # What the loader's own sampler would give, which may be some of the examples only, and some more than once.
        given = torch.as_tensor(list(batches.sampler))
        labels = _labels(batches.dataset)[given] if per_class else None
        chosen = given[choose(given.numel(), labels, fraction, per_class, generator)]
        drops = batches.drop_last and chosen.numel() >= batches.batch_size
        part = Subset(batches.dataset, chosen.tolist())
        return _rebuild(batches, part, batch_size=batches.batch_size, shuffle=True, drop_last=drops)
    if per_class is not None:
        raise InvalidTask(
            "examples per class can be drawn from a DataLoader over a dataset with labels, or from a source with a "
            "method subset(fraction, per_class, generator); use a fraction instead"
        )
    number = count(batches)
    chosen = set(torch.randperm(number, generator=generator)[: max(1, round(fraction * number))].tolist())
    return [batch for index, batch in enumerate(batches) if index in chosen]


def choose(
    size: int, labels: Tensor | None, fraction: float, per_class: int | None, generator: torch.Generator
) -> Tensor:
    """Indices of a random part, in random order: of every class the same number, or a fraction of all."""
    order = torch.randperm(size, generator=generator, device="cpu")
    if per_class is None or labels is None:
        return order[: max(1, round(fraction * size))]
    by_class = order[torch.argsort(labels[order], stable=True)]
    _, sizes = torch.unique_consecutive(labels[by_class], return_counts=True)
    place = torch.arange(size, device="cpu") - torch.repeat_interleave(torch.cumsum(sizes, 0) - sizes, sizes)
    chosen = by_class[place < per_class]
    return chosen[torch.randperm(chosen.numel(), generator=generator, device="cpu")]


def _rebuild(loader: DataLoader, dataset: Any, **sampling: Any) -> DataLoader:
    """A loader that works like the given one, over another dataset or in another order."""
    return DataLoader(
        dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        **sampling,
    )


def reseed(source: Any, seed: int) -> Any:
    """The source in a state that depends on the seed alone: generators of its own and of its samplers are seeded, and
    workers that would live on from one epoch to the next are not kept.
    """
    batch_sampler = getattr(source, "batch_sampler", None)
    for holder in (source, getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
    if not isinstance(source, DataLoader) or not source.persistent_workers:
        return source
    sampling: dict[str, Any] = {"batch_size": source.batch_size, "drop_last": source.drop_last}
    if not _streams(source):
        own = source.batch_sampler is not None
        sampling = {"batch_sampler": source.batch_sampler} if own else {"batch_size": None, "sampler": source.sampler}
    return _rebuild(source, source.dataset, generator=source.generator, **sampling)


def _streams(loader: DataLoader) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _labels(dataset: Any) -> Tensor:
    for name in ("targets", "labels"):
        if hasattr(dataset, name):
            return _numbers(getattr(dataset, name))
    tensors = getattr(dataset, "tensors", ())
    if len(tensors) > 1:
        return tensors[1].cpu()
    if isinstance(dataset, Subset):
        return _labels(dataset.dataset)[torch.as_tensor(dataset.indices)]
    raise InvalidTask(
        f"{type(dataset).__name__} has no labels to draw examples per class by: give it an attribute `targets`, or use "
        "a fraction"
    )


def _numbers(labels: Any) -> Tensor:
    """Labels as numbers; names are numbered."""
    if isinstance(labels, Tensor):
        return labels.cpu()
    listed = list(labels)
    number = {label: index for index, label in enumerate(dict.fromkeys(listed))}
    return torch.tensor([number[label] for label in listed], device="cpu")


def shard(batches: Iterable[Any], rank: int, world: int) -> Iterable[Any]:
    """The part of every batch that falls to process `rank` of `world`; `weighted` tells how much each part counts.

    A source with a method `shard(rank, world)` is asked; a DataLoader over a dataset with a length is rebuilt so that
    it loads the part only; of anything else every process goes through all and cuts. Parts are contiguous and as even
    as can be; a batch with fewer examples than processes is left out. All processes must start from the same seed.
    """
    if not 0 <= rank < world:
        raise InvalidTask(f"a process's rank goes from 0 to {world - 1}, got {rank}")
    if world == 1:
        return batches
    if hasattr(batches, "shard"):
        return batches.shard(rank, world)  # pyright: ignore
    # Without a batch sampler the dataset gives whole batches.
    if isinstance(batches, DataLoader) and batches.batch_sampler is not None and not _streams(batches):
        return LoaderShard(batches, rank, world)
    return CutBatches(batches, rank, world)


def weighted(batches: Iterable[Any]) -> Iterator[tuple[float, Any]]:
    """Each batch behind its weight: for a part of `shard` its size over the mean size of all parts, otherwise 1.

    The mean over processes of weight times mean loss is the mean loss of the whole batch.
    """
    if hasattr(batches, "weighted"):
        return batches.weighted()  # pyright: ignore
    return ((1.0, batch) for batch in batches)


class BatchShard(ABC):
    """One process's part of every batch."""

    def __init__(self, batches: Any, rank: int, world: int) -> None:
        self.batches, self.rank, self.world = batches, rank, world

    @abstractmethod
    def weighted(self) -> Iterator[tuple[float, Any]]: ...

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in self.weighted())

    def part(self, size: int) -> tuple[float, slice] | None:
        """Weight and place of the part in a batch of that size; none if some process would go without."""
        if size < self.world:
            return None
        here = slice(self.rank * size // self.world, (self.rank + 1) * size // self.world)
        return (here.stop - here.start) * self.world / size, here


class LoaderShard(BatchShard):
    """Of a DataLoader: only the part is loaded. The order is the one that the loader itself would draw."""

    def __init__(self, batches: DataLoader, rank: int, world: int) -> None:
        super().__init__(batches, rank, world)
        if batches.batch_size and batches.batch_size < world:
            raise InvalidTask(f"batches of {batches.batch_size} cannot be cut into {world} parts: use larger batches")

    def __len__(self) -> int:
        if not self.batches.batch_size:
            raise TypeError("a batch sampler of the user's own does not tell how large its batches are")
        full, rest = divmod(len(self.batches.sampler), self.batches.batch_size)
        return full + (not self.batches.drop_last and rest >= self.world)

    def weighted(self) -> Iterator[tuple[float, Any]]:
        # Workers run ahead, so weights wait here for their batches, which come in the same order.
        weights: deque[float] = deque()
        parts = IndexParts(self, weights)
        loader = _rebuild(self.batches, self.batches.dataset, batch_sampler=parts, generator=self.batches.generator)
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
    """Of any other source: every tensor is cut whose first axis is as long as the first tensor's.

    It has no length, since only the batches themselves tell whether one is too small to be cut.
    """

    def weighted(self) -> Iterator[tuple[float, Any]]:
        for batch in self.batches:
            size = _size(batch)
            part = self.part(size)
            if part is not None:
                yield part[0], map_tensors(batch, lambda t, size=size, here=part[1]: _cut(t, size, here))


def _size(batch: Any) -> int:
    sizes: list[int] = []
    map_tensors(batch, lambda tensor: sizes.extend(tensor.shape[:1]))
    if not sizes:
        raise InvalidTask(
            f"a batch of type {type(batch).__name__} holds no tensor to cut into parts for several processes: give its "
            "source a method shard(rank, world)"
        )
    return sizes[0]


def _cut(tensor: Tensor, size: int, here: slice) -> Tensor:
    return tensor[here] if tensor.dim() and tensor.shape[0] == size else tensor
