"""A graph in the place of a model, a model in the place of a graph, and the like: named, with what to do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur
from secateur import InvalidArgument, Plan, Pruner, TickTock

MODEL = "a model is an nn.Module, got ChannelGraph: pass the network itself"
GRAPH = r"a channel graph is wanted, got {}: make it with secateur.analyze\(model, example\)"
PLAN = r"a plan is wanted, got ChannelGraph: make it with secateur.Plan.keep\(graph, ...\) or Plan.random"


@dataclass
class Given:
    model: Any
    graph: Any
    plan: Any
    task: Any
    example: Tensor


@pytest.fixture(scope="module")
def given() -> Given:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    example = torch.randn(1, 3, 8, 8)
    graph = secateur.analyze(model, example)
    task = secateur.Task([example], lambda model, batch: model(batch).sum())
    return Given(model, graph, Plan.random(graph), task, example)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: secateur.analyze(g.graph, g.example), MODEL),
        (lambda g: secateur.analyze(torch.relu, g.example), "a model is an nn.Module, got builtin"),
        (lambda g: Pruner(g.graph, g.example), MODEL),
        (lambda g: Pruner(g.graph, graph=g.graph), MODEL),
        (lambda g: TickTock(keep_macs=0.5)(g.graph, g.graph, g.task), MODEL),
        (lambda g: secateur.shrink(g.graph, g.plan), MODEL),
        (lambda g: secateur.shrink_(g.graph, g.plan), MODEL),
        (lambda g: secateur.verify(g.graph, g.plan, g.example), MODEL),
        (lambda g: secateur.insert_gates_(g.graph, g.graph), MODEL),
        (lambda g: secateur.merge_gates_(g.graph), MODEL),
        (lambda g: secateur.measure_latency(g.graph, g.example), MODEL),
        (lambda g: Pruner(g.model, graph=g.model), GRAPH.format("Sequential")),
        (lambda g: TickTock(keep_macs=0.5)(g.model, g.model, g.task), GRAPH.format("Sequential")),
        (lambda g: TickTock(keep_macs=0.5).steps(g.model, g.task, g.graph), GRAPH.format("Task")),
        (lambda g: TickTock(keep_macs=0.5)(g.model, g.example, g.task), GRAPH.format("Tensor")),
        (lambda g: secateur.insert_gates_(g.model, g.model), GRAPH.format("Sequential")),
        (lambda g: Plan.random(g.model), GRAPH.format("Sequential")),
        (lambda g: Plan.keep(g.model, {"0": [1]}), GRAPH.format("Sequential")),
        (lambda g: Plan(g.model, torch.ones(8, dtype=torch.bool)), GRAPH.format("Sequential")),
        (lambda g: Plan.from_json(g.model, g.plan.to_json()), GRAPH.format("Sequential")),
        (lambda g: secateur.shrink(g.model, g.graph), PLAN),
        (lambda g: secateur.shrink_(g.model, g.graph), PLAN),
        (lambda g: secateur.verify(g.model, g.graph, g.example), PLAN),
        (lambda g: Pruner(g.model, g.graph), r"a channel graph: pass that by its name, Pruner\(model, graph=graph\)"),
    ],
)
def test_the_wrong_thing_is_named(given: Given, call: Callable[[Given], object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        call(given)
    assert isinstance(caught.value, TypeError)
