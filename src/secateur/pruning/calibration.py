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
from secateur.pruning.selection import first_channels

EVENLY = (1.0, 0.75, 0.5, 0.25)
"""Shares of all groups of a network that is timed."""
UNEVENLY = 8
"""Networks whose groups have widths drawn at random."""
ALIGNED = 8


def calibrated(
    table: LatencyTable,
    graph: ChannelGraph,
    kinds: Sequence[str],
    sizes: Sequence[int],
    time: Callable[[Plan], float],
) -> LatencyTable:
    """A table whose sums are the times of whole networks, as far as they can be.

    A network takes so many times what its layers take by themselves, by kind of layer, so much for what they put out,
    which other operators read, and something for every layer. These numbers are fitted to networks of several widths.

    kinds: of the layers.
    sizes: of what they put out.
    time: the microseconds of a network that is cut by a plan.
    """
    plans = list(_plans(graph))
    measured = torch.tensor([time(plan) for plan in plans], dtype=torch.float64)
    names = sorted(set(kinds))
    features = torch.stack([_features(table, graph, names, kinds, sizes, plan.kept) for plan in plans])
    weights = _fitted(features / measured[:, None], torch.ones_like(measured)).tolist()
    scale = dict(zip(names, weights, strict=False))
    volume, each = weights[-2:]
    layers = [
        _scaled(layer, scale[kind], volume * size, each)
        for layer, kind, size in zip(table.layers, kinds, sizes, strict=True)
    ]
    return replace(table, layers=tuple(layers))


def _plans(graph: ChannelGraph) -> list[Plan]:
    """Networks of several widths, aligned as hardware likes them."""
    generator = torch.Generator().manual_seed(0)
    shares = [torch.full((len(graph.groups),), share) for share in EVENLY]
    shares += [0.125 + 0.875 * torch.rand(len(graph.groups), generator=generator) for _ in range(UNEVENLY)]
    return [_plan(graph, each.tolist()) for each in (shares if graph.groups else shares[:1])]


def _plan(graph: ChannelGraph, shares: list[float]) -> Plan:
    widths = []
    for group, share in zip(graph.groups, shares, strict=True):
        step = ALIGNED if group.size >= 2 * ALIGNED else 1
        widths.append(max(round(share * group.size / step) * step, group.at_least, 1))
    return Plan(graph, first_channels(graph, torch.tensor(widths, dtype=torch.long, device="cpu")))


def _features(
    table: LatencyTable, graph: ChannelGraph, names: list[str], kinds: Sequence[str], sizes: Sequence[int], kept: Tensor
) -> Tensor:
    """The times of the layers by kind, the size of what they put out, and their number."""
    sums = dict.fromkeys(names, 0.0)
    volume = 0.0
    for layer, kind, size in zip(table.layers, kinds, sizes, strict=True):
        inputs, outputs = widths_of(layer, graph, kept)
        sums[kind] += layer.at(inputs, outputs)
        volume += size * outputs / layer.outputs[-1]
    return torch.tensor([*sums.values(), volume, len(sizes)], dtype=torch.float64)


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


def _scaled(layer: LayerTable, scale: float, volume: float, each: float) -> LayerTable:
    more = [volume * outputs / layer.outputs[-1] + each for outputs in layer.outputs]
    lines = tuple(tuple(scale * a + b for a, b in zip(line, more, strict=True)) for line in layer.microseconds)
    return replace(layer, microseconds=lines)
