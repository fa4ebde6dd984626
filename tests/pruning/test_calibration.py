"""Times of layers that are scaled to those of whole networks."""

import pytest
import torch
from timed_networks import EXAMPLE, GRAPHS, NETWORKS, invented

from secateur import Plan, measure_latency
from secateur.channels.example import Example
from secateur.pruning.calibration import _fitted, calibrated
from secateur.pruning.latency import widths_of
from secateur.pruning.measure import _kind, _watch


@pytest.mark.parametrize("name", ["concatenated", "resnet20"])
def test_what_networks_take_is_found_again(name: str) -> None:
    model, graph = NETWORKS[name](), GRAPHS[name]
    table, calls = invented(model, EXAMPLE, 0, 4), _watch(model, Example.of(EXAMPLE))
    kinds, sizes = [_kind(module) for _, module, _, _ in calls], [size for *_, size in calls]
    factors = {"convolution": 0.5, "pointwise": 2.0, "grouped": 3.0, "linear": 1.0}

    def truth(plan: Plan) -> float:
        total = 3.0
        for layer, kind, size in zip(table.layers, kinds, sizes, strict=True):
            if layer.name in plan.gone:
                continue
            total += 0.25
            inputs, outputs = widths_of(layer, graph, plan.kept)
            total += factors[kind] * layer.at(inputs, outputs) + 1e-4 * size * outputs / layer.outputs[-1]
        return total

    macs = [module.weight[0].numel() * size for _, module, _, size in calls]
    found = calibrated(table, graph, kinds, sizes, macs, truth)
    for seed in range(5):
        gone = [branch.name for branch in graph.branches[seed::3]]
        plan = Plan(graph, Plan.random(graph, 0.15 * (seed + 1), seed).kept, frozenset(gone))
        assert found.value(graph, plan.kept) == pytest.approx(truth(plan), rel=1e-3)


def test_no_weight_is_negative() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.rand(20, 4, generator=generator, dtype=torch.float64)
    features[:, 3] = features[:, 0] + 0.01 * features[:, 3]
    wanted = features @ torch.tensor([1.0, -0.5, 2.0, 0.0], dtype=torch.float64)
    weights = _fitted(features, wanted)
    assert bool((weights >= 0).all())
    assert float(weights[1]) == 0
    assert float((features @ weights - wanted).abs().mean()) < 0.2


def test_networks_are_run_as_they_will_be() -> None:
    model, seen = NETWORKS["chain"](), []

    def run(network: torch.nn.Module, call: Example) -> object:
        seen.append(sum(parameter.numel() for parameter in network.parameters()))
        assert not network.training
        return lambda: call(network)

    table = measure_latency(model, EXAMPLE, repetitions=1, run=run)  # pyright: ignore[reportArgumentType]
    assert len(seen) > 8
    assert max(seen) == sum(parameter.numel() for parameter in model.parameters())
    assert min(seen) < 0.2 * max(seen)
    assert len(table.layers) == 5
