"""A small network, its data, and a plain loop that prunes it, for comparison with other people's trainers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur import Budget, Pruner
from secateur.integrations.steps import StepPruning

BUDGET, FRACTION, EVERY, STEPS = Budget(macs=0.5), 0.2, 3, 18


class Net(nn.Module):
    """Called as those of transformers are: with labels it returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.second, self.last = nn.Conv2d(12, 10, 3, padding=1), nn.Linear(10, 4)
        self.double()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        x = F.relu(self.second(F.relu(self.norm(self.first(pixel_values)))))
        logits = self.last(x.mean((2, 3)))
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def data(count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64), torch.arange(count) % 4


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def made() -> tuple[Net, Pruner]:
    model = Net()
    return model, Pruner(model, data(1)[0])


def by_hand(batches: Callable[[int], list[tuple[Tensor, Tensor]]], clip: float | None = None) -> tuple[Net, Pruner]:
    """The network as a loop without any trainer leaves it.

    batches: those whose gradients are accumulated in a step.
    """
    model, pruner = made()
    optimizer, steps = optimizer_of(model), StepPruning(pruner, BUDGET, fraction=FRACTION, every=EVERY)
    model.train()
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = batches(step)
        for images, labels in parts:
            (F.cross_entropy(model(images), labels) / len(parts)).backward()  # pyright: ignore
        steps.observe()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        steps.stepped(optimizer)
    steps.finish()
    return model, pruner


def assert_same(model: nn.Module, expected: nn.Module, tolerance: float = 0.0) -> None:
    found, wanted = model.state_dict(), expected.state_dict()
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)
