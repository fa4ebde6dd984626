"""How long a run will take, from a few steps of its training."""

from __future__ import annotations

import time
from statistics import fmean

import torch

from secateur.channels.shrink import copy_model
from secateur.randomness import seeded
from secateur.runs.lengths import num_ticks, num_tocks
from secateur.runs.phases import Phase, TrainPhase
from secateur.runs.run import Run
from secateur.runs.ticktock import PruningPhase
from secateur.training.batches import prefetch, share_of
from secateur.training.loop import check_loss, norms_named, set_modes_
from secateur.words import counted, duration

BATCHES = 4
"""Batches to time; the first of several warms up and does not count."""
PATIENCE = 15.0
"""Seconds after which no further batch is timed."""
NAMES = {"finetune": "fine-tuning", "train": "training", "baseline": "training first", "retrain": "training once more"}
"""What phases are called where people read it."""


def estimate(run: Run) -> str:
    """What the run will do, and how long an epoch and all training takes, in words."""
    epochs = sum(epochs_of(phase, run) for phase in run.phases)
    what = f"to do: {', '.join(part for phase in run.phases for part in parts_of(phase, run)) or 'nothing'}"
    at_most = "at most " if any(may_end_sooner(phase) for phase in run.phases) else ""
    if run.world.size > 1 or not any(trains(phase) for phase in run.phases):
        return what
    epoch = run.num_batches * seconds_of_batch(run)
    times = f"An epoch trains in about {duration(epoch)}, all of it in {at_most}{duration(epochs * epoch)}"
    return f"{what}. {times}; tests come on top"


def parts_of(phase: Phase, run: Run) -> list[str]:
    """What a phase does, in words."""
    if isinstance(phase, TrainPhase):
        epochs = phase.schedule.length(run.num_batches)
        return [f"{counted(epochs, 'epoch')} of {NAMES.get(phase.name, phase.name)}"] if epochs else []
    if not isinstance(phase, PruningPhase):
        return []
    settings = phase.settings
    ticks = num_ticks(settings)
    tocks, repair = num_tocks(settings, ticks), " with repair" if settings.repair else ""
    length = settings.tocks.length(run.num_batches)
    about = "" if ticks == 1 else "at most about " if may_end_sooner(phase) else "about "
    said = [f"{about}{counted(ticks, 'Tick')}{repair}"]
    return [*said, f"{counted(tocks, 'Tock')} of {counted(length, 'epoch')}"] if tocks else said


def may_end_sooner(phase: Phase) -> bool:
    """Whether Ticks take away more of the budget than their share of the filters, since they rank by what it counts."""
    return isinstance(phase, PruningPhase) and phase.settings.ranking != "score" and num_ticks(phase.settings) > 1


def trains(phase: Phase) -> bool:
    if isinstance(phase, TrainPhase):
        return phase.schedule.epochs > 0
    return isinstance(phase, PruningPhase) and phase.settings.trains


def seconds_of_batch(run: Run) -> float:
    """Seconds to load a batch and to compute its gradients, in the mean over the first few."""
    model = copy_model(run.model if run.pruner is None or run.whole is None else run.whole)
    set_modes_(model, True, run.settings.learning.fixed_statistics)
    device, timed = run.trainer.device, list[float]()
    begun = last = time.perf_counter()
    with seeded(run.settings.seed):
        for batch in prefetch(run.task.train, device):
            with run.trainer.autocast(), norms_named(model):
                loss = run.task.loss(model, batch)
            check_loss(loss)
            loss.backward()
            model.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            timed.append(time.perf_counter() - last)
            last = time.perf_counter()
            if len(timed) == BATCHES or last - begun > PATIENCE:
                break
    return fmean(timed[1:] or timed or [0.0])


def epochs_of(phase: Phase, run: Run) -> float:
    """How many epochs a phase has; of pruning about, since Ticks end when the budget is met."""
    if isinstance(phase, TrainPhase):
        return phase.schedule.length(run.num_batches)
    if not isinstance(phase, PruningPhase):
        return 0
    settings = phase.settings
    share = settings.ticks.data
    if settings.ticks.images is not None:
        share = share_of(run.task.train, settings.ticks.images)
    ticks = num_ticks(settings)
    in_tocks = num_tocks(settings, ticks) * settings.tocks.length(run.num_batches)
    return ticks * settings.ticks.epochs * share + in_tocks
