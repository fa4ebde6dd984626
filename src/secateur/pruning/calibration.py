"""From times of single layers to those of whole networks: what networks of several widths really take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from secateur.channels.groups import ChannelGraph
from secateur.channels.plan import Plan
from secateur.pruning.latency import LatencyTable, LayerTable, widths_of
from secateur.pruning.selection import first_channels, multiples

EVENLY = (1.0, 0.75, 0.5, 0.25)
"""Shares of all groups of a network that is timed."""
UNEVENLY = 8
"""Networks whose groups have widths drawn at random."""


def calibrated(
    table: LatencyTable,
    graph: ChannelGraph,
    kinds: Sequence[str],
    sizes: Sequence[int],
    macs: Sequence[int],
    time: Callable[[Plan], float],
    multiple_of: int = 8,
) -> LatencyTable:
    """A table whose sums are the times of whole networks, as far as they can be.

    A network takes so many times what its layers take by themselves, by kind of layer, so much for each of their MACs,
    and for what they put out, which other operators read, something for every layer, and something for itself. These
    numbers are fitted to networks of several widths, some of them without some of their branches. The whole network
    counts as much as all others, since budgets are shares of its time.

    kinds: of the layers.
    sizes: of what they put out. macs: of each.
    time: the microseconds of a network that is cut by a plan.
    multiple_of: the networks' widths are multiples of this.
    """
    plans = list(_plans(graph, multiple_of))
    measured = torch.tensor([time(plan) for plan in plans], dtype=torch.float64)
    names = sorted(set(kinds))
    features = torch.stack([_features(table, names, kinds, sizes, macs, plan) for plan in plans])
    counts = torch.ones_like(measured)
    counts[0] = len(plans) ** 0.5
    weights = _fitted(features * (counts / measured)[:, None], counts).tolist()
    scale, per_mac = (dict(zip(names, part, strict=False)) for part in (weights, weights[len(names) :]))
    volume, each, constant = weights[-3:]
    inside = graph.tensors_of(branch.name for branch in graph.branches)
    # What the network takes for itself is no branch's.
    every = [layer.name for layer in table.layers]
    always = [name for name in every if name not in inside] or every
    layers = [
        _scaled(
            layer,
            scale[kind],
            per_mac[kind] * own,
            volume * size,
            each + constant / len(always) * (layer.name in always),
        )
        for layer, kind, size, own in zip(table.layers, kinds, sizes, macs, strict=True)
    ]
    return replace(table, layers=tuple(layers))


def _plans(graph: ChannelGraph, multiple_of: int) -> list[Plan]:
    """Networks of several widths, every other one without half of its branches."""
    generator = torch.Generator().manual_seed(0)
    shares = [torch.full((len(graph.groups),), share) for share in EVENLY]
    shares += [0.125 + 0.875 * torch.rand(len(graph.groups), generator=generator) for _ in range(UNEVENLY)]
    plans = []
    for number, each in enumerate(shares if graph.groups else shares[:1]):
        goes = torch.rand(len(graph.branches), generator=generator) < 0.5 * (number % 2)
        gone = [branch.name for branch, go in zip(graph.branches, goes.tolist(), strict=True) if go]
        plans.append(_plan(graph, each.tolist(), gone, multiple_of))
    return plans


def _plan(graph: ChannelGraph, shares: list[float], gone: list[str], multiple_of: int) -> Plan:
    widths = []
    for group, share, each in zip(graph.groups, shares, multiples(graph, multiple_of).tolist(), strict=True):
        width = max(round(share * group.size / each) * each, each, group.at_least)
        widths.append(min(width, group.size))
    return Plan(graph, first_channels(graph, torch.tensor(widths, dtype=torch.long, device="cpu")), frozenset(gone))


def _features(
    table: LatencyTable,
    names: list[str],
    kinds: Sequence[str],
    sizes: Sequence[int],
    macs: Sequence[int],
    plan: Plan,
) -> Tensor:
    """The times and MACs of the layers by kind, the size of what they put out, their number, and one."""
    sums, products = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    volume, count = 0.0, 0
    for layer, kind, size, own in zip(table.layers, kinds, sizes, macs, strict=True):
        if layer.name not in plan.gone:
            inputs, outputs = widths_of(layer, plan.graph, plan.kept)
            sums[kind] += layer.at(inputs, outputs)
            products[kind] += own * (inputs / layer.inputs[-1]) * (outputs / layer.outputs[-1])
            volume += size * outputs / layer.outputs[-1]
            count += 1
    return torch.tensor([*sums.values(), *products.values(), volume, count, 1], dtype=torch.float64)


def _fitted(features: Tensor, wanted: Tensor) -> Tensor:
    """Weights of features, none of them negative, with the least squares."""
    best, found = torch.inf, torch.zeros(features.shape[1], dtype=torch.float64)
    for count in range(1, min(features.shape) + 1):
        for chosen in combinations(range(features.shape[1]), count):
            part = features[:, chosen]
            scale = part.norm(dim=0).clamp_min(1e-30)
            weights = torch.linalg.lstsq(part / scale, wanted[:, None], driver="gelsd").solution[:, 0] / scale
            error = float((part @ weights - wanted).square().sum())
            if bool((weights >= 0).all()) and error < best - 1e-12:
                best, found = error, torch.zeros_like(found)
                found[list(chosen)] = weights
    return found


def _scaled(layer: LayerTable, scale: float, product: float, volume: float, each: float) -> LayerTable:
    """What the layer takes in a network: a multiple of its own time, and some for its MACs, its output and itself."""
    lines = []
    for inputs, line in zip(layer.inputs, layer.microseconds, strict=True):
        shares = [outputs / layer.outputs[-1] for outputs in layer.outputs]
        per_output = product * inputs / layer.inputs[-1] + volume
        lines.append(tuple(scale * own + per_output * share + each for own, share in zip(line, shares, strict=True)))
    return replace(layer, microseconds=tuple(lines))
