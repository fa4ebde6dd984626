"""MACs and parameters of a network, and what the removal of each channel saves.

A MAC is one multiply-add. MACs are counted for convolutions, linear layers and other matrix products, for the
example input as given, batch included; torch's flop counter counts the same operators at two FLOPs per MAC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cost:
    """Multiply-adds and parameters."""

    macs: int
    params: int


@dataclass(frozen=True)
class CostRow:
    """A quantity that is a product of axis sizes: `volume * sizes[0] * sizes[1] * ...`."""

    name: str
    kind: str
    volume: int
    sizes: tuple[int, ...]
    channels: tuple[Tensor | None, ...]
    """For each axis the channel number at each index, -1 where it always stays; None for an axis that never changes."""

    @property
    def whole(self) -> int:
        """The value when nothing is removed."""
        return self.volume * prod(self.sizes)

    def remaining(self, keep: Tensor) -> list[int]:
        """The sizes of the axes when only these channels are kept."""
        return [
            size if channels is None else int(is_kept(channels, keep).sum())
            for size, channels in zip(self.sizes, self.channels, strict=True)
        ]

    def value(self, keep: Tensor) -> int:
        return self.volume * prod(self.remaining(keep))

    def add_savings(self, keep: Tensor, savings: Tensor) -> None:
        """Add to each channel what its removal alone would save now."""
        sizes = self.remaining(keep)
        involved = [
            (position, channels[(channels >= 0) & is_kept(channels, keep)])
            for position, channels in enumerate(self.channels)
            if channels is not None
        ]
        involved = [(position, channels) for position, channels in involved if channels.numel()]
        if not involved:
            return
        unique, inverse = torch.unique(torch.cat([channels for _, channels in involved]), return_inverse=True)
        after = torch.full(unique.shape, self.volume, dtype=torch.float64, device="cpu")
        start = 0
        counted = {}
        for position, channels in involved:
            counted[position] = torch.bincount(inverse[start : start + channels.numel()], minlength=unique.numel())
            start += channels.numel()
        for position, size in enumerate(sizes):
            after *= size - counted[position] if position in counted else size
        savings.index_add_(0, unique, self.volume * prod(sizes) - after)


def is_kept(channels: Tensor, keep: Tensor) -> Tensor:
    """Index by index, whether it is left: its channel is kept, or it belongs to none."""
    if keep.numel() == 0:
        return torch.ones_like(channels, dtype=torch.bool)
    return keep[channels.clamp_min(0)] | (channels < 0)


class Formula:
    """The sum over rows from the widths of groups alone: channels of a group lie equally often on every axis.

    Rows for which that is not so are counted index by index.
    """

    def __init__(self, rows: Sequence[CostRow], group_of: Tensor) -> None:
        self.group_of = group_of
        self.sizes = torch.bincount(group_of)
        self.odd: list[CostRow] = []
        volumes: list[int] = []
        fixed: list[list[int]] = []
        axis_of: list[Tensor] = []
        groups: list[Tensor] = []
        times: list[Tensor] = []
        most = max((len(row.sizes) for row in rows), default=0)
        for row in rows:
            terms = [self._terms(size, channels) for size, channels in zip(row.sizes, row.channels, strict=True)]
            if any(term is None for term in terms):
                self.odd.append(row)
                continue
            constants = [1] * most
            for position, (constant, number, count) in enumerate(t for t in terms if t is not None):
                constants[position] = constant
                axis_of.append(torch.full_like(number, len(volumes) * most + position))
                groups.append(number)
                times.append(count)
            volumes.append(row.volume)
            fixed.append(constants)
        empty = torch.empty(0, dtype=torch.long, device="cpu")
        self.volumes = torch.tensor(volumes, dtype=torch.long, device="cpu")
        self.fixed = torch.tensor(fixed, dtype=torch.long, device="cpu").reshape(len(volumes), most)
        self.axis_of, self.groups, self.times = (torch.cat([*parts, empty]) for parts in (axis_of, groups, times))

    def _terms(self, size: int, channels: Tensor | None) -> tuple[int, Tensor, Tensor] | None:
        """A constant, the groups on this axis, and how often each channel of them lies there; None if not alike."""
        empty = torch.empty(0, dtype=torch.long, device="cpu")
        if channels is None:
            return size, empty, empty
        numbers, counts = torch.unique(channels[channels >= 0], return_counts=True)
        groups, inverse = torch.unique(self.group_of[numbers], return_inverse=True)
        times = torch.zeros_like(groups).scatter_reduce_(0, inverse, counts, "amax")
        complete = torch.equal(torch.bincount(inverse, minlength=groups.numel()), self.sizes[groups])
        if not complete or not torch.equal(times[inverse], counts):
            return None
        return int((channels < 0).sum()), groups, times

    def __call__(self, keep: Tensor) -> int:
        """The value when only these channels are kept."""
        widths = torch.bincount(self.group_of[keep], minlength=self.sizes.numel())
        sizes = self.fixed.flatten().index_add(0, self.axis_of, self.times * widths[self.groups])
        regular = (self.volumes * sizes.reshape(self.fixed.shape).prod(1)).sum()
        return int(regular) + sum(row.value(keep) for row in self.odd)


def savings(rows: Sequence[CostRow], keep: Tensor) -> Tensor:
    """For every channel what its removal alone would save as the network stands; 0 for channels already gone."""
    result = torch.zeros(keep.shape, dtype=torch.float64, device="cpu")
    for row in rows:
        row.add_savings(keep, result)
    return result
