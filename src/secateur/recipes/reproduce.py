"""Doing an experiment: its runs one after another, each in a folder of its own, then the table or the figure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from secateur.errors import Interrupted, InvalidSetting
from secateur.files import read_json, write_atomic
from secateur.recipes import reports
from secateur.recipes.controls import narrowed
from secateur.recipes.experiments import Experiment, Step
from secateur.recipes.jobs import Order
from secateur.recipes.paper import find_recipe
from secateur.recipes.recipe import scaled, stretched
from secateur.recipes.work import reopen
from secateur.runs.settings import TickTock
from secateur.training.distributed import World

Perform = Callable[[Order, TickTock, Path, Path | None], object]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """How an experiment is done."""

    order: Order
    """The recipe, its data, and what training the baseline starts from."""
    out: Path
    """Folder for the runs of all experiments: those that several experiments need are done once."""
    seed: int = 0
    scale: float = 1.0
    """Times the length of everything."""
    baseline: Path | None = None
    """The trained network, instead of training one."""
    only: str = "*"
    """Steps to do, with wildcards; others must have been done, or are left out."""

    @property
    def name(self) -> str:
        """Of the recipe, fit for a file."""
        return re.sub(r"[^\w.@-]", "-", self.order.recipe)

    def folder(self, step: str) -> Path:
        return self.out / self.name / f"{step}-seed{self.seed}"


def reproduce(
    name: str, experiment: Experiment, conditions: Conditions, perform: Perform, say: Callable[[str], None]
) -> tuple[str, Path]:
    """Do the runs that are not done yet, and write the page; gives its text and where it is."""
    if not any(fnmatch(step.name, conditions.only) for step in experiment.steps):
        names = ", ".join(step.name for step in experiment.steps)
        raise InvalidSetting(f"there is no step like {conditions.only!r}: there are {names}")
    for number, step in enumerate(experiment.steps, 1):
        folder = conditions.folder(step.name)
        if (folder / "result" / "summary.json").is_file():
            check_same(step, conditions)
            say(f"{step.name}: done already, in {folder}")
        elif fnmatch(step.name, conditions.only) and not (step.name == "baseline" and conditions.baseline is not None):
            say(f"{step.name}: run {number} of {len(experiment.steps)}, in {folder}")
            try:
                settings = settings_of(step, conditions)
                perform(order_of(step, conditions), settings, folder, further_of(step, settings, conditions))
            except Interrupted as stop:
                raise stop.within("the same command as before") from None
    done = {
        step.name: read_json(summary)
        for step in experiment.steps
        if (summary := conditions.folder(step.name) / "result" / "summary.json").is_file()
    }
    folders = {name: conditions.folder(name) for name in done}
    if conditions.baseline is not None:
        folders["baseline"] = conditions.baseline
    page = conditions.out / f"{name}-{conditions.name}-seed{conditions.seed}.md"
    if not World.current().leads:
        return "", page
    given = reports.Done(conditions.order, done, folders, conditions.scale, page.with_suffix(".svg"))
    report = getattr(reports, experiment.report) if given.pruned() else reports.nothing_yet
    text = f"# {name}\n\n{report(given)}"
    write_atomic(page, text)
    return text, page


def check_same(step: Step, conditions: Conditions) -> None:
    """Raise if the run that was done in the step's folder was another one."""
    folder, order = conditions.folder(step.name), conditions.order
    summary = read_json(folder / "result" / "summary.json")
    wanted = settings_of(step, conditions).to_dict()
    wanted |= {name: getattr(order, name) for name in ("batch_size", "erase", "hold_out")}
    done = {**summary["settings"], **summary["order"]}
    if "again" in summary:
        done["weights"] = summary["again"]["weights"]
    if step.shrunk is None:
        wanted |= {"width": order.width, "weights": source_of(step, conditions)}
        if step.after is not None and not is_given(step, conditions):
            # Another run of the same experiment: all of them may have been moved.
            wanted["weights"], done["weights"] = (Path(str(given["weights"])).name for given in (wanted, done))
    other = [name for name in wanted if done.get(name) != wanted[name]]
    if other:
        raise InvalidSetting(f"{folder} holds a run with other settings ({', '.join(other)}): name another --out")


def settings_of(step: Step, conditions: Conditions) -> TickTock:
    return scaled(step.settings.but(seed=conditions.seed), conditions.scale)


def order_of(step: Step, conditions: Conditions) -> Order:
    """What the step's run works on."""
    if step.shrunk is not None:
        return narrowed(replace(conditions.order, weights=None), step.shrunk, conditions.seed)
    source = source_of(step, conditions)
    if step.after is not None and not is_given(step, conditions) and not Path(str(source)).exists():
        raise InvalidSetting(
            f"{step.name} starts from {step.after}, which is not done yet: do that first, with --only {step.after}"
        )
    again = stretched(find_recipe(conditions.order.recipe).again, conditions.scale)
    return replace(conditions.order, weights=source, fresh=step.fresh, again=again)


def further_of(step: Step, settings: TickTock, conditions: Conditions) -> Path | None:
    """The run whose pruning this one goes on with: one that was asked for the same but for the budget, and is done."""
    folder = conditions.folder(step.further) if step.further is not None else None
    if folder is None or not (folder / "result" / "summary.json").is_file():
        return None
    return folder if reopen(folder)[1].but(keep_macs=settings.keep_macs) == settings else None


def source_of(step: Step, conditions: Conditions) -> str | None:
    """What the step's run starts from: the run before it, or a file."""
    if step.after is None:
        return conditions.order.weights
    return str(conditions.baseline if is_given(step, conditions) else conditions.folder(step.after))


def is_given(step: Step, conditions: Conditions) -> bool:
    """Whether the step starts from the trained network that was named, and not from a run of the experiment."""
    return step.after == "baseline" and conditions.baseline is not None
