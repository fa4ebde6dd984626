"""How long a run will take, from a few steps of its training."""

from __future__ import annotations

import math
import time

import torch

from secateur.channels.shrink import copy_model
from secateur.randomness import seeded
from secateur.results.report.words import duration
from secateur.runs.phases import Phase, TrainPhase
from secateur.runs.run import Run
from secateur.runs.settings import TickTock
from secateur.runs.ticktock import PruningPhase
from secateur.training.batches import num_examples, prefetch, share_of
from secateur.words import counted

BATCHES = 4
"""Batches to time; the first of several warms up and does not count."""
PATIENCE = 15.0
"""Seconds after which no further batch is timed."""


def forecast(run: Run, images: int) -> str:
    """The time of an epoch and of the whole run, without tests, in words."""
    epoch = images * seconds_of_image(run) / run.world.size
    epochs = sum(epochs_of(phase, run) for phase in run.phases)
    return (
        f"an epoch of {counted(images, 'image')} trains in about {duration(epoch)}, and the run, of about "
        f"{counted(round(epochs), 'epoch')}, in {duration(epochs * epoch)}; tests come on top"
    )


def seconds_of_image(run: Run) -> float:
    """Seconds to load an image and to compute its gradients, in the mean over the first few batches."""
    model = copy_model(run.model if run.pruner is None or run.whole is None else run.whole).train()
    device, timed = run.trainer.device, list[tuple[float, int]]()
    begun = last = time.perf_counter()
    with seeded(run.settings.seed):
        for batch in prefetch(run.task.train, device):
            with run.trainer.autocast():
                loss = run.task.loss(model, batch)
            loss.backward()
            model.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            timed.append((time.perf_counter() - last, num_examples(batch) or 1))
            last = time.perf_counter()
            if len(timed) == BATCHES or last - begun > PATIENCE:
                break
    seconds, images = map(sum, zip(*(timed[1:] or timed), strict=True))
    return seconds / images


def epochs_of(phase: Phase, run: Run) -> float:
    """How many epochs a phase has; of pruning about, since Ticks end when the budget is met."""
    if isinstance(phase, TrainPhase):
        return phase.schedule.epochs
    if not isinstance(phase, PruningPhase):
        return 0
    settings = phase.settings
    ticks, tocks = num_ticks(settings), settings.tocks
    share = settings.ticks.data
    if settings.ticks.images is not None:
        share = share_of(run.task.train, settings.ticks.images)
    num_tocks = ticks // tocks.every + tocks.first if tocks.every else 0
    return ticks * settings.ticks.epochs * share + num_tocks * tocks.epochs


def num_ticks(settings: TickTock) -> int:
    """About how many Ticks there will be, if what a Tick removes has the mean cost of a filter.

    >>> num_ticks(TickTock.of(keep_macs=0.25, tick_removes=0.5)), num_ticks(TickTock.one_shot(keep_macs=0.25))
    (2, 1)
    """
    budget, ticks = settings.budget, settings.ticks
    if ticks.removes == 1:
        return 1
    by_filters = math.log(budget.share) / math.log(1 - ticks.removes)
    return max(1, math.ceil(max(by_filters, (1 - budget.share) / ticks.step) - 1e-9))
