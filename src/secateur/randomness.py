"""The random state of torch, Python and numpy: seed it, save it, and restore it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def seeded(seed: int, *counters: int) -> Iterator[None]:
    """Random numbers that depend on the seed and these counters alone; the caller's random state is restored."""
    with preserved():
        seed_all(mix(seed, *counters))
        yield


@contextmanager
def preserved(devices: Sequence[int] = ()) -> Iterator[None]:
    """Restore the random state on leaving.

    devices: GPUs besides the current one.
    """
    before = random_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            restore_random(before)
            if "cuda" not in before and torch.cuda.is_available():
                torch.cuda.manual_seed_all(torch.initial_seed())  # a seed waits there for the first use of a GPU


def seed_all(seed: int) -> None:
    # torch.manual_seed prepares a seed for accelerators too, which takes a hundred times as long.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def mix(seed: int, *counters: int) -> int:
    """One seed from several numbers."""
    for counter in counters:
        seed = (seed * 0x9E3779B97F4A7C15 + counter + 1) % 2**63
    return seed


def random_state() -> dict[str, Any]:
    """The state of all generators, as plain data and tensors."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    version, numbers, gauss = random.getstate()
    state["python"] = [version, list(numbers), gauss]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *(float(r) for r in rest)]
    return state


def restore_random(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), int(position), int(has_gauss), cached))
