"""Captured steps when something goes wrong, with CUDA's part played by others."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from secateur import timing
from secateur.training.graphed import GraphedStep
from secateur.training.optimizers import FUSED, make_optimizer, set_rate
from secateur.training.settings import Learning


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "CUDAGraph",
        "Stream",
        "current_stream",
        "get_rng_state",
        "set_rng_state",
        "set_stream",
        "synchronize",
    ):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "device", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda given: nullcontext())
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options))


class Steps:
    """Training steps of a small network, of which one fails."""

    def __init__(self, failing: int = 0, optimizer: str = "sgd") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2))
        learning = Learning(optimizer=optimizer, weight_decay=0.1)
        self.optimizer = make_optimizer(list(self.model.parameters()), learning)
        set_rate(self.optimizer, 0.1)
        self.failing, self.done = failing, 0

    def __call__(self, images: Tensor) -> None:
        self.done += 1
        if self.done == self.failing:
            raise RuntimeError("out of memory")
        self.optimizer.zero_grad()
        self.model(images).square().mean().backward()
        self.optimizer.step()

    def forward(self, images: Tensor) -> None:
        with torch.no_grad():
            self.model(images)

    def capture(self, images: Tensor) -> GraphedStep:
        return GraphedStep(self, self.forward, images, self.model, self.optimizer, [])

    def state(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self.model.state_dict().values()]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("optimizer", [kind.__name__.lower() for kind in FUSED])
def test_the_warm_up_leaves_nothing_behind(optimizer: str) -> None:
    images = torch.randn(2, 1, 6, 6)
    captured, eager = Steps(optimizer=optimizer), Steps(optimizer=optimizer)
    captured.capture(images)  # here a capture does the step
    for steps in (captured, eager, eager):
        steps(images)
    assert all(torch.equal(a, b) for a, b in zip(captured.state(), eager.state(), strict=True))


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("failing", [1, 3, 4])
def test_a_failure_leaves_everything_as_it_was(failing: int) -> None:
    steps = Steps(failing)
    before = steps.state()
    with pytest.raises(RuntimeError, match="out of memory"):
        steps.capture(torch.randn(2, 1, 6, 6))
    assert all(torch.equal(a, b) for a, b in zip(before, steps.state(), strict=True))
    assert not any(value.any() for state in steps.optimizer.state.values() for value in state.values())


@pytest.mark.usefixtures("cuda")
def test_a_failed_capture_is_followed_by_one_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    @contextmanager
    def graph(given: Any) -> Iterator[None]:
        entered.append(given)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    steps = Steps(failing=4)
    with pytest.raises(RuntimeError):
        steps.capture(torch.randn(2, 1, 6, 6))
    assert len(entered) == 2


@pytest.mark.usefixtures("cuda")
def test_what_a_graph_reads_is_held() -> None:
    model = nn.Conv2d(1, 1, 1)
    alive = weakref.ref(model)
    replay = timing.captured(lambda model=model: model, torch.device("cuda"))
    del model
    gc.collect()
    assert alive() is not None
    replay()
