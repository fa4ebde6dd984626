"""How long networks take, side by side."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

from secateur.channels.example import Example
from secateur.training.task import evaluating


def latency(models: dict[str, nn.Module], example: Any, repetitions: int = 30) -> dict[str, float]:
    """Median seconds of one forward pass of each, taken by turns so that a busy moment hits all alike."""
    call = Example.of(example)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for round_number in range(-3, repetitions):
        for name, model in models.items():
            with evaluating(model):
                _wait(call)
                started = time.perf_counter()
                call(model)
                _wait(call)
            if round_number >= 0:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _wait(example: Example) -> None:
    if example.tensors and example.tensors[0].device.type == "cuda":
        torch.cuda.synchronize()
