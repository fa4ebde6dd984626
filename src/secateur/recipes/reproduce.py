"""Do an experiment: its runs one after another, each in a folder of its own, then the table or the figure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from secateur.errors import InvalidSetting
from secateur.files import read_json, write_atomic
from secateur.recipes import reports
from secateur.recipes.controls import narrowed
from secateur.recipes.experiments import Experiment, Step
from secateur.recipes.jobs import Order
from secateur.recipes.recipe import scaled
from secateur.recipes.work import RunConfig, read_run
from secateur.runs.record import differences
from secateur.runs.settings import TickTock
from secateur.training.distributed import World
from secateur.training.engine import Engine
from secateur.training.settings import Training

Perform = Callable[[RunConfig, Path, Path | None], object]
"""Does a run in a folder; the last is the folder of a run to continue from."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How an experiment is done."""

    experiment: Experiment
    order: Order
    """The recipe, its data, and what training the baseline starts from."""
    engine: Engine
    out: Path
    """Folder for the runs of all experiments: those that several experiments need are done once."""
    seed: int = 0
    scale: float = 1.0
    """Multiplies the length of everything."""
    baseline: Path | None = None
    """The trained network, instead of training one."""
    only: str = "*"
    """Steps to do, with wildcards; others must be finished, or are left out."""

    @property
    def name(self) -> str:
        """Of the recipe, fit for a file."""
        return re.sub(r"[^\w.@-]", "-", self.order.recipe)

    def seed_of(self, step: str) -> int:
        return 0 if step in self.experiment.shared else self.seed

    def folder(self, step: str) -> Path:
        return self.out / self.name / f"{step}-seed{self.seed_of(step)}"

    def finished(self, step: str) -> bool:
        return (self.folder(step) / "result" / "summary.json").is_file()

    def order_of(self, step: Step) -> Order:
        """The order of a step, but for what it starts from."""
        teacher = self.network_of(step.teacher) if step.teacher is not None else None
        erase = self.order.erase if step.erase is None else step.erase
        no_labels = self.order.no_labels or (self.experiment.no_labels and step.name != "baseline")
        return replace(self.order, teacher=teacher, erase=erase, no_labels=no_labels)

    def source_of(self, step: Step) -> str | None:
        """What the run of a step starts from: the run before it, or a file."""
        return self.order.weights if step.source is None else self.network_of(step.source)

    def network_of(self, step: str) -> str:
        """The run of a step, or the trained network that the user named instead."""
        return str(self.baseline if self.is_given(step) else self.folder(step))

    def is_given(self, step: str | None) -> bool:
        """Whether the user named a trained network instead of that step."""
        return step == "baseline" and self.baseline is not None


def reproduce(name: str, conditions: Conditions, perform: Perform, say: Callable[[str], None]) -> tuple[str, Path]:
    """Do the runs that are not finished yet, and write the page; gives its text and where it is."""
    experiment = conditions.experiment
    if not any(fnmatch(step.name, conditions.only) for step in experiment.steps):
        names = ", ".join(step.name for step in experiment.steps)
        raise InvalidSetting(f"no run of {name} has such a name", got=repr(conditions.only), wanted=f"one of {names}")
    for number, step in enumerate(experiment.steps, 1):
        folder = conditions.folder(step.name)
        if conditions.finished(step.name):
            check_same(step, conditions)
            say(f"{step.name}: finished already, in {folder}")
        elif fnmatch(step.name, conditions.only) and not (step.name == "baseline" and conditions.baseline is not None):
            say(f"{step.name}: run {number} of {len(experiment.steps)}, in {folder}")
            config = config_of(step, conditions)
            perform(config, folder, continue_of(step, config.settings, conditions))
    return write_page(name, conditions)


def write_page(name: str, conditions: Conditions) -> tuple[str, Path]:
    """The table or figure of the runs that are finished."""
    experiment = conditions.experiment
    folders = {step.name: conditions.folder(step.name) for step in experiment.steps if conditions.finished(step.name)}
    runs = {step: read_json(folder / "result" / "summary.json") for step, folder in folders.items()}
    if conditions.baseline is not None:
        folders["baseline"] = conditions.baseline
    page = conditions.out / f"{name}-{conditions.name}-seed{conditions.seed}.md"
    if not World.current().leads:
        return "", page
    done = reports.Done(conditions.order, runs, folders, conditions.scale, page.with_suffix(".svg"))
    report = getattr(reports, experiment.report) if done.pruned() else reports.nothing_yet
    text = f"# {name}\n\n{report(done)}"
    write_atomic(page, text)
    return text, page


def check_same(step: Step, conditions: Conditions) -> None:
    """Raise if the finished run in the folder of the step is another one."""
    folder, order = conditions.folder(step.name), conditions.order_of(step)
    begun = read_json(folder / "result" / "summary.json")
    wanted: dict[str, Any] = order.compared() | {"weights": conditions.source_of(step), "fresh": bool(step.shape_of)}
    if step.narrow_to is not None:
        del wanted["width"], wanted["weights"]
    elif step.source is not None and (not conditions.is_given(step.source) or _is_name(begun["order"]["weights"])):
        # Another run of the same experiment: all of them may have been moved. Published runs tell names alone.
        for given in (wanted, begun["order"]):
            given["weights"] = Path(str(given["weights"])).name
    settings = json.loads(json.dumps(settings_of(step, conditions).to_dict()))
    if other := differences(begun, {"settings": settings, "order": wanted}):
        remedy = "Choose another folder for the runs"
        raise InvalidSetting(f"{folder} holds another run", got=f"other {', '.join(other)}", remedy=remedy)


def _is_name(path: Any) -> bool:
    return Path(str(path)).name == str(path)


def settings_of(step: Step, conditions: Conditions) -> TickTock | Training:
    return scaled(step.settings.but(seed=conditions.seed_of(step.name)), conditions.scale)


def config_of(step: Step, conditions: Conditions) -> RunConfig:
    """The run of a step."""
    settings, order = settings_of(step, conditions), conditions.order_of(step)
    for before in filter(None, (step.source, step.teacher)):
        if not conditions.is_given(before) and not conditions.folder(before).exists():
            remedy = f"Do {before} first"
            raise InvalidSetting(f"{step.name} starts from {before}, which is not finished yet", remedy=remedy)
    if step.narrow_to is not None:
        order = narrowed(replace(order, weights=None), step.narrow_to, conditions.seed)
    else:
        order = replace(order, weights=conditions.source_of(step), fresh=step.shape_of is not None)
    return RunConfig(order=order, settings=settings, engine=conditions.engine)


def continue_of(step: Step, settings: TickTock | Training, conditions: Conditions) -> Path | None:
    """The run that this one continues from: a finished one with the same settings except for the budget."""
    if step.continue_from is None or not conditions.finished(step.continue_from):
        return None
    folder = conditions.folder(step.continue_from)
    before = read_run(folder).settings
    if not isinstance(before, TickTock) or not isinstance(settings, TickTock):
        return None
    return folder if replace(before, budget=settings.budget) == settings else None
