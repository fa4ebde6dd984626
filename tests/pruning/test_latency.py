"""What layers take, and budgets in it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateur import (
    Budget,
    ChannelGraph,
    InvalidData,
    InvalidSetting,
    Plan,
    Pruner,
    TickTock,
    analyze,
    classification,
    measure_latency,
    prune,
    shrink,
)
from secateur.models.lookup import find_model
from secateur.models.resnet_cifar import CifarResNet
from secateur.pruning.latency import LatencyTable, LayerTable
from secateur.pruning.selection import Target, ranked

EXAMPLE = torch.randn(1, 3, 16, 16)


def by_weights(model: nn.Module) -> LatencyTable:
    """A table in which a layer takes as many microseconds as it has weights."""
    layers = []
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            outputs, inputs = parameter.shape[:2]
            area = parameter[0, 0].numel()
            grid = ((0, inputs), (0, outputs))
            table = tuple(tuple(float(a * b * area) for b in grid[1]) for a in grid[0])
            layers.append(LayerTable(name, (1, 0), *grid, table))
    return LatencyTable("invented", tuple(layers))


GRAPH = analyze(CifarResNet(8, width=0.5), EXAMPLE, probe=False)


def network() -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    return CifarResNet(8, width=0.5), GRAPH


def test_the_whole_and_what_is_left_are_summed_over_layers() -> None:
    model, graph = network()
    table = by_weights(model)
    plan = Plan.random(graph, 0.4)
    for kept, network_ in ((graph.all_kept(), model), (plan.kept, shrink(model, plan))):
        weights = sum(p.numel() for p in network_.parameters() if p.dim() > 1)
        assert table.value(graph, kept) == pytest.approx(weights)


def test_savings_are_what_the_whole_loses() -> None:
    model, graph = network()
    table, whole = by_weights(model), graph.all_kept()
    savings = table.savings(graph, whole)
    for group in graph.groups:
        one = whole.clone()
        one[group.start] = False
        # Where a layer loses an input and an output at once, the corner is counted twice.
        lost = table.value(graph, whole) - table.value(graph, one)
        assert lost <= float(savings[group.start]) <= 1.2 * lost


@pytest.mark.parametrize("power", [1.0, 0.5, 0.0])
def test_ranks_per_microsecond_divide_by_a_power_of_the_savings(power: float) -> None:
    model, graph = network()
    table, kept = by_weights(model), Plan.random(graph, 0.3).kept
    scores = torch.rand(graph.num_channels, generator=torch.Generator().manual_seed(0))
    worth = ranked(graph, kept, scores, "score_per_microsecond", table, power)
    torch.testing.assert_close(worth, scores.double() / table.savings(graph, kept).double() ** power)


def test_between_widths_the_time_is_straight() -> None:
    layer = LayerTable("x", (1, 0), (2, 4), (10, 20), ((1.0, 2.0), (3.0, 6.0)))
    assert layer.at(2, 10) == 1.0
    assert layer.at(4, 20) == 6.0
    assert layer.at(3, 15) == pytest.approx((1 + 2 + 3 + 6) / 4)
    assert LayerTable("x", (None, 0), (8,), (4, 8), ((1.0, 2.0),)).at(8, 6) == 1.5


@pytest.mark.parametrize(
    "name",
    [
        "resnet20",
        pytest.param("torchvision:mobilenet_v2", marks=pytest.mark.slow),
        pytest.param("torchvision:regnet_y_400mf", marks=pytest.mark.slow),
    ],
)
def test_measured_on_this_machine(name: str) -> None:
    model = find_model(name).eval()
    graph = analyze(model, torch.randn(1, 3, 32, 32))
    table = measure_latency(model, torch.randn(1, 3, 32, 32), repetitions=2)
    convolutions = [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    assert len(table.layers) == len(convolutions)
    whole = table.value(graph, graph.all_kept())
    assert 0 < table.value(graph, Plan.random(graph, 0.5).kept) < whole
    assert bool((table.savings(graph, graph.all_kept()) > 0).all())
    again = LatencyTable.from_dict(json.loads(json.dumps(table.to_dict())))
    assert again == table
    assert "batch 1, float32" in table.where


def test_a_layer_that_is_called_by_keyword() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(input=x)

    assert len(measure_latency(Named(), torch.randn(1, 3, 8, 8), repetitions=1).layers) == 1


def widened(table: dict[str, Any], axis: str) -> dict[str, Any]:
    """One more width than there are numbers."""
    return {**table, "layers": [{**row, axis: [*row[axis], 10**6]} for row in table["layers"]]}


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: {**table, "format": "x"},
        lambda table: {**table, "version": 2},
        lambda table: {**table, "layers": 3},
        lambda table: {**table, "layers": [{}]},
        lambda table: widened(table, "inputs"),
        lambda table: widened(table, "outputs"),
        lambda table: [],
    ],
)
def test_a_damaged_table_is_refused(damage: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(InvalidData):
        LatencyTable.from_dict(damage(by_weights(network()[0]).to_dict()))


def test_a_run_ends_where_the_time_is_met() -> None:
    model, graph = network()
    table = by_weights(model)
    data = [(torch.randn(4, 3, 16, 16), torch.arange(4)) for _ in range(2)]
    settings = TickTock.of(keep_latency=0.6, tick_removes=0.1, tock_every=0, finetune_epochs=1)
    assert settings.ranking == "score_per_microsecond"
    result = prune(model, EXAMPLE, classification(data), settings=settings, graph=graph, latency=table)
    whole, left = table.value(graph, graph.all_kept()), table.value(graph, result.plan.kept)
    assert 0.55 * whole < left <= 0.6 * whole
    assert result.history[-1].left == {"microseconds": pytest.approx(left / whole)}


def test_without_a_table_a_run_measures_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph = network()
    monkeypatch.setattr("secateur.runs.prune.measure_latency", lambda model, example, **options: by_weights(model))
    task = classification([(torch.randn(4, 3, 16, 16), torch.arange(4))])
    settings = TickTock.one_shot(keep_latency=0.6, finetune_epochs=0)
    result = prune(model, EXAMPLE, task, settings=settings, graph=graph)
    assert by_weights(result.model).value(graph, graph.all_kept()) > 0
    assert result.history[-1].left["microseconds"] <= 0.6


def test_tables_that_are_missing_or_of_another_network() -> None:
    model, graph = network()
    table = by_weights(CifarResNet(8, width=0.25))
    with pytest.raises(InvalidSetting) as caught:
        Pruner(model, graph=graph, latency=table)
    assert "width 4 instead of 8" in str(caught.value.got)
    with pytest.raises(InvalidSetting):  # no layer in common
        table.check(analyze(nn.Sequential(nn.Conv2d(3, 4, 1)), EXAMPLE))
    with pytest.raises(InvalidSetting):
        Target(Budget(latency=0.6), graph)
    with pytest.raises(InvalidSetting):
        Pruner(model, graph=graph, rank="score_per_microsecond")


def test_the_table_of_a_network_with_computed_and_tied_weights_is_its_own() -> None:
    tied = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1, bias=False)
    tied[1].weight = tied[0].weight
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 16, 1))
    plain = nn.Conv2d(16, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), normed, *tied, nn.ReLU(), *plain)
    table = measure_latency(model, EXAMPLE, repetitions=1)
    Pruner(model, EXAMPLE, latency=table)


def test_layers_in_groups_are_told_by_the_axis_that_has_all_channels() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.Conv2d(16, 16, 3, groups=4),
        nn.ConvTranspose2d(16, 8, 2, groups=2),
        nn.ConvTranspose2d(8, 6, 2),
        nn.Conv2d(6, 2, 1),
    )
    table, graph = measure_latency(model, EXAMPLE, repetitions=1), analyze(model, EXAMPLE)
    table.check(graph)
    assert [layer.axes for layer in table.layers] == [(1, 0), (None, 0), (0, None), (0, 1), (1, 0)]
    whole = sum(layer.microseconds[-1][-1] for layer in table.layers)
    assert table.value(graph, graph.all_kept()) == pytest.approx(whole)


def test_slow_layers_lose_more() -> None:
    """With scores all alike, the ranking takes what saves most time for a channel."""
    model, graph = network()
    flat = by_weights(model)
    slow = [
        LayerTable(x.name, x.axes, x.inputs, x.outputs, tuple(tuple(100 * t for t in line) for line in x.microseconds))
        if x.name.startswith("stage1")
        else x
        for x in flat.layers
    ]
    savings = LatencyTable("invented", tuple(slow)).savings(graph, graph.all_kept())
    by_group = {group.name: float(savings[group.start]) for group in graph.groups}
    assert max(by_group, key=lambda name: by_group[name]).startswith(("stage1", "conv1"))


def test_what_takes_longer_than_the_whole_network_is_within_reach() -> None:
    model, graph = network()
    assert Target(Budget(latency=0.6), graph, by_weights(model)).at(1.13).budget.share == 1.0
