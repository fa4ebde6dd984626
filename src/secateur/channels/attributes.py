"""Numbers of channels that modules keep for themselves, in attributes that only their code knows the meaning of.

Rules remember where the code states a size: in a view, a split, a slice, a number of zeros. Whether an attribute has
that size is looked up only where the probe fails (see `settle`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from secateur.channels.bookkeeping import sizes_of
from secateur.channels.reasons import Reason


class Name(NamedTuple):
    """A number that a module keeps: its attribute, or one entry of it if that is a list or a tuple."""

    module: str
    attribute: str
    position: int | None = None


@dataclass(frozen=True, eq=False)
class Place:
    """An axis whose size the code states, perhaps by an attribute of one of these modules."""

    modules: tuple[str, ...]
    codes: Tensor
    sizes: tuple[int, ...] = ()
    """Of all parts, if this is one of several that an axis is split into."""
    position: int | None = None
    """Which of them."""

    def names(self, modules: Mapping[str, nn.Module]) -> Iterator[Name]:
        """The attributes that have this size, other than those that follow a layer's tensors anyway."""
        for path in self.modules if self.codes.numel() > 1 else ():
            known = sizes_of(modules[path])
            for attribute, value in vars(modules[path]).items():
                if attribute in known:
                    continue
                if type(value) is int and value == self.codes.numel():
                    yield Name(path, attribute)
                elif self.sizes and _numbers(value) == self.sizes:
                    yield Name(path, attribute, self.position)


def _numbers(value: Any) -> tuple[int, ...] | None:
    plain = isinstance(value, (list, tuple)) and all(type(each) is int for each in value)
    return tuple(value) if plain else None


Assumed = Iterable[tuple[Name, Place]]
"""Attributes that are taken to count the channels at these places."""


@dataclass(frozen=True, eq=False)
class Border:
    """An axis that the code parts where it wants: its channels stay, unless attributes say where."""

    codes: Tensor
    reason: Reason
    parts: list[Place]
    spare: int
    """How many parts need no attribute."""

    def is_known(self, places: Set[Place]) -> bool:
        """Whether attributes at these places say where the border is."""
        return sum(part not in places for part in self.parts) <= self.spare
