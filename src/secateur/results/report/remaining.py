"""About how long a run still takes, from how long its Ticks and epochs have taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from secateur.results.report.read import Moment, Run
from secateur.results.report.tables import KINDS
from secateur.results.report.words import roughly, share
from secateur.runs.lengths import num_ticks, num_tocks
from secateur.runs.settings import TickTock
from secateur.training.settings import Schedule, Training

RECENT = 5
"""Ticks or epochs that the time of the next one is the median of: one may have waited for something else."""
STEADY = 0.8
"""Share of the largest step from which on Ticks count as removing equal amounts, not equal shares."""


def expected_end(run: Run) -> str:
    """How long a running run still takes after its last event, in words; empty if nobody can tell."""
    if run.finished or not run.running:
        return ""
    try:
        settings = KINDS[run.kind].of(**run.settings)
        seconds = _seconds_left(run, settings)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return ""  # settings of another version, or of no sense
    return f", {roughly(seconds)} to go" if seconds is not None and math.isfinite(seconds) else ""


def _seconds_left(run: Run, settings: TickTock | Training) -> float | None:
    todo = _pruning_left(run, settings) if isinstance(settings, TickTock) else _training_left(run, settings)
    total = 0.0
    for phase, count in todo.items():
        each = _seconds_of(run, phase, settings) if count else 0.0
        if count is None or each is None:
            return None
        total += count * each
    return total


def _training_left(run: Run, settings: Training) -> dict[str, int | None]:
    return {"Train": _epochs_left(run, settings.schedule, [m for m in run.moments if m.part == "train"])}


def _pruning_left(run: Run, settings: TickTock) -> dict[str, int | None]:
    """How many Ticks, and epochs of each phase; None where that is not known."""
    ticks, tocks, tuned = ([m for m in run.moments if m.phase == phase] for phase in ("Tick", "Tock", "FineTune"))
    first, again = ([m for m in run.moments if m.part == part] for part in ("baseline", "retrain"))
    more = 0 if tuned else _ticks_left(run, settings, ticks)
    in_tocks: int | None = 0
    if more and settings.tocks.every:
        length = tocks[-1].epochs if tocks else _length(run, settings.tocks)
        # After the last Tick there is no Tock.
        planned = num_tocks(settings, len(ticks) + more - 1)
        in_tocks = max(0, planned * length - len(tocks)) if length is not None else None
    return {
        "baseline": first[-1].epochs - first[-1].epoch if first else 0,
        "retrain": _epochs_left(run, replace(settings.finetune, epochs=settings.retrain_epochs), again),
        "Tick": more,
        "Tock": in_tocks,
        "FineTune": _epochs_left(run, settings.finetune, tuned),
    }


def _epochs_left(run: Run, schedule: Schedule, done: Sequence[Moment]) -> int | None:
    return max(0, done[-1].epochs - done[-1].epoch) if done else _length(run, schedule)


def _length(run: Run, schedule: Schedule) -> int | None:
    if schedule.min_steps and schedule.epochs and not run.batches:
        return None
    return schedule.length(run.batches or 1)


def _ticks_left(run: Run, settings: TickTock, ticks: Sequence[Moment]) -> int | None:
    """If they go on as they have begun: by equal amounts where the settings limit these, else by equal shares."""
    budget, left = settings.budget, 1.0 if not ticks else _left(run, ticks[-1], settings.budget.counts)
    if left is None:
        return None
    if left <= budget.share + 1e-9:
        return 0
    if left >= 1:
        return num_ticks(settings)
    amount = (1 - left) / len(ticks)
    if amount > STEADY * settings.ticks.step:
        return math.ceil((left - budget.share) / amount)
    return math.ceil(len(ticks) * math.log(left / budget.share) / math.log(1 / left))


def _left(run: Run, moment: Moment, counts: str) -> float | None:
    return moment.time_left if counts == "latency" else share(moment.costs[counts], run.moments[0].costs[counts])


def _seconds_of(run: Run, phase: str, settings: TickTock | Training) -> float | None:
    """Of the next Tick or epoch of a phase; of one that has not begun, as that of another."""
    phase = "Train" if phase in ("baseline", "retrain") else phase
    for other in (phase, "Tock", "Train", "FineTune", "Tick"):
        recent = [moment.seconds for moment in run.moments if moment.phase == other][-RECENT:]
        size, size_of_other = (1.0, 1.0) if other == phase else (_epochs_in(each, settings) for each in (phase, other))
        if recent and size is not None and size_of_other is not None:
            return median(recent) * size / size_of_other
    return None


def _epochs_in(phase: str, settings: TickTock | Training) -> float | None:
    """How many epochs of training take as long; None if the data of a Tick are counted in images."""
    if phase != "Tick" or not isinstance(settings, TickTock):
        return 1.0
    ticks = settings.ticks
    return ticks.epochs * ticks.data if ticks.images is None and ticks.per_class is None else None
