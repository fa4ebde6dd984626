"""A graph in the place of a model, a model in the place of a graph, and the like."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import secateur
from secateur import InvalidData, InvalidModel, InvalidSetting, Plan, Pruner, TickTock


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


SETTINGS = TickTock.of(keep_macs=0.5)
WRONG: list[tuple[Callable[[Given], object], str]] = [
    (lambda g: secateur.analyze(g.graph, g.example), "ChannelGraph"),
    (lambda g: secateur.analyze(cast(Any, torch.relu), g.example), "builtin_function_or_method"),
    (lambda g: Pruner(g.graph, g.example), "ChannelGraph"),
    (lambda g: Pruner(g.graph, graph=g.graph), "ChannelGraph"),
    (lambda g: secateur.prune(g.graph, g.example, g.task, settings=SETTINGS), "ChannelGraph"),
    (lambda g: secateur.train(g.graph, g.example, g.task), "ChannelGraph"),
    (lambda g: secateur.shrink(g.graph, g.plan), "ChannelGraph"),
    (lambda g: secateur.shrink_(g.graph, g.plan), "ChannelGraph"),
    (lambda g: secateur.verify(g.graph, g.plan, g.example), "ChannelGraph"),
    (lambda g: secateur.insert_gates_(g.graph, g.graph), "ChannelGraph"),
    (lambda g: secateur.merge_gates_(g.graph), "ChannelGraph"),
    (lambda g: secateur.measure_latency(g.graph, g.example), "ChannelGraph"),
    (lambda g: Pruner(g.model, graph=g.model), "Sequential"),
    (lambda g: secateur.prune(g.model, g.example, g.task, settings=SETTINGS, graph=g.model), "Sequential"),
    (lambda g: secateur.prune(g.model, g.example, g.task, settings=SETTINGS, graph=g.task), "Task"),
    (lambda g: secateur.prune(g.model, g.example, g.model, settings=SETTINGS), "Sequential"),
    (lambda g: secateur.insert_gates_(g.model, g.model), "Sequential"),
    (lambda g: Plan.random(g.model), "Sequential"),
    (lambda g: Plan.keep(g.model, {"0": [1]}), "Sequential"),
    (lambda g: Plan(g.model, torch.ones(8, dtype=torch.bool)), "Sequential"),
    (lambda g: Plan.from_json(g.model, g.plan.to_json()), "Sequential"),
    (lambda g: secateur.shrink(g.model, g.graph), "ChannelGraph"),
    (lambda g: secateur.shrink_(g.model, g.graph), "ChannelGraph"),
    (lambda g: secateur.verify(g.model, g.graph, g.example), "ChannelGraph"),
    (lambda g: Pruner(g.model, g.graph), "graph=graph"),
]


@pytest.mark.parametrize(("call", "word"), WRONG)
def test_the_wrong_thing_is_named(given: Given, call: Callable[[Given], object], word: str) -> None:
    with pytest.raises((InvalidModel, InvalidSetting, InvalidData)) as caught:
        call(given)
    assert word in str(caught.value)
