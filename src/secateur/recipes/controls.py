"""What a pruned network is compared with: its shape with random weights, and a network narrowed evenly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from secateur.channels.analyze import analyze
from secateur.errors import InvalidSetting
from secateur.recipes.jobs import Order, build, narrower

FINEST = 1 / 1024
"""Step between widths that are tried."""


@torch.no_grad()
def initialize_(model: nn.Module) -> None:
    """Draw all weights anew for the present shapes.

    Uses the model's own method `initialize_` if it has one, as ours have, and otherwise `reset_parameters` of its
    modules.
    """
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # pyright: ignore
    if hasattr(model, "initialize_"):
        model.initialize_()  # pyright: ignore


def solve_width(build: Callable[[float], nn.Module], example: Any, keep_macs: float) -> float:
    """The factor on all widths at which the network has that share of its MACs, as nearly as whole channels allow."""
    if not 0 < keep_macs <= 1:
        wanted = "a share above 0 and at most 1"
        raise InvalidSetting("the share of the MACs is out of range", got=keep_macs, wanted=wanted)

    def count(width: float) -> int:
        return analyze(build(width), example, probe=False).macs

    target = keep_macs * count(1.0)
    low, high = 0.0, 1.0
    tried: dict[float, float] = {}
    while high - low > FINEST:
        middle = (low + high) / 2
        tried[middle] = macs = count(middle)
        low, high = (low, middle) if macs > target else (middle, high)
    return min(tried, key=lambda width: abs(tried[width] - target))


def narrowed(order: Order, share: float, seed: int) -> Order:
    """The same order with all layers narrowed by one factor, so that this share of the MACs stays."""
    job = build(order, seed, torch.device("cpu"))
    return replace(order, width=order.width * solve_width(narrower(order, job), job.example, share))
