"""Networks timed side by side."""

import platform
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import secateur
from secateur.channels.cost import Cost
from secateur.errors import InvalidSetting
from secateur.models.lookup import find_model
from secateur.results.bench import bench, latency, runner, summarize, table
from secateur.timing import time_in_turn

OPTIONS = {
    "batch": 2,
    "shape": None,
    "how": "eager",
    "precision": "fp32",
    "channels_last": False,
    "repetitions": 3,
    "device": torch.device("cpu"),
}


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.training
        self.calls += 1
        time.sleep(0.4 if self.calls == 5 else 0.02)
        return x


def test_latency_is_a_median_after_warm_up() -> None:
    model = Sleeper().train()
    seconds = latency({"one": model, "other": nn.Identity()}, torch.ones(1), repetitions=5)
    assert model.calls == 8
    assert 0.02 <= seconds["one"] < 0.3
    assert model.training


def test_calls_are_timed_in_turn() -> None:
    order: list[str] = []
    time_in_turn({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, torch.device("cpu"), 2)
    assert order == ["a", "b"] * 5


def test_numbers_of_a_timing() -> None:
    timing = summarize("net", [0.1, 0.2, 0.3, 0.4, 1.0], 6, Cost(10, 20))
    assert (timing.median, timing.p90, timing.throughput) == (0.3, 1.0, 6 / 0.3)
    assert timing.spread == pytest.approx((0.7 - 0.15) / 2 / 0.3)


@pytest.mark.parametrize(("median", "told"), [(0.5, False), (1.0, True), (1.2, True)])
def test_a_smaller_network_that_is_not_faster_gets_advice(median: float, told: bool) -> None:
    whole, pruned = (
        summarize(name, [seconds] * 3, 1, Cost(macs, 10))
        for name, seconds, macs in (("whole", 1.0, 200), ("runs/pruned", median, 80))
    )
    text = table([whole, pruned])
    remark = "runs/pruned has 40% of the MACs of whole and is not faster here"
    assert (remark in text, "multiple_of=8" in text) == (told, told)
    assert "not faster" not in table([pruned, whole])


def test_runs_names_and_files_side_by_side(tmp_path: Path) -> None:
    model = find_model("resnet20")
    graph = secateur.analyze(model, torch.randn(1, 3, 32, 32))
    plan = secateur.Plan.random(graph, 0.5)
    settings = secateur.TickTock.of(keep_macs=0.5)
    result = secateur.Result(model=secateur.shrink(model, plan), plan=plan, settings=settings, history=())
    secateur.save(result, tmp_path / "run", network={"name": "resnet20", "options": {}}, input=[1, 3, 32, 32])
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    names = ["resnet20", str(tmp_path / "run"), f"resnet20={tmp_path / 'weights.pth'}"]
    timings, place = bench(names, **OPTIONS)  # pyright: ignore
    assert "core" in place
    assert [timing.name for timing in timings] == names
    assert [timing.macs for timing in timings] == [graph.macs, plan.cost.macs, graph.macs]
    assert all(0 < timing.median <= timing.p90 for timing in timings)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["resnet20", "timm:lcnet_035"], {}),  # of other images
        (["resnet20"], {"how": "captured"}),
        (["resnet20"], {"how": "onnxruntime", "precision": "bf16"}),
        (["resnet20"], {"how": "openvino", "precision": "fp16"}),
        (["resnet20"], {"batch": 0}),
        (["resnet20"], {"batch": 10**20}),
        (["resnet20"], {"repetitions": 1}),
        (["resnet20"], {"repetitions": 10**20}),
    ],
)
def test_what_cannot_be_timed_is_refused(names: list[str], options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        bench(names, **{**OPTIONS, **options})  # pyright: ignore


@pytest.mark.parametrize(
    "how", ["onnxruntime", "onnxruntime-int8", pytest.param("openvino", marks=pytest.mark.slow), "ncnn", "executorch"]
)
def test_other_runtimes(how: str) -> None:
    if how in ("ncnn", "executorch") or (how == "openvino" and platform.machine() == "aarch64"):
        pytest.importorskip(how)
    (timing,), _ = bench(["resnet14"], **{**OPTIONS, "how": how})  # pyright: ignore
    assert timing.median > 0


@pytest.mark.slow
def test_a_runtime_runs_the_network_that_it_was_given() -> None:
    torch.manual_seed(0)
    model, images = find_model("resnet20").eval(), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        wanted = model(images)
    exact: Any = runner(model, images, "onnxruntime")()
    rough: Any = runner(model, images, "onnxruntime-int8")()
    assert torch.allclose(exact[0], wanted, atol=1e-4)
    assert 1e-4 < float((rough[0] - wanted).abs().max()) < 0.5 * float(wanted.abs().max())
