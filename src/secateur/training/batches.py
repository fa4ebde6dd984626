"""Batches: from any source, to the model's device, and parts of them drawn at random."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

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
    if loads_by_index(batches) and batches.batch_size:
        # What the loader's own sampler would give, which may be some of the examples only, and some more than once.
        given = torch.as_tensor(list(batches.sampler))
        labels = _labels(batches.dataset)[given] if per_class else None
        chosen = given[choose(given.numel(), labels, fraction, per_class, generator)]
        if per_class is None and chosen.numel() > batches.batch_size > 1 and chosen.numel() % batches.batch_size == 1:
            chosen = chosen[:-1]  # which would be a batch by itself, and norms cannot train on one
        drops = batches.drop_last and chosen.numel() >= batches.batch_size
        part = Subset(batches.dataset, chosen.tolist())
        return rebuild(batches, part, batch_size=batches.batch_size, shuffle=True, drop_last=drops)
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


def rebuild(loader: DataLoader, dataset: Any, **sampling: Any) -> DataLoader:
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
    fresh = copy.copy(source)
    # Set behind its back, for it refuses; and a loader may hold another one, as Accelerate's does.
    inner = {name: reseed(value, seed) for name, value in vars(source).items() if isinstance(value, DataLoader)}
    vars(fresh).update(inner, persistent_workers=False, _iterator=None)
    return fresh


def loads_by_index(source: Any) -> TypeGuard[DataLoader]:
    """Whether a loader can be rebuilt over other indices. One with an iteration of its own would lose that."""
    plain = isinstance(source, DataLoader) and type(source).__iter__ is DataLoader.__iter__
    return plain and not isinstance(source.dataset, IterableDataset)


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
