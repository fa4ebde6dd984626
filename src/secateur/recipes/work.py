"""Do a run in a folder: from the network that it starts from to the result on disk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from secateur.channels.analyze import analyze
from secateur.channels.verify import confirm
from secateur.errors import Diverged, Interrupted, InvalidData, InvalidSetting, MissingExtra
from secateur.recipes import starts
from secateur.recipes.jobs import Job, Order, build
from secateur.recipes.paper import find_recipe
from secateur.recipes.recipe import scaled, transfer
from secateur.recipes.split import SPLIT, check_split, keep_split
from secateur.recipes.timing import TABLE, compare, latency_table
from secateur.results.artifact import save
from secateur.results.pictures import draw_predictions
from secateur.results.summary import shape_of
from secateur.runs.adapt import adapted
from secateur.runs.duration import estimate
from secateur.runs.events import Event, Finished, Result
from secateur.runs.prune import pruning_phases, training_phases
from secateur.runs.record import check_can_resume, continued, read_settings
from secateur.runs.run import Run
from secateur.runs.settings import TickTock
from secateur.training.checkpoint import as_it_was, read_config
from secateur.training.distributed import World
from secateur.training.engine import Engine
from secateur.training.settings import Training


@dataclass(frozen=True)
class Observer:
    """Whoever follows a run."""

    progress: Callable[[Event | str], object] = lambda event: None
    """Called with every event, and with lines of text in between."""
    on_step: Callable[[str, int, int], None] | None = None
    """Called after every training step with the phase, the batches done, and how many there are."""
    guard: Callable[[Run], AbstractContextManager[None]] = lambda run: nullcontext()
    """Makes what surrounds the run, so that it can be stopped."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run as config.json holds it: what it works on, how, and on which hardware."""

    order: Order
    settings: TickTock | Training
    engine: Engine


def perform(
    config: RunConfig, out: Path, device: torch.device, observer: Observer, continue_from: Path | None = None
) -> Result:
    """Begin the run in that folder, or resume it, and save its result there.

    continue_from: begin where the pruning of this run has ended.
    """
    order, settings, engine = config.order, config.settings, config.engine
    say, world = observer.progress, World.current()
    check_can_resume(out)
    if (out / "config.json").is_file() or not world.leads:
        continue_from = None
    with (
        as_it_was(out, TABLE, SPLIT) if world.leads else nullcontext(),
        continued(continue_from, out, settings) if continue_from is not None else nullcontext(),
    ):
        world.wait()
        resumes = (out / "config.json").is_file()
        say(f"building {order.recipe}")
        job = build(order, settings.seed, device, engine.channels_last)
        graph = analyze(job.model, job.example, ignore=order.ignore, inexact=order.inexact)
        for note in graph.notes:
            say(f"note: {note}")
        compared: dict[str, Any] = {"order": order.compared()}
        if resumes:
            start = starts.reopen(job, graph, order, out)
            begun = read_config(out)
            new_head = begun.get("new_head")
            if begun.get("classes") is not None:  # runs that began with an early version do not tell
                compared["classes"] = job.about.get("classes")
            if (out / SPLIT).is_file():
                check_split(job, order, out)
        else:
            start = starts.begin(job, graph, order, settings.seed)
            _check_start(start, config)
            new_head = asdict(start.new_head) if start.new_head is not None else None
            if start.new_head is not None:
                say(f"{order.weights}: {start.new_head}")
        teacher = starts.teacher_of(job, order)
        about: dict[str, Any] = {
            "order": order.to_dict(),
            **job.about,
            "input": shape_of(graph.input),
            **({"new_head": new_head} if new_head else {}),
        }
        table = None
        if isinstance(settings, TickTock):
            settings = adapted(settings, start.model, graph, job.task, say)
            if settings.needs_latency:
                table = latency_table(job, settings, engine, out, say)
                about["latency_table"] = table.where
            baseline = first_training(order, settings.seed, bool(new_head))
            if baseline is not None and not resumes:
                why = "the classifier is new" if new_head else "no weights are given"
                say(f"{why}: training {order.recipe} for {baseline.schedule.epochs} epochs first")
            phases = pruning_phases(settings, table, baseline)
        else:
            phases = training_phases(settings)
        run = Run(
            settings,
            phases,
            start.model,
            start.plan,
            job.task,
            whole=start.whole,
            teacher=teacher,
            engine=engine,
            folder=out,
            about=about,
            compared=compared,
            progress=say,
        )
        if world.leads and job.files is not None and not (out / SPLIT).is_file():
            say(keep_split(job, order, out))
    if resumes:
        say(f"resumed after {run.history[-1].name}" if run.history else "resumed at its beginning")
    if not run.history:
        say(estimate(run))
    result = _finish(run, out, about, observer)
    if world.leads and not (resumes and _is_saved(out / "result", job)):
        _save(result, run, job, config, out, about, say)
    if (stopping := world.any(run.stopping)) is not None:
        raise Interrupted(stopping, str(out))  # during the last evaluation: what would follow must not begin
    return result


def first_training(order: Order, seed: int, new_head: bool) -> Training | None:
    """How the network is trained before it is pruned; None where it is trained already."""
    if new_head:
        training = transfer() if order.is_own else find_recipe(order.recipe).transfer
    elif order.weights is None and not order.is_own:
        training = None
    else:
        return None
    training = training or find_recipe(order.recipe).training
    return scaled(training, order.epochs_scale).but(seed=seed)


def _check_start(start: starts.Start, config: RunConfig) -> None:
    pruned = not bool(start.plan.kept.all()) or bool(start.plan.without)
    if isinstance(config.settings, TickTock) and pruned:
        remedy = "Continue from its run, or fine-tune it"
        raise InvalidSetting(f"{config.order.weights} is already pruned", remedy=remedy)
    untrained = (
        isinstance(config.settings, TickTock) and not config.settings.trains and not config.settings.finetune.epochs
    )
    if untrained and start.new_head is not None:
        remedy = "Train it first: secateur train"
        raise InvalidSetting(f"pruning without training needs a trained network, and {start.new_head}", remedy=remedy)
    if config.order.teacher is not None and not config.settings.learning.distill:
        raise InvalidSetting("a teacher is for distillation, and distill is 0", remedy="Set it to 0.9")
    if config.settings.learning.distill and start.whole is None and config.order.teacher is None:
        remedy = "Name the folder of the run that pruned it, or a teacher"
        raise InvalidSetting(f"distill needs the whole network, which {config.order.weights} lacks", remedy=remedy)


def _finish(run: Run, out: Path, about: dict[str, Any], observer: Observer) -> Result:
    """Do the run; the network as it was before its training diverged is saved beside it."""
    run.on_step = observer.on_step
    result = None
    try:
        with observer.guard(run):
            for event in run.events():
                observer.progress(event)
                if isinstance(event, Finished):
                    result = event.result
    except Diverged as error:
        if run.world.leads:
            save(error.result, out / "diverged", **about)
        raise Diverged(
            f"{error.what}; the network before it is saved in {out / 'diverged'}", result=error.result
        ) from None
    assert result is not None
    return result


def _is_saved(result: Path, job: Job) -> bool:
    """Whether the folder holds all that a finished run leaves."""
    names = ["model.safetensors", "plan.json", "summary.json", *(["pictures.png"] if job.maps is not None else [])]
    return all((result / name).is_file() for name in names)


def _save(
    result: Result,
    run: Run,
    job: Job,
    config: RunConfig,
    out: Path,
    about: dict[str, Any],
    say: Callable[[str], object],
) -> None:
    whole = run.whole if run.whole is not None else job.model
    if run.pruning is not None:
        # A run that was resumed after its pruning does not know any more.
        result = replace(result, verification=run.pruning.verification or confirm(whole, result.plan))
    if result.after != result.before:  # training alone makes nothing faster
        about["latency"] = compare(job, whole, result.model, config.settings, config.engine, say)
    save(result, out / "result", **about)
    if job.maps is not None:
        try:
            draw_predictions({"before": whole, "after": result.model}, job.maps, out / "result" / "pictures.png")
        except MissingExtra as error:
            say(f"no pictures are drawn: {error}")


def read_run(out: Path) -> RunConfig:
    """What the run in a folder was asked for."""
    if not (out / "config.json").exists():
        raise InvalidSetting(f"{out} is not a run: it has no config.json", remedy="Name the folder of a run")
    saved = read_config(out)
    if "order" not in saved:
        remedy = f"Call secateur.prune again with folder={str(out)!r}, or with continue_from={str(out)!r}"
        raise InvalidSetting(f"{out} was started from Python", remedy=remedy)
    settings = read_settings(saved, out)
    try:
        engine = saved["engine"]
        if isinstance(engine.get("compile"), bool):  # as it was before there was "auto"
            engine = {**engine, "compile": "always" if engine["compile"] else "never"}
        return RunConfig(order=Order(**saved["order"]), settings=settings, engine=Engine(**engine))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        what = f"{out / 'config.json'} is damaged, or of another version: {error}"
        raise InvalidData(what, remedy="Start a new run in another folder") from error


def smaller(config: RunConfig, **budget: float) -> RunConfig:
    """The same with a smaller budget, for a run that continues from another."""
    settings = config.settings
    if not isinstance(settings, TickTock):
        raise InvalidSetting("only a pruning run can be continued with a smaller budget")
    return replace(config, settings=settings.but(rank=settings.ranking, **budget))
