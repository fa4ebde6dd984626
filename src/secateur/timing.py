"""How long calls take, on a CPU or a GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

WARM_UP, ENOUGH = 3, 3
"""Calls before the first that counts, and the least number of calls that count."""
AHEAD = 400_000_000
"""Cycles, about a fifth of a second, for which a GPU is kept busy while a network's kernels queue up behind."""

Key = TypeVar("Key", bound=Hashable)


def time_in_turn(
    calls: Mapping[Key, Callable[[], object]], device: torch.device, repetitions: int, patience: float = math.inf
) -> dict[Key, list[float]]:
    """Seconds of every call of each, taken in turn so that a busy moment hits all alike.

    patience: seconds after which three repetitions are enough.
    """

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    begun = time.perf_counter()
    for round_number in range(-WARM_UP, repetitions):
        if round_number >= ENOUGH and time.perf_counter() - begun > patience:
            break
        for key, call in calls.items():
            wait()
            started = time.perf_counter()
            call()
            wait()
            if round_number >= 0:
                seconds[key].append(time.perf_counter() - started)
    return seconds


def time_kernels(call: Callable[[], object], device: torch.device, repetitions: int) -> list[float]:
    """Seconds of calls on a GPU, without the time to launch its kernels; not every network can be `captured`."""
    found = []
    with torch.cuda.device(device):
        for _ in range(WARM_UP + repetitions):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(AHEAD)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 1000)
    return found[WARM_UP:]


def captured(call: Callable[[], object], device: torch.device, times: int = 1) -> Callable[[], object]:
    """The call, so many times in a row, as a CUDA graph: what the GPU takes, without launching kernels one by one."""
    with torch.cuda.device(device):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                call()
        stream.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(times):
                call()

    def replay(held: object = call) -> None:  # the graph reads tensors that it does not hold
        graph.replay()

    return replay
