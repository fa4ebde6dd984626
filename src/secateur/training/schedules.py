"""Learning rates over a phase, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

Shape = Literal["triangle", "warmup", "cosine", "steps", "constant"]
WARM = 0.2
"""The part of a phase in which "warmup" rises."""


def triangle(step: int, num_steps: int, low: float, high: float) -> float:
    """The 1-cycle learning rate: linearly from low to high over the first half of the steps, and back.

    >>> [triangle(step, 4, 1.0, 3.0) for step in range(5)]
    [1.0, 2.0, 3.0, 2.0, 1.0]
    """
    return low + (high - low) * (1 - abs(2 * step / num_steps - 1))


def warmup(step: int, num_steps: int, low: float, high: float) -> float:
    """Linearly from low to high over the first fifth, then linearly to zero.

    >>> [warmup(step, 10, 1.0, 4.0) for step in (0, 1, 2, 6, 10)]
    [1.0, 2.5, 4.0, 2.0, 0.0]
    """
    done = step / num_steps
    return low + (high - low) * done / WARM if done < WARM else high * (1 - done) / (1 - WARM)


def cosine(step: int, num_steps: int, low: float, high: float) -> float:
    """From high to low along half a cosine.

    >>> [cosine(step, 4, 1.0, 3.0) for step in (0, 2, 4)]
    [3.0, 2.0, 1.0]
    """
    return low + (high - low) * (1 + math.cos(math.pi * step / num_steps)) / 2


def steps(
    step: int,
    num_steps: int,
    low: float,
    high: float,
    milestones: Sequence[float] = (0.6, 0.8, 0.9),
    divide: float = 10,
) -> float:
    """From high, divided at each milestone.

    >>> [round(steps(step, 10, 0.0, 1.0), 6) for step in (0, 5, 6, 8, 9)]
    [1.0, 1.0, 0.1, 0.01, 0.001]
    """
    # A milestone is a share, and a third of 90 epochs must not come a step late by rounding.
    return high / divide ** sum(step >= round(milestone * num_steps) for milestone in milestones)


def constant(step: int, num_steps: int, low: float, high: float) -> float:
    return high


SHAPES: dict[str, Callable[..., float]] = {
    "triangle": triangle,
    "warmup": warmup,
    "cosine": cosine,
    "steps": steps,
    "constant": constant,
}
