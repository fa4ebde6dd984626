"""Cuts as plain data: what a plan takes out of a network, without the graph that it was made with."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.blocks import BlockCut
from secateur.errors import InvalidSetting

MOST = 2**27
"""Indices that the cuts of one network may name."""


@dataclass(frozen=True)
class Size:
    """A number that a module keeps about its channels: before and after."""

    module: str
    attribute: str
    position: int | None
    """Index into the attribute if it is a list or tuple."""
    before: int
    after: int

    def read(self, module: nn.Module | None) -> Any:
        """The number that the module has now."""
        value = vars(module).get(self.attribute) if module is not None else None
        if self.position is None:
            return value
        return value[self.position] if isinstance(value, list | tuple) and self.position < len(value) else None

    def set_(self, module: nn.Module) -> None:
        if self.position is None:
            setattr(module, self.attribute, self.after)
        else:
            value = getattr(module, self.attribute)
            numbers = [*value[: self.position], self.after, *value[self.position + 1 :]]
            setattr(module, self.attribute, numbers if isinstance(value, list) else tuple(numbers))


@dataclass(frozen=True)
class Cuts:
    """By tensor: the shape it has before, and for every axis that loses something the indices that are left."""

    shapes: dict[str, tuple[int, ...]]
    kept: dict[str, dict[int, Tensor]]
    sizes: tuple[Size, ...]
    blocks: tuple[BlockCut, ...] = ()
    """Blocks that lose a branch; tensors that go with it are not among the others."""

    @cached_property
    def key(self) -> Hashable:
        """The same for the same cuts, of whichever graph."""
        indices = [indices for axes in self.kept.values() for indices in axes.values()]
        places = tuple((name, axis, len(left)) for name, axes in self.kept.items() for axis, left in axes.items())
        left = torch.cat([torch.empty(0, dtype=torch.long, device="cpu"), *indices]).numpy().tobytes()
        return places, left, self.sizes, self.blocks

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
            "sizes": [list(astuple(size)) for size in self.sizes],
            **({"blocks": [block.to_dict() for block in self.blocks]} if self.blocks else {}),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Cuts:
        """Read what `to_dict` has written; everything is checked."""
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
                        raise ValueError(f"more than {MOST:,} indices")
                    kept[name][int(axis)] = checked_indices(indices, shapes[name][int(axis)], name)
            sizes = [
                Size(str(module), str(attribute), None if position is None else _whole(position), *map(_whole, numbers))
                for module, attribute, position, *numbers in data["sizes"]
            ]
            blocks = tuple(BlockCut.from_dict(block) for block in data.get("blocks", ()))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise InvalidSetting("the cuts of this plan are damaged", got=f"{type(error).__name__}: {error}") from error
        return cls(shapes, kept, tuple(sizes), blocks)


def checked_indices(values: Any, size: Any, name: str) -> Tensor:
    """Indices that are left of something of that size: whole numbers that rise; raises `ValueError` if not."""
    if not isinstance(values, list) or not values or not all(type(value) is int for value in (size, *values)):
        raise ValueError(f"{name} keeps {values!r:.40} of {size!r:.40}, not a list of indices")
    if values[0] < 0 or values[-1] >= size or any(a >= b for a, b in pairwise(values)):
        raise ValueError(f"the indices that {name} keeps do not rise from 0 to {size - 1}")
    return torch.tensor(values, dtype=torch.long, device="cpu")


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is not a size")
    return value
