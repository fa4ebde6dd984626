"""Batches: from any source, to a device, and parts of the data drawn at random."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from secateur.errors import InvalidData, InvalidSetting
from secateur.nested import map_tensors, tensors_in


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter; the CPU if it has none."""
    return next((t.device for t in model.parameters()), torch.device("cpu"))


def to_device(batch: Any, device: torch.device) -> Any:
    """The same nesting of tuples, lists and dicts with every tensor on the device."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def prefetch(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches on the device; the next one is copied to a GPU while the present one is used."""
    if device.type != "cuda":
        for batch in batches:
            yield to_device(batch, device)
        return
    stream = torch.cuda.Stream(device)
    copied: deque[Any] = deque()
    for batch in batches:
        if not copied and _is_on(batch, device):
            yield batch
            continue
        if copied:
            # Before the next copy starts, so that the batch does not wait for that one as well.
            hand_over(copied[0], stream, device)
        with torch.cuda.stream(stream):
            copied.append(to_device(batch, device))
        if len(copied) > 1:
            yield copied.popleft()
    if copied:
        hand_over(copied[0], stream, device)
        yield copied.popleft()


def _is_on(batch: Any, device: torch.device) -> bool:
    return all(tensor.device == device for tensor in tensors_in(batch))


def hand_over(batch: Any, stream: torch.cuda.Stream, device: torch.device) -> None:
    """Let the current stream use what was made on another one."""
    current = torch.cuda.current_stream(device)
    current.wait_stream(stream)
    # A later copy must not get the memory while the current stream still reads it.
    map_tensors(batch, lambda tensor: tensor.record_stream(current))


def count(batches: Iterable[Any]) -> int:
    """The number of batches; a source without a length is iterated once."""
    if batches is None:
        raise InvalidData("there are no training data", wanted="a DataLoader or a list of batches")
    check_repeats(batches, "training")
    try:
        number = len(batches)  # pyright: ignore[reportArgumentType]
    except TypeError:
        number = sum(1 for _ in batches)
    if not number:
        raise InvalidData("the training data are empty", wanted="one batch or more")
    return number


def num_examples(batch: Any) -> int | None:
    """How many examples a batch has, by its first tensor with axes; None where it has none.

    Lists of images with as many targets count as many: ([image, image], [{"boxes": ...}, {"boxes": ...}]).
    """
    match batch:
        case [[*images], [{}, *_] as targets] if len(images) == len(targets):
            return len(images)
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()), None)


def is_finite(batch: Any) -> Tensor | bool:
    """Whether no fraction in a batch is NaN or infinite; computed on their device, without waiting for it."""
    fractions = [tensor for tensor in tensors_in(batch) if tensor.is_floating_point() and tensor.numel()]
    ends = [end.isfinite() for tensor in fractions for end in tensor.aminmax()]
    return torch.stack(ends).all() if ends else True


def check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InvalidSetting("batch_size is out of range", got=batch_size, wanted="1 or more")


def check_repeats(batches: Iterable[Any] | None, what: str) -> None:
    """Raise for what cannot be iterated, or only once."""
    can_be_iterated = batches is None or any(hasattr(batches, name) for name in ("__iter__", "__getitem__"))
    if not can_be_iterated or isinstance(batches, Iterator):
        problem = "can be iterated only once" if can_be_iterated else "hold no batches"
        got, wanted = type(batches).__name__, "a DataLoader or a list of batches"
        raise InvalidData(f"the {what} data {problem}", got=got, wanted=wanted)


def draw(batches: Iterable[Any], fraction: float, per_class: int | None, generator: torch.Generator) -> Iterable[Any]:
    """A part of the data, drawn at random: this fraction of it, or this many examples per class.

    A source may have a method `subset(fraction, per_class, generator)` for this. A DataLoader over a dataset with a
    length is rebuilt over part of it; from anything else whole batches are taken.
    """
    if fraction == 1 and per_class is None:
        return batches
    if hasattr(batches, "subset"):
        return batches.subset(fraction, per_class, generator)  # pyright: ignore
    if loads_by_index(batches) and batches.batch_size:
        # As the loader's own sampler gives them: perhaps only some, and some more than once.
        given = torch.as_tensor(list(batches.sampler))
        labels = _labels(batches.dataset)[given] if per_class else None
        chosen = given[choose(given.numel(), labels, fraction, per_class, generator)]
        chosen = chosen if per_class else without_single(chosen, batches.batch_size)
        drops = batches.drop_last and chosen.numel() >= batches.batch_size
        part = Subset(batches.dataset, chosen.tolist())
        return rebuild(batches, part, batch_size=batches.batch_size, shuffle=True, drop_last=drops)
    if per_class is not None:
        raise InvalidData(
            "examples per class cannot be drawn from these training data",
            got=type(batches).__name__,
            wanted="a DataLoader over a dataset with labels, or a method subset(fraction, per_class, generator)",
            remedy="Use a fraction instead",
        )
    number = count(batches)
    return Part(batches, set(torch.randperm(number, generator=generator)[: max(1, round(fraction * number))].tolist()))


@dataclass(frozen=True)
class Part:
    """Some batches of a source, each loaded when it is needed."""

    batches: Iterable[Any]
    places: set[int]

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[Any]:
        some = islice(self.batches, max(self.places) + 1)
        return (batch for place, batch in enumerate(some) if place in self.places)


def unaugmented(batches: Any) -> Any:
    """The same data without augmentation, where the source has a method of that name; else as they are."""
    return batches.unaugmented() if hasattr(batches, "unaugmented") else batches


def share_of(batches: Iterable[Any], images: int) -> float:
    """The share of the data that so many images are, about; at most 1."""
    size = getattr(batches, "batch_size", None)
    if not isinstance(size, int):
        size = num_examples(next(iter(batches))) or 1
    return min(1.0, images / max(1, count(batches) * size))


def choose(
    size: int, labels: Tensor | None, fraction: float, per_class: int | None, generator: torch.Generator
) -> Tensor:
    """Indices of a random part, in random order: a fraction of all, or `per_class` of every class."""
    order = torch.randperm(size, generator=generator, device="cpu")
    if per_class is None or labels is None:
        return order[: max(1, round(fraction * size))]
    if labels.dim() != 1 or labels.numel() != size:
        raise InvalidData(
            "examples per class cannot be drawn",
            got=f"labels of shape {tuple(labels.shape)} for {size} examples",
            wanted="one class for each",
            remedy="Use a fraction instead",
        )
    by_class = order[torch.argsort(labels[order], stable=True)]
    _, sizes = torch.unique_consecutive(labels[by_class], return_counts=True)
    place = torch.arange(size, device="cpu") - torch.repeat_interleave(torch.cumsum(sizes, 0) - sizes, sizes)
    chosen = by_class[place < per_class]
    return chosen[torch.randperm(chosen.numel(), generator=generator, device="cpu")]


def without_single(chosen: Tensor, batch_size: int) -> Tensor:
    """Without the last one if it would be a batch of its own: norms cannot train on one example."""
    return chosen[:-1] if chosen.numel() > batch_size > 1 and chosen.numel() % batch_size == 1 else chosen


def rebuild(loader: DataLoader, dataset: Any, **sampling: Any) -> DataLoader:
    """A loader like the given one, over another dataset or in another order."""
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
    """The source in a state that depends on the seed alone: its generators and those of its samplers are seeded, and
    its workers do not persist from one epoch to the next.
    """
    batch_sampler = getattr(source, "batch_sampler", None)
    for holder in (source, getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
    if not isinstance(source, DataLoader) or not source.persistent_workers:
        return source
    fresh = copy.copy(source)
    # Not by setattr, which a loader refuses. A loader may hold another one, as Accelerate's does.
    inner = {name: reseed(value, seed) for name, value in vars(source).items() if isinstance(value, DataLoader)}
    vars(fresh).update(inner, persistent_workers=False, _iterator=None)
    return fresh


def loads_by_index(source: Any) -> TypeGuard[DataLoader]:
    """Whether a loader can be rebuilt over other indices; a subclass with its own `__iter__` cannot."""
    plain = isinstance(source, DataLoader) and type(source).__iter__ is DataLoader.__iter__
    return plain and not isinstance(source.dataset, IterableDataset)


def _labels(dataset: Any) -> Tensor:
    for name in ("targets", "labels"):
        if getattr(dataset, name, None) is not None:
            return _numbers(getattr(dataset, name))
    tensors = getattr(dataset, "tensors", ())
    if len(tensors) > 1:
        return tensors[1].cpu()
    if isinstance(dataset, Subset):
        return _labels(dataset.dataset)[torch.as_tensor(dataset.indices)]
    raise InvalidData(
        "examples per class cannot be drawn from a dataset without labels",
        got=type(dataset).__name__,
        wanted="an attribute `targets`",
        remedy="Use a fraction instead",
    )


def _numbers(labels: Any) -> Tensor:
    """Labels as numbers; names are numbered in order of appearance."""
    if isinstance(labels, Tensor) or getattr(getattr(labels, "dtype", None), "kind", None) in ("b", "i", "u"):
        return torch.as_tensor(labels).cpu()
    listed = [label.item() if isinstance(label, Tensor) and label.numel() == 1 else label for label in labels]
    number = {label: index for index, label in enumerate(dict.fromkeys(listed))}
    return torch.tensor([number[label] for label in listed], device="cpu")
