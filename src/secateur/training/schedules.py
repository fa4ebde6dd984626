"""Learning rates over a phase, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

Shape = Literal["triangle", "warmup", "cosine", "steps", "constant"]
MILESTONES = (0.6, 0.8, 0.9)
"""Where "steps" divides by ten: after 36, 48 and 54 of 60 epochs."""
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


def steps(step: int, num_steps: int, low: float, high: float) -> float:
    """From high, divided by ten at each milestone.

    >>> [round(steps(step, 10, 0.0, 1.0), 6) for step in (0, 5, 6, 8, 9)]
    [1.0, 1.0, 0.1, 0.01, 0.001]
    """
    return high * 0.1 ** sum(step >= milestone * num_steps for milestone in MILESTONES)


def constant(step: int, num_steps: int, low: float, high: float) -> float:
    return high


SHAPES: dict[str, Callable[[int, int, float, float], float]] = {
    "triangle": triangle,
    "warmup": warmup,
    "cosine": cosine,
    "steps": steps,
    "constant": constant,
}
