"""A small residual network and data on which it learns something, in double precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur import Task, TickTock, analyze, classification

if TYPE_CHECKING:
    import pytest

SIZE, CLASSES = 6, 4


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


def batches(count: int = 6, size: int = 16, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """Images whose class is the quadrant with most light in it."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(count):
        images = torch.rand(size, 2, SIZE, SIZE, generator=generator, dtype=dtype)
        parts = F.avg_pool2d(images.sum(1, keepdim=True), SIZE // 2).flatten(1)
        result.append((images, parts.argmax(1)))
    return result


def prepared(**changes: Any) -> tuple[Net, Any, Task]:
    """The network in double precision, its graph, and the task."""
    torch.manual_seed(0)
    net = Net().double()
    graph = analyze(net, torch.rand(1, 2, SIZE, SIZE, dtype=torch.float64))
    data = batches()
    return net, graph, classification(changes.get("train", data), changes.get("test", data[:2]))


def quick(**settings: Any) -> TickTock:
    """A short schedule."""
    defaults: dict[str, Any] = {
        "keep_macs": 0.5,
        "tick_removes": 0.1,
        "tick_lr": 0.01,
        "ticks_per_tock": 2,
        "tock_epochs": 2,
        "tock_lr": (0.01, 0.05),
        "finetune_epochs": 2,
        "finetune_lr": (0.01, 0.05),
    }
    if any(name.startswith("keep_") for name in settings):
        del defaults["keep_macs"]
    return TickTock(**{**defaults, **settings})


def on_a(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut as runs there do."""
    monkeypatch.setattr("secateur.runs.run.device_of", lambda model: torch.device(device))
