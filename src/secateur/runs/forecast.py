"""What a pruned network will take, before it is pruned."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from secateur.channels.example import Example
from secateur.channels.plan import Plan
from secateur.channels.shrink import shrink
from secateur.pruning.measure import time_whole
from secateur.pruning.selection import Target, first_channels, multiples

NOT_FASTER = 0.98
"""Share of the time above which a network does not count as faster."""


def forecast(
    model: nn.Module,
    target: Target,
    floors: Tensor,
    multiple_of: int,
    example: Example,
    precision: torch.dtype,
    channels_last: bool,
) -> float:
    """The share of the whole network's time that is left when all groups are cut evenly until the budget is met."""
    cut = shrink(model, Plan(target.graph, evenly(target, floors, multiple_of)))
    before, after = (time_whole(network, example, precision, channels_last) for network in (model, cut))
    return after / before


def evenly(target: Target, floors: Tensor, multiple_of: int) -> Tensor:
    """What is kept when all groups are cut to the largest same share with which the budget is met."""
    graph, low, high = target.graph, 0.0, 1.0
    sizes = torch.bincount(graph.group_of, minlength=len(graph.groups))
    each = multiples(graph, multiple_of)

    def kept(share: float) -> Tensor:
        widths = torch.maximum((share * sizes / each).floor().long() * each, floors)
        return first_channels(graph, torch.minimum(widths, sizes))

    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if target.met(kept(middle)) else (low, middle)
    return kept(low)
