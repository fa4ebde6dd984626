"""Batches: from any source, to the model's device, and parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from secateur.errors import InvalidTask


def device_of(model: nn.Module) -> torch.device:
    return next((t.device for t in model.parameters()), torch.device("cpu"))


def to_device(batch: Any, device: torch.device) -> Any:
    """The same nesting of tuples, lists and dicts with every tensor on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(item, device) for item in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(to_device(item, device) for item in batch)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    return batch


def on_device(batches: Iterable[Any], model: nn.Module) -> Iterator[Any]:
    device = device_of(model)
    for batch in batches:
        yield to_device(batch, device)


def count(batches: Iterable[Any]) -> int:
    """How many batches there are; sources without a length are gone through once."""
    if isinstance(batches, Iterator):
        raise InvalidTask("the training data can be gone through only once: pass a DataLoader or a list")
    try:
        number = len(batches)  # pyright: ignore[reportArgumentType]
    except TypeError:
        number = sum(1 for _ in batches)
    if not number:
        raise InvalidTask("the training data yields no batches")
    return number


def draw(batches: Iterable[Any], fraction: float, per_class: int | None, generator: torch.Generator) -> Iterable[Any]:
    """A part of the data, drawn at random: this fraction of it, or this many examples per class.

    A source with a method `subset(fraction, per_class, generator)` is asked; a DataLoader over a dataset with a length
    is rebuilt over part of it; of anything else whole batches are taken.
    """
    if fraction == 1 and per_class is None:
        return batches
    if hasattr(batches, "subset"):
        return batches.subset(fraction, per_class, generator)  # pyright: ignore
    if isinstance(batches, DataLoader) and not isinstance(batches.dataset, IterableDataset) and batches.batch_size:
        dataset: Any = batches.dataset
        indices = choose(len(dataset), _labels(dataset) if per_class else None, fraction, per_class, generator)
        return DataLoader(
            Subset(dataset, indices.tolist()),
            batch_size=batches.batch_size,
            shuffle=True,
            num_workers=batches.num_workers,
            collate_fn=batches.collate_fn,
            pin_memory=batches.pin_memory,
            worker_init_fn=batches.worker_init_fn,
        )
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


def _labels(dataset: Any) -> Tensor:
    for name in ("targets", "labels"):
        if hasattr(dataset, name):
            return torch.as_tensor(getattr(dataset, name), device="cpu")
    tensors = getattr(dataset, "tensors", None)
    if tensors:
        return tensors[-1].cpu()
    if isinstance(dataset, Subset):
        return _labels(dataset.dataset)[torch.as_tensor(dataset.indices)]
    raise InvalidTask(
        f"{type(dataset).__name__} has no labels to draw examples per class by: give it an attribute `targets`, or use "
        "a fraction"
    )
