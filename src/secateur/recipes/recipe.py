"""What a recipe is: a network, its data, how it is trained, and how it is pruned. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from secateur.errors import InvalidSetting
from secateur.pruning.settings import Budget
from secateur.runs.settings import TickTock
from secateur.training.settings import Schedule, Training

LARGEST_TICK = 0.3
"""The largest share of filters that a Tick of a shortened run removes."""

AnySettings = TypeVar("AnySettings", bound=TickTock | Training)


def from_scratch() -> Training:
    """How the paper trains its CIFAR baselines: SGD, with a learning rate that is divided twice."""
    return Training(schedule=Schedule(epochs=160, lr=0.1, lr_low=0.0, shape="steps", milestones=(0.5, 0.75)))


def transfer() -> Training:
    """How a network with weights from elsewhere is trained on other data.

    A trained network needs a tenth of the learning rate that random weights need: more would undo what it has learned.
    It settles within some 20 epochs. The rate rises first, since a new classifier sends large gradients into the rest.
    """
    return Training(schedule=Schedule(epochs=25, lr=0.01, lr_low=0.0, shape="warmup"))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A network on a dataset, with everything that is needed to train and to prune it."""

    network: str
    """By name, as `find_model` takes it."""
    data: str
    """By name, as `find_dataset` takes it."""
    options: dict[str, Any] = field(default_factory=dict)
    """For the function that builds the network."""
    input_size: tuple[int, int, int] | None = None
    """Of the example that MACs are counted for, and of images whose size can be chosen; otherwise the dataset's."""
    crop_area: float | None = None
    """Photographs for training are random parts, from this share of the area on, instead of windows of one size."""
    training: Training = field(default_factory=from_scratch)
    transfer: Training | None = None
    """How to train from weights that are given; otherwise as from random ones."""
    pruning: TickTock = field(default_factory=lambda: TickTock(budget=Budget(macs=0.5)))
    batch_size: int = 128
    erase: int = 0
    """Side of a square that is erased in every training image."""
    top5: bool = False
    """Report the accuracy among the five best classes too."""
    summed: bool = False
    """The loss is the sum over the pixels of an image, instead of their mean."""

    def but(self, **values: Any) -> Recipe:
        return replace(self, **values)


def scaled(settings: AnySettings, scale: float) -> AnySettings:
    """Settings of a run about `scale` times as long, in epochs and in Ticks; Tocks come as often as before.

    >>> short = scaled(TickTock.of(keep_macs=0.4, tick_removes=0.002), 0.01)
    >>> short.ticks.removes, short.tocks.every, short.tocks.epochs, short.finetune.epochs
    (0.2, 1, 1, 1)
    """
    if not scale > 0:
        raise InvalidSetting("epochs_scale is out of range", got=scale, wanted="a number above 0")
    if scale == 1:
        return settings
    if isinstance(settings, Training):
        return settings.but(epochs=_times(settings.schedule.epochs, scale))
    before = settings.ticks.removes
    removes = 1.0 if before == 1 else min(max(LARGEST_TICK, before), before / scale)
    return settings.but(
        tick_removes=removes,
        tock_every=_times(settings.tocks.every, before / removes),
        tock_epochs=_times(settings.tocks.epochs, scale),
        finetune_epochs=_times(settings.finetune.epochs, scale),
        finetune_min_steps=round(settings.finetune.min_steps * scale),
        retrain_epochs=_times(settings.retrain_epochs, scale),
    )


def _times(number: int, scale: float) -> int:
    """So many times the epochs or Ticks: at least one, but none of none."""
    return max(1, round(number * scale)) if number > 0 else number
