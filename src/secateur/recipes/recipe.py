"""What a recipe is: a network, its data, how it is trained, and how it is pruned. Plain settings, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from secateur.errors import InvalidSetting
from secateur.runs.settings import TickTock

LARGEST_TICK = 0.3
"""The share of filters that a Tick of a rehearsal removes at most."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a network is trained from the start: SGD, with a learning rate that falls in steps."""

    epochs: int = 160
    """Epochs."""

    lr: float = 0.1
    """Learning rate at the start."""

    milestones: tuple[float, ...] = (0.5, 0.75)
    """Where it is divided, as shares of the epochs."""

    divide: float = 10.0
    """By how much."""

    momentum: float = 0.9
    """Momentum."""

    weight_decay: float = 1e-4
    """Weight decay."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise InvalidSetting(f"epochs must be 1 or more, got {self.epochs}")

    def settings(self, seed: int) -> TickTock:
        """The same as a run that removes nothing, and so is fine-tuning from its first step on."""
        return TickTock(
            keep_macs=1.0,
            finetune_epochs=self.epochs,
            finetune_shape="steps",
            finetune_lr=(0.0, self.lr),
            milestones=self.milestones,
            milestone_divides=self.divide,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            seed=seed,
        )

    def scaled(self, scale: float) -> Training:
        """So many times the epochs, one at least."""
        return replace(self, epochs=stretched(self.epochs, scale))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A network on a dataset, with everything that is needed to train and to prune it."""

    network: str
    """By name, as `find_model` takes it."""
    data: str
    """By name, as `find_dataset` takes it."""
    options: dict[str, Any] = field(default_factory=dict)
    """For whatever builds the network."""
    input_size: tuple[int, int, int] | None = None
    """Of the example that MACs are counted for; otherwise what the dataset says."""
    training: Training = field(default_factory=Training)
    again: int = 0
    """Epochs for which the whole network is trained once more, on the labels, before it is pruned."""
    pruning: TickTock = field(default_factory=lambda: TickTock(keep_macs=0.5))
    batch_size: int = 128
    erase: int = 0
    """Side of a square, anywhere in every training image, that is made the mean colour."""
    top5: bool = False
    """Whether accuracy among the best five classes is reported too."""
    summed: bool = False
    """Whether the loss is the sum over an image's pixels."""

    def but(self, **values: Any) -> Recipe:
        return replace(self, **values)


def scaled(settings: TickTock, scale: float) -> TickTock:
    """A run about so many times as long: in its epochs, and in the number of its Ticks; Tocks come as often as before.

    >>> rehearsal = scaled(TickTock(keep_macs=0.4, tick_removes=0.002), 0.01)
    >>> rehearsal.tick_removes, rehearsal.ticks_per_tock, rehearsal.tock_epochs, rehearsal.finetune_epochs
    (0.2, 1, 1, 1)
    """
    if scale == 1:
        return settings
    epochs = stretched(settings.tock_epochs, scale)
    once = settings.tick_removes == 1
    removes = 1.0 if once else min(max(LARGEST_TICK, settings.tick_removes), settings.tick_removes / scale)
    return settings.but(
        tick_removes=removes,
        ticks_per_tock=stretched(settings.ticks_per_tock, settings.tick_removes / removes),
        tock_epochs=epochs,
        finetune_epochs=stretched(settings.finetune_epochs, scale),
    )


def stretched(number: int, scale: float) -> int:
    """So many times the epochs or Ticks: one at least, but none of none."""
    if not scale > 0:
        raise InvalidSetting(f"epochs_scale must be above 0, got {scale}")
    return max(1, round(number * scale)) if number > 0 else number
