"""Prune as far as an accuracy allows: runs with smaller and smaller budgets, each from the last good one's pruning."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite, sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from secateur.channels.analyze import Ignore, analyze
from secateur.errors import Diverged, InvalidSetting, UnreachableBudget
from secateur.pruning.settings import UNITS
from secateur.runs.events import Result
from secateur.runs.prune import chosen, prune
from secateur.runs.run import Progress
from secateur.runs.settings import Preset, TickTock
from secateur.training.distributed import World
from secateur.training.engine import Engine
from secateur.training.task import HOLD_OUT, Task, check_task

FIRST, FACTOR, CLOSE = 0.9, 0.75, 1.1
"""The first share of the MACs, the factor to the next one, and how close a good and a bad one are in the end."""

Attempt = Callable[[float, float | None], Result]
"""Prunes to a share of the MACs, from the run of another share if there is one."""


def prune_to(
    model: nn.Module,
    example: Any,
    task: Task,
    *,
    accuracy: float,
    preset: Preset | None = None,
    settings: TickTock | None = None,
    engine: Engine | None = None,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    ignore: Ignore = (),
    inexact: bool = False,
    **values: Any,
) -> Result:
    """Prune as far as an accuracy allows: the smallest network found that still has it on the held-out data.

    Runs with smaller and smaller shares of the MACs, each with its own fine-tuning; then some between the last that is
    good enough and the first that is not.

    accuracy: what the first number of the task's `held_out` must be at least, as 98.0 for percent.
    folder: where the runs live, each in a folder of its own; the same call resumes what was stopped there.
    The other arguments are those of `prune`.
    """
    if check_task(task).held_out is None:
        raise InvalidSetting("prune_to has nothing to judge by", remedy=HOLD_OUT)
    check_target(accuracy, values)
    settings = chosen(preset, settings, {**values, "keep_macs": FIRST})
    graph = analyze(model, example, ignore=ignore, inexact=inexact, progress=progress or (lambda step: None))
    with TemporaryDirectory() as temporary:
        root = Path(folder) if folder is not None else Path(World.current().tell(temporary))

        def attempt(share: float, since: float | None) -> Result:
            return prune(
                model,
                example,
                task,
                settings=settings.but(keep_macs=share),
                engine=engine,
                folder=root / name_of(share),
                continue_from=root / name_of(since) if since is not None else None,
                progress=progress,
                graph=graph,
            )

        try:
            return search(attempt, accuracy, progress or (lambda line: None))[1]
        except KeyboardInterrupt as stop:
            if folder is None:  # what the run has said of its folder is not true for long
                stop.__notes__ = [note for note in getattr(stop, "__notes__", []) if str(root) not in note]
            raise


def check_target(target: float, values: dict[str, Any]) -> None:
    """Raise for a target that is no number, and for a budget beside it."""
    if not isfinite(target):
        raise InvalidSetting("the target accuracy is not a number", got=target, wanted="one on the scale of the metric")
    if given := [name for name in values if name.removeprefix("keep_") in UNITS]:
        what = "a budget and a target accuracy do not go together"
        raise InvalidSetting(what, got=given[0], remedy="Leave out one of them")


def name_of(share: float) -> str:
    """The folder of a run.

    >>> name_of(0.675)
    'keep-0.675'
    """
    return f"keep-{share:.3f}"


def search(attempt: Attempt, target: float, say: Callable[[str], object]) -> tuple[float, Result]:
    """The budget and the result of the smallest network that meets the target.

    >>> from types import SimpleNamespace as Fake
    >>> def attempt(share, since):
    ...     return Fake(metrics={"held_out": 100 * share}, after=Fake(macs=share), before=Fake(macs=1))
    >>> round(search(attempt, 50.0, lambda line: None)[0], 2)
    0.51
    """
    good: tuple[float, Result] | None = None
    left, bad, share = 1.0, 0.0, FIRST
    while True:
        try:
            result = attempt(share, good[0] if good is not None else None)
        except (UnreachableBudget, Diverged) as error:
            if good is None:
                raise
            why = error.what if isinstance(error, Diverged) else error
            say(f"{share:.1%} of the MACs cannot be reached: {why}")
            bad = share
        else:
            value = result.metrics["held_out"]
            meets = value >= target
            say(f"{share:.1%} of the MACs: {value:.2f} on held-out images, {'enough' if meets else 'too little'}")
            if meets:
                good, left = (share, result), result.after.macs / max(1, result.before.macs)
            elif good is None:
                what = f"the target is not reached with {share:.0%} of the MACs"
                raise UnreachableBudget(what, got=f"{value:.2f} on held-out images", wanted=f"{target:g} or more")
            else:
                bad = share
        assert good is not None
        share = round(FACTOR * left if not bad else sqrt(left * bad), 3)
        if (bad and left < CLOSE * bad) or share < 0.02 or not bad < share < left:
            return good
