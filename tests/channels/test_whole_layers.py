"""Torch's own layers in recorded passes, which are noted as one step: with the same results as operator by operator."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.channels import rehearsal, whole_layers
from secateur.channels.example import Example
from secateur.channels.rehearsal import Outcome, Record, ShapesOnly, run

EXAMPLE = Example.of(torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)))


class Twice(nn.Conv2d):
    """A convolution of somebody else."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def network() -> nn.Module:
    torch.manual_seed(0)
    activations = nn.ReLU(), nn.SiLU(inplace=True), nn.LeakyReLU(0.1, inplace=True), nn.GELU(), nn.Sigmoid()
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        *activations,
        nn.Conv2d(8, 8, 3, padding="same", padding_mode="reflect", groups=2),
        nn.BatchNorm2d(8, affine=False, track_running_stats=False),
        nn.ReLU6(inplace=True),
        Twice(8, 6, 3, stride=2, dilation=2),
        nn.Hardswish(),
        nn.Flatten(2),
        nn.Conv1d(6, 4, 1),
        nn.BatchNorm1d(4),
        nn.Hardsigmoid(),
    )


def in_both_ways(monkeypatch: pytest.MonkeyPatch, mode: str, make: Any) -> list[tuple[Outcome, Record]]:
    """A pass with layers as one step, then operator by operator."""
    found = []
    for _ in range(2):
        record = make()
        found.append((run(network(), EXAMPLE, mode, record), record))
        monkeypatch.setattr(rehearsal, "as_one_step", lambda record: nullcontext())
    return found


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_same_results(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    (ours, noted), (theirs, all_noted) = in_both_ways(monkeypatch, mode, Record)
    assert all(torch.equal(a, b) for a, b in zip(ours.outputs, theirs.outputs, strict=True))
    places = range(len(theirs.steps))
    assert len(places) == 4
    assert all(torch.equal(a, b) for a, b in zip(ours.sums(places), theirs.sums(places), strict=True))
    assert len(noted.operators) < len(all_noted.operators)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("bare", [False, True])
def test_the_same_shapes_without_the_arithmetic(monkeypatch: pytest.MonkeyPatch, mode: str, bare: bool) -> None:
    (ours, noted), (theirs, _) = in_both_ways(monkeypatch, mode, lambda: ShapesOnly(bare))
    assert [t.shape for t in ours.outputs] == [t.shape for t in theirs.outputs]
    first = [step for step in noted.operators if step[0] in ("convolution", "BatchNorm2d")][:2]
    assert first == [
        ("convolution", torch.Size([3, 3]), (1, 1), (1, 1), (1, 1)),
        ("BatchNorm2d", mode == "train", 0.1, 1e-5),
    ]


def test_an_error_is_that_of_the_operator() -> None:
    for record in (Record(), ShapesOnly(bare=True)):
        with pytest.raises(RuntimeError, match="to have 4 channels, but got 3"):
            run(nn.Sequential(nn.Conv2d(4, 2, 1)), EXAMPLE, "eval", record)
        assert nn.Conv2d.forward.__module__.startswith("torch.nn.")
        assert "forward" not in vars(nn.BatchNorm2d)


def test_what_somebody_has_replaced_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of a class, or how one layer convolves, as code does that makes textures."""

    def bordered(module: nn.Conv2d, data: Tensor) -> Tensor:
        return F.conv2d(F.pad(data, (2, 2, 2, 2)), module.weight, module.bias)

    one = nn.Sequential(nn.Conv2d(3, 4, 1))
    one[0]._conv_forward = lambda data, *_: bordered(one[0], data)
    assert run(one, EXAMPLE, "eval", ShapesOnly()).outputs[0].shape == (2, 4, 12, 12)
    monkeypatch.setattr(nn.Conv2d, "forward", bordered)
    assert run(nn.Sequential(nn.Conv2d(3, 4, 1)), EXAMPLE, "eval", ShapesOnly()).outputs[0].shape == (2, 4, 12, 12)


def test_under_a_transform_and_autocast_layers_run_as_they_are() -> None:
    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", torch.bfloat16):
                low = self.conv(x)
            return torch.vmap(self.conv)(x[:, None]), low

    record = ShapesOnly()
    each, low = run(Each(), EXAMPLE, "eval", record).outputs
    assert (each.shape, low.shape) == ((2, 1, 4, 6, 6), (2, 4, 6, 6))
    assert len(record.operators) > 2


@pytest.mark.parametrize("kind", [Record, ShapesOnly])
def test_layers_in_other_threads_run_as_they_are(kind: type[Record]) -> None:
    model, data = network().eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = model(data)
    recorder = kind()
    with whole_layers.as_one_step(recorder), ThreadPoolExecutor(1) as pool:
        found = pool.submit(torch.no_grad()(model), data).result()
    assert torch.equal(found, expected)
    assert not recorder.steps
    assert not recorder.operators
