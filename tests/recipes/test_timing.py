"""Runs with a budget of latency tell what came of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import doing
import pytest
import torch
from torch import nn

from secateur.channels.example import Example
from secateur.errors import InvalidData
from secateur.models.resnet_cifar import CifarResNet
from secateur.pruning.latency import LatencyTable
from secateur.pruning.measure import measure_latency, time_whole
from secateur.recipes import timing
from secateur.recipes.jobs import Order
from secateur.recipes.timing import read_table
from secateur.training.engine import Engine


def by_weights(model: nn.Module, **how: Any) -> LatencyTable:
    """A table in which narrower layers take less, whatever they do on this machine."""
    table = measure_latency(model, **how, repetitions=1)
    layers = [
        replace(layer, microseconds=tuple(tuple(float(a * b) for b in layer.outputs) for a in layer.inputs))
        for layer in table.layers
    ]
    return LatencyTable("invented", tuple(layers))


@pytest.mark.parametrize(
    ("times", "missed"),
    [
        pytest.param(0.7, False, marks=pytest.mark.slow),
        (0.76, False),
        (0.9, True),
        pytest.param(1.2, True, marks=pytest.mark.slow),
    ],
)
def test_a_run_says_when_the_network_takes_more_than_its_layers(
    times: float, missed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params: list[int] = []
    how: list[tuple[int, torch.dtype, bool]] = []

    def clock(
        models: dict[str, nn.Module], example: Example, precision: torch.dtype, channels_last: bool, patience: float
    ) -> dict[str, list[float]]:
        params.extend(sum(p.numel() for p in model.parameters()) for model in models.values())
        how.append((example.size, precision, channels_last))
        return {"before": [0.5, 0.5, 0.5], "after": [0.5 * times, 0.5 * times, 0.9]}

    monkeypatch.setattr(timing, "time_networks", clock)
    monkeypatch.setattr(timing, "measure_latency", by_weights)
    said: list[Any] = []
    settings = doing.PRUNING.but(keep_latency=0.7, latency_batch=3)
    engine = Engine(precision="bf16", channels_last=True)
    order = Order(recipe="own_networks:job")
    doing.do(order, settings, tmp_path, said.append, engine=engine)
    told = doing.summary(tmp_path)
    assert params == [told[when]["params"] for when in ("before", "after")]
    assert params[1] < params[0]
    assert how == [(3, torch.bfloat16, True)]
    latency = told["latency"]
    assert (latency["before"], latency["after"]) == (0.5, pytest.approx(0.5 * times))
    assert (latency["batch"], latency["how"]) == (3, "torch, bfloat16, channels last")
    lines = [text for text in said if isinstance(text, str)]
    assert any(f"{times:.0%} of the time is more than the budget of 70%" in text for text in lines) == missed
    assert any("times vary by" in text for text in lines) == (latency["spread"] > 0.1)
    assert f"{times:.0%} of the time of the whole network" in timing.in_words(latency)


def test_timing_leaves_the_network_as_it_is() -> None:
    model = CifarResNet(8, width=0.5).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert time_whole(model, torch.randn(2, 3, 16, 16), torch.bfloat16, True, 3) > 0
    assert model.training
    assert doing.same(model.state_dict(), before)
    assert all(tensor.dtype != torch.bfloat16 and tensor.is_contiguous() for tensor in model.state_dict().values())


def test_a_damaged_table_is_refused_by_its_path(tmp_path: Path) -> None:
    entry = {"name": "0", "axes": [1, 0], "inputs": [1.0], "outputs": [float("inf")], "microseconds": [[1.0]]}
    for layers in ([entry], [{}], 3):
        table = {"format": "secateur-latency", "version": 1, "where": "", "layers": layers}
        (tmp_path / "latency.json").write_text(json.dumps(table))
        with pytest.raises(InvalidData) as caught:
            read_table(tmp_path / "latency.json")
        assert str(tmp_path / "latency.json") in caught.value.what
