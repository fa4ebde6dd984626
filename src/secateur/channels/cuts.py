"""Cuts as plain data: what a plan takes out of a network, without the graph that it was made with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.bookkeeping import refresh
from secateur.channels.cost import is_kept
from secateur.channels.plan import Plan
from secateur.channels.shrink import cut, set_size, tensors_of
from secateur.errors import InvalidPlan

MOST = 2**27
"""Indices that the cuts of one network may name."""


@dataclass(frozen=True)
class Size:
    """A number that a module keeps about its channels: before and after."""

    module: str
    attribute: str
    position: int | None
    before: int
    after: int


@dataclass(frozen=True)
class Cuts:
    """By tensor: the shape it had, and for every axis that loses something the indices that are left."""

    shapes: dict[str, tuple[int, ...]]
    kept: dict[str, dict[int, Tensor]]
    sizes: tuple[Size, ...]

    @classmethod
    def of(cls, plan: Plan) -> Cuts:
        kept: dict[str, dict[int, Tensor]] = {}
        for (name, axis), indices in plan.remaining.items():
            kept.setdefault(name, {})[axis] = indices
        sizes = [
            Size(a.module, a.attribute, a.position, a.size, int(is_kept(a.channels, plan.kept).sum()))
            for a in plan.graph.attributes
        ]
        changed = tuple(size for size in sizes if size.before != size.after)
        return cls({name: plan.graph.shapes[name] for name in kept}, kept, changed)

    @torch.no_grad()
    def apply_(self, model: nn.Module) -> None:
        """Cut the whole network, wherever its tensors are; raises `InvalidPlan` before anything is changed."""
        tensors = tensors_of(model)
        modules = dict(model.named_modules())
        for name, shape in self.shapes.items():
            if name not in tensors:
                raise InvalidPlan(f"the network has no {name}: it is another one than was pruned")
            if tuple(tensors[name].shape) != shape:
                found = "x".join(map(str, tensors[name].shape))
                raise InvalidPlan(f"{name} was {'x'.join(map(str, shape))} before pruning, and is {found} here")
        for size in self.sizes:
            if _size_of(modules.get(size.module), size) != size.before:
                raise InvalidPlan(f"{size.module}.{size.attribute} is not {size.before}, as it was before pruning")
        for name, axes in self.kept.items():
            tensor = tensors[name]
            tensor.data = cut(tensor.data, tensor.shape, axes)
        for size in self.sizes:
            set_size(modules[size.module], size.attribute, size.position, size.after)
        for module in modules.values():
            refresh(module)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "tensors": {
                name: {
                    "shape": list(self.shapes[name]),
                    "kept": {str(axis): indices.tolist() for axis, indices in axes.items()},
                }
                for name, axes in self.kept.items()
            },
            "sizes": [list(vars(size).values()) for size in self.sizes],
        }

    @classmethod
    def from_dict(cls, data: Any) -> Cuts:
        """What `to_dict` has given; raises `InvalidPlan` if anybody has changed it into something else."""
        try:
            shapes: dict[str, tuple[int, ...]] = {}
            kept: dict[str, dict[int, Tensor]] = {}
            total = 0
            for name, entry in data["tensors"].items():
                shapes[name] = tuple(_whole(number) for number in entry["shape"])
                kept[name] = {}
                for axis, indices in entry["kept"].items():
                    total += len(indices)
                    if total > MOST:
                        raise ValueError(f"it names more than {MOST:,} indices")
                    kept[name][int(axis)] = checked_indices(indices, shapes[name][int(axis)], name)
            sizes = [
                Size(str(module), str(attribute), None if position is None else _whole(position), *map(_whole, numbers))
                for module, attribute, position, *numbers in data["sizes"]
            ]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise InvalidPlan(f"the cuts of this plan are damaged: {error}") from error
        return cls(shapes, kept, tuple(sizes))


def checked_indices(values: list[Any], size: int, name: str) -> Tensor:
    """Indices that are left of something of that size: whole numbers that rise; raises `ValueError` if not."""
    if not values or not all(type(value) is int for value in values):
        raise ValueError(f"what is left of {name} must be a list of indices, at least one")
    if values[0] < 0 or values[-1] >= size or any(a >= b for a, b in pairwise(values)):
        raise ValueError(f"the indices that are left of {name} must rise from 0 to {size - 1}")
    return torch.tensor(values, dtype=torch.long, device="cpu")


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a size must be a whole number, got {value!r:.40}")
    return value


def _size_of(module: nn.Module | None, size: Size) -> Any:
    value = module.__dict__.get(size.attribute) if module is not None else None
    if size.position is None:
        return value
    return value[size.position] if isinstance(value, list | tuple) and size.position < len(value) else None
