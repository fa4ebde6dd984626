"""How far apart two lists of tensors are, and how much of that is rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 10
"""By which factor rounding may exceed what was measured of it."""


class Gap(NamedTuple):
    """How far two tensors are apart."""

    absolute: float
    relative: float
    """To the largest value."""
    moved: float = 0.0
    """How far rounding alone moves the first."""


def gaps_between(
    expected: Sequence[Tensor], got: Sequence[Tensor], hiding: float = math.inf, nudged: Sequence[Sequence[Tensor]] = ()
) -> list[Gap] | None:
    """For each tensor the largest absolute difference, also relative to its largest value; None for other shapes.

    hiding: values in common that are so many times larger than what differs, as -1e9 at places that do not count, are
    left out: a difference could hide behind them.
    nudged: the expected ones with parameters moved by rounding. What this moves as far tells nothing, such as what is
    left of sums that cancel, and is left out.
    """
    if [t.shape for t in got] != [t.shape for t in expected]:
        return None
    gaps = []
    for a, b, *others in zip_longest(expected, got, *(each[: len(expected)] for each in nudged)):
        differ = (a != b) & ~(a.isnan() & b.isnan())
        if bool(differ.any()):
            gap = float((a - b)[differ].abs().nan_to_num(float("inf"), float("inf")).max())
            alike = [c for c in others if c is not None and c.shape == a.shape]
            moved = max((float((a - c).abs().nan_to_num(0, 0, 0).max()) for c in alike), default=0.0)
            if gap <= ROUNDING * moved:
                continue
            size = a.abs().nan_to_num(0, 0, 0)
            hides = ~differ & (size > hiding * size[differ].max())
            gaps.append(Gap(gap, gap / max(float(size[~hides].max()), 1e-30), moved))
    return gaps


def gaps_of_sums(expected: Sequence[Tensor], got: Sequence[Tensor], nudged: Sequence[Sequence[Tensor]]) -> list[Gap]:
    """The same for many sums of steps at once."""
    if not expected:
        return []
    a, b = torch.stack([*expected]), torch.stack([*got])
    differ = (a != b) & ~(a.isnan() & b.isnan())
    gaps = torch.where(differ, (a - b).abs().nan_to_num(float("inf"), float("inf")), 0).amax(1)
    moved = torch.zeros_like(gaps)
    for c in (torch.stack([*each[: len(a)]]) for each in nudged if each):
        apart = (a[: len(c)] - c).abs().nan_to_num(0, 0, 0).amax(1)
        moved[: len(c)] = torch.maximum(moved[: len(c)], apart)
    sizes = a.abs().nan_to_num(0, 0, 0).amax(1).clamp_min(1e-30)
    large = differ.any(1) & (gaps > ROUNDING * moved)
    columns = gaps[large].tolist(), (gaps / sizes)[large].tolist(), moved[large].tolist()
    return [Gap(*values) for values in zip(*columns, strict=True)]
