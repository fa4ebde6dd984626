"""How a network is trained: the schedule, and what all phases of a run share. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from secateur.settings import InvalidField, Settings, check_seed, group
from secateur.training.schedules import SHAPES, Shape

MORE_EPOCHS = 5
"""How many times as many epochs there are at most, for `min_steps`."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Settings):
    """How long a phase trains, and at which learning rates."""

    epochs: int = 40
    """Number of epochs."""

    min_steps: int = 0
    """Train for at least this many steps, where data are few: in more epochs, up to 5 times as many."""

    lr: float = 1e-2
    """Highest learning rate."""

    lr_low: float = 1e-3
    """Lowest learning rate, for the shapes that have one."""

    shape: Shape = "triangle"
    """triangle (the paper's: up, down), warmup (up for a fifth, down to 0), cosine (down), steps or constant."""

    milestones: tuple[float, ...] = (0.6, 0.8, 0.9)
    """Where "steps" divides the learning rate, as fractions of the epochs. The paper: 0.6, 0.8, 0.9 on ImageNet."""

    divide: float = 10.0
    """What "steps" divides the learning rate by."""

    def check(self) -> None:
        self.require("0 or more", "epochs", "min_steps", "lr", "lr_low", holds=lambda value: value >= 0)
        if self.lr_low > self.lr:
            raise InvalidField("lr_low", "is out of range", got=self.lr_low, wanted=f"at most lr, {self.lr}")
        numbers = all(isinstance(value, int | float) for value in self.milestones)
        if not numbers or not all(0 < value < 1 for value in self.milestones):
            wanted = "fractions of the epochs, between 0 and 1"
            raise InvalidField("milestones", "is out of range", got=self.milestones, wanted=wanted)
        self.require("a number above 0", "divide", holds=lambda value: value > 0)

    def length(self, num_batches: int) -> int:
        """How many epochs of so many batches it takes.

        >>> schedule = Schedule(epochs=5, min_steps=1000)
        >>> schedule.length(400), schedule.length(100), schedule.length(10)
        (5, 10, 25)
        """
        return min(max(self.epochs, -(-self.min_steps // num_batches)), MORE_EPOCHS * self.epochs)

    def rate(self, step: int, num_steps: int) -> float:
        """The learning rate of a step, out of so many in the whole phase."""
        divided = (self.milestones, self.divide) if self.shape == "steps" else ()
        # A loader may give more batches than its length says.
        return SHAPES[self.shape](min(step, num_steps), num_steps, self.lr_low, self.lr, *divided)


def with_epochs(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of settings by flat name; whoever gives a number of epochs wants that many, and not `min_steps`."""
    return {f"{prefix}min_steps": 0, **values} if f"{prefix}epochs" in values else values


@dataclass(frozen=True, kw_only=True)
class Learning(Settings):
    """What all phases of a run share: the optimizer, distillation, and averaging."""

    optimizer: str = "sgd"
    """Any optimizer of torch, by name: sgd, adamw, ..."""

    momentum: float = 0.9
    """Momentum, for optimizers that have it."""

    nesterov: bool = False
    """Use Nesterov momentum."""

    weight_decay: float = 1e-4
    """Weight decay, on gates too."""

    decay_norms: bool = True
    """Apply weight decay to gates, batch norms and biases too; otherwise to filters alone."""

    distill: float = 0.0
    """Share of the loss that is the distance from the whole network's output, in phases that distil; 1 is all of it."""

    distill_temperature: float = 4.0
    """Temperature that softens both outputs."""

    distill_features: float = 0.0
    """Weight of the distance from the teacher's last features beside its scores', in fine-tuning: 5 for few images."""

    fixed_statistics: bool = False
    """In training, layers compute as in evaluation: batch norms keep statistics, dropout is off. For few images."""

    ema: float = 0.0
    """Decay of a moving average of the weights, which becomes the result of fine-tuning; 0 for none."""

    best_epoch: bool = False
    """Keep the epoch of training or fine-tuning that is best on held-out images, not the last one."""

    def check(self) -> None:
        self.require("0 or more", "momentum", "weight_decay", "distill_features", holds=lambda value: value >= 0)
        self.require("a share, from 0 to 1", "distill", holds=lambda value: 0 <= value <= 1)
        self.require("a share, at least 0 and below 1", "ema", holds=lambda value: 0 <= value < 1)
        self.require("a number above 0", "distill_temperature", holds=lambda value: value > 0)
        if self.distill_features and not self.distill:
            wanted = "0, or distill above 0"
            raise InvalidField("distill_features", "has no teacher", got=self.distill_features, wanted=wanted)


Evaluate = Literal["always", "phases", "end"]


@dataclass(frozen=True, kw_only=True)
class Training(Settings):
    """Train a network: from random weights, or from those that it has."""

    schedule: Schedule = group(Schedule)
    learning: Learning = group(Learning)

    evaluate: Evaluate = "always"
    """When to compute the metrics: after every epoch, or at the end only (phases, end)."""

    seed: int = 0
    """Seed of everything random in a run."""

    def check(self) -> None:
        check_seed(self.seed)
