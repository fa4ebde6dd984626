"""A small residual network and data on which it learns something, in double precision."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur import ChannelGraph, Plan, Result, Task, TickTock, Training, analyze, classification
from secateur.runs.prune import finish, pruning_phases, training_phases
from secateur.runs.run import Run
from secateur.runs.ticktock import PruningPhase

if TYPE_CHECKING:
    import pytest

SIZE, CLASSES = 6, 4
STEPS = 4
"""Batches in an epoch."""


class Net(nn.Module):
    """A trunk with a residual sum, a convolution without batch norm, and a hidden linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.inner = nn.Conv2d(8, 12, 3, padding=1)
        self.inner_norm = nn.BatchNorm2d(12)
        self.outer = nn.Conv2d(12, 8, 1, bias=False)
        self.outer_norm = nn.BatchNorm2d(8)
        self.bare = nn.Conv2d(8, 10, 3, stride=2)
        self.hidden = nn.Linear(10, 9)
        self.last = nn.Linear(9, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(images)))
        x = x + self.outer_norm(self.outer(F.relu(self.inner_norm(self.inner(x)))))
        x = F.relu(self.bare(F.relu(x))).mean((2, 3))
        return self.last(F.relu(self.hidden(x)))


def batches(count: int = STEPS, size: int = 16, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """Images whose class is the quadrant with most light in it."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(count):
        images = torch.rand(size, 2, SIZE, SIZE, generator=generator, dtype=dtype)
        parts = F.avg_pool2d(images.sum(1, keepdim=True), SIZE // 2).flatten(1)
        result.append((images, parts.argmax(1)))
    return result


@cache
def graph_of(kind: type[nn.Module]) -> ChannelGraph:
    """The channel graph of such a network, analysed once."""
    return analyze(kind().double(), torch.rand(1, 2, SIZE, SIZE, dtype=torch.float64))


def prepared(train: Any = None) -> tuple[Net, ChannelGraph, Task]:
    """The network in double precision, its graph, and the task."""
    graph = graph_of(Net)
    torch.manual_seed(0)
    return Net().double(), graph, classification(batches() if train is None else train, batches(2))


def choosing() -> Task:
    """The task with held-out images to choose by."""
    held_out = [(images + 0.1, labels) for images, labels in batches(1)]
    return classification(batches(), batches(2), held_out=held_out)


SCHEDULE: dict[str, Any] = {
    "multiple_of": 1,
    "tick_removes": 0.1,
    "tick_lr": 0.01,
    "tock_every": 2,
    "tock_epochs": 2,
    "tock_lr_low": 0.01,
    "tock_lr": 0.05,
    "finetune_epochs": 2,
    "finetune_lr_low": 0.01,
    "finetune_lr": 0.05,
}


def quick(**values: Any) -> TickTock:
    """A short schedule, with other values by flat name."""
    budget = {} if any(name.startswith("keep_") for name in values) else {"keep_macs": 0.5}
    return TickTock.of(**{**SCHEDULE, **budget, **values})


def briefly(**values: Any) -> Training:
    """A short training, with other values by flat name."""
    return Training.of(**{"epochs": 2, "lr_low": 0.01, "lr": 0.05, **values})


def make_run(
    settings: TickTock | Training,
    net: nn.Module,
    graph: ChannelGraph,
    task: Task,
    baseline: Training | None = None,
    **options: Any,
) -> Run:
    """A run to go through event by event."""
    pruning = isinstance(settings, TickTock)
    phases = pruning_phases(settings, baseline=baseline) if pruning else training_phases(settings)
    return Run(settings, phases, net, Plan(graph, graph.all_kept()), task, **options)


def finished(settings: TickTock | Training, *given: Any, **options: Any) -> Result:
    """The result of such a run."""
    return finish(make_run(settings, *given, **options))


def states(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """The same names, in the same order, with the same values to the last bit."""
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def assert_near(one: nn.Module, other: nn.Module) -> None:
    """The same weights but for rounding."""
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=name)


def on_a(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut as runs on that kind of device do."""

    def start(phase: PruningPhase, run: Run) -> None:
        begin(phase, run)
        phase.cut_at_once, phase.aligns = device == "cpu", device == "cuda"

    monkeypatch.setattr(PruningPhase, "start", start)


begin = PruningPhase.start
