"""What a network costs, and what each channel's removal would save.

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


def total(rows: Sequence[CostRow], keep: Tensor) -> int:
    return sum(row.value(keep) for row in rows)


def savings(rows: Sequence[CostRow], keep: Tensor) -> Tensor:
    """For every channel what its removal alone would save as the network stands; 0 for channels already gone."""
    result = torch.zeros(keep.shape, dtype=torch.float64, device="cpu")
    for row in rows:
        row.add_savings(keep, result)
    return result
