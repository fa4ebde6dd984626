"""A small network around one idea: a convolution with its norm, the idea, and a last convolution."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from oracle import assert_exact, random_plan, randomize_
from torch import Tensor, nn

import secateur
from secateur import Plan
from secateur.channels.reasons import Kind, Reason

IMAGE = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Sandwich(nn.Module):
    """`first`, `norm`, a leaky relu, `body(self, x)`, then `last`, which reads `inner` channels; 0 for none."""

    def __init__(self, body: Callable[..., Any], inner: int = 8, width: int = 8, **parts: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.last = nn.Conv2d(inner, 5, 1) if inner else nn.Identity()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, image: Tensor) -> Any:
        return self.last(self.body(self, F.leaky_relu(self.norm(self.first(image)), 0.3)))


class Buffers(nn.Module):
    """Only buffers, by name."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_buffer(name, value)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def sizes(graph: secateur.ChannelGraph) -> dict[str, int]:
    """Groups by name, with their number of channels."""
    return {group.name: group.size for group in graph.groups}


def reasons(graph: secateur.ChannelGraph) -> dict[str, Reason]:
    """Why layers stay; the first reason of each."""
    found: dict[str, Reason] = {}
    for frozen in graph.frozen:
        found.setdefault(frozen.name, frozen.reason)
    return found


def kinds(graph: secateur.ChannelGraph) -> dict[str, Kind]:
    """The same, without the details."""
    return {name: reason.kind for name, reason in reasons(graph).items()}


def members(graph: secateur.ChannelGraph, name: str) -> dict[tuple[str, int, str], list[list[int]]]:
    """The slices of a group by tensor, axis and role."""
    return {(m.tensor, m.axis, m.role): m.indices.tolist() for m in graph.group(name).members}


def rows(*parts: range | list[int]) -> list[list[int]]:
    """Row by row what each part has at that place: rows(range(2), [7, 8]) is [[0, 7], [1, 8]]."""
    return [list(row) for row in zip(*parts, strict=True)]


def examine(
    model: nn.Module,
    *inputs: Any,
    expected: dict[str, int] | None = None,
    probe: bool = False,
    cost: bool = True,
    singly: bool = False,
) -> secateur.ChannelGraph:
    """Analyse, compare the groups, then cut at random in several ways and compare masked with shrunk.

    cost: compare with torch's count of multiply-adds, too.
    singly: remove each channel alone as well.
    """
    randomize_(model)
    inputs = inputs or (IMAGE,)
    graph = secateur.analyze(model, inputs, probe=probe)
    if expected is not None:
        assert sizes(graph) == expected, str(graph)
    for seed, share in enumerate((0.01, 0.4, 0.9)):
        assert_exact(model, Plan.random(graph, share, seed), inputs, cost=cost)
        assert_exact(model, random_plan(graph, seed, share), inputs, cost=cost)
    for group in graph.groups:
        for index in range(group.size if singly and group.size > 1 else 0):
            assert_exact(model, Plan.keep(graph, {group.name: set(range(group.size)) - {index}}), inputs, cost=cost)
    return graph
