"""Doing what was ordered: a run in a folder, from the network it starts from to the result on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from secateur.channels.analyze import analyze
from secateur.channels.example import Example
from secateur.errors import DamagedRun, Diverged, Interrupted, InvalidSetting, MissingExtra
from secateur.files import read_json
from secateur.recipes.jobs import Order, build
from secateur.recipes.paper import find_recipe
from secateur.recipes.starts import TAKEN, TEACHER, check_files, keep_files, prepare, sums_of
from secateur.recipes.timing import latency_table, time_left
from secateur.results.artifact import save
from secateur.results.bench import latency
from secateur.results.pictures import draw_seen
from secateur.results.summary import device_name, shape_of
from secateur.runs.events import Event, Finished, Result
from secateur.runs.record import prune_further
from secateur.runs.run import Run
from secateur.runs.settings import BUDGETS, TickTock
from secateur.training.checkpoint import as_it_was, read_config
from secateur.training.distributed import World
from secateur.training.engine import Engine
from secateur.words import counted

BASELINE, AGAIN = "baseline", "again"
"""Within the run: what is trained first, and once more, before anything is pruned."""


@dataclass(frozen=True)
class Watcher:
    """Whoever wants to know how a run goes."""

    say: Callable[[str], None] = lambda text: None
    step: Callable[[str, int, int], None] | None = None
    event: Callable[[Event], None] = lambda event: None
    guard: Callable[[Run], AbstractContextManager[None]] = lambda run: nullcontext()
    """Gives what surrounds the run, to be able to stop it."""


def perform(
    order: Order,
    settings: TickTock,
    engine: Engine,
    out: Path,
    device: torch.device,
    watcher: Watcher,
    further: Path | None = None,
) -> Result:
    """Begin the run in that folder, or go on with it, and save its result there.

    further: begin where this run's pruning has ended.
    """
    world = World.current()
    begun = (out / "config.json").is_file()
    if further is None:
        _check_first(order, settings, engine, out, device)
        order = _with_baseline(order, settings, engine, out, device, watcher)
        order = _with_again(order, settings, engine, out, device, watcher)
    else:
        order = replace(order, weights=reopen(further)[0].weights, again=0)
    with as_it_was(out, *TAKEN) if world.leads else nullcontext():
        if begun:
            _check_same(order, out)
        watcher.say(f"building {order.recipe}")
        job = build(order, settings.seed, device)
        if begun:
            check_files(out, read_config(out).get("files", {}))
        else:
            keep_files(job, order, settings, out, further)
        whole, teacher, plan = prepare(job, order, settings, out)
        graph = analyze(job.model, job.example)
        for note in graph.notes:
            watcher.say(f"note: {note}")
        about = {"order": order.to_dict(), "network": job.network, "input": shape_of(graph.input)}
        again = read_config(out).get("again") if begun else _again_of(out, order)
        if again is not None and plan is None:
            about["again"] = again
        timed = settings.keep_latency is not None or settings.ranking == "score_per_microsecond"
        table = latency_table(job, settings, engine, out, watcher.say) if timed else None
        if table is not None:
            about["latency_table"] = table.where
        with _going_further(further if not begun else None, out, settings):
            run = Run(
                settings,
                job.model,
                graph,
                job.task,
                engine=engine,
                folder=out,
                about=about if begun else {**about, "files": sums_of(out)},
                say=watcher.say,
                teacher=teacher,
                latency=table,
            )
    result = _go_through(run, order, out, about, watcher)
    if world.leads:
        if plan is not None:
            # What was kept, in terms of the network that was cut first, and what that was worth.
            known = (out / TEACHER).is_file() and job.task.evaluate is not None
            result = replace(result, plan=plan, original=job.task.metrics(whole) if known else {})
        elif "again" in about:
            result = replace(result, original=about["again"]["before"])
        if settings.keep_latency is not None:
            about["latency_left"] = time_left(job, whole, result.model, settings, engine, watcher.say)
        seconds = latency({"before": whole, "after": result.model}, job.example)
        about["latency"] = {**seconds, "batch": Example.of(job.example).size, "device": device_name(device)}
        save(result, out / "result", **about)
        if job.maps is not None:
            try:
                draw_seen({"before": job.model, "after": result.model}, job.maps, out / "result" / "pictures.png")
            except MissingExtra as error:
                watcher.say(f"no pictures are drawn: {error}")
    if (stopping := world.any(run.stopping)) is not None:
        raise Interrupted(stopping, str(out))  # asked for in the last evaluation: what would follow must not begin
    return result


def _go_through(run: Run, order: Order, out: Path, about: dict[str, Any], watcher: Watcher) -> Result:
    """Do the run; the network as it was before its training diverged is saved beside it."""
    run.watch = watcher.step
    result = None
    try:
        with watcher.guard(run):
            for event in run.events():
                watcher.event(event)
                if isinstance(event, Finished):
                    result = event.result
    except Diverged as error:
        saved = out / "diverged"
        if run.world.leads:
            save(error.result, saved, **about)
        told = f"{error}; it is saved in {saved}: secateur finetune {order.recipe} {saved} goes on from there"
        raise Diverged(told, error.result) from None
    assert result is not None
    return result


@contextmanager
def _going_further(source: Path | None, out: Path, settings: TickTock) -> Iterator[None]:
    """Put the run where another one's pruning has ended; if it cannot begin, nothing is left of that."""
    world = World.current()
    if source is not None and world.leads:
        prune_further(source, out, settings)
    world.wait()
    try:
        yield
    except BaseException:
        if source is not None and world.leads:
            (out / "config.json").unlink(missing_ok=True)
            shutil.rmtree(out / "checkpoints", ignore_errors=True)
        raise


def _check_same(order: Order, out: Path) -> None:
    """Raise if the run that was begun in the folder works on something else, or cannot go on."""
    if (out / "result" / "summary.json").is_file() and not any((out / "checkpoints").glob("[0-9]*")):
        raise InvalidSetting(f"{out} is done, and its checkpoints are gone: its result is in {out / 'result'}")
    begun, wanted = read_config(out).get("order", {}), order.to_dict()
    other = [
        name
        for name in ("recipe", "batch_size", "erase", "width", "fresh", "hold_out")
        if begun.get(name) != wanted[name]
    ]
    if other:
        raise InvalidSetting(
            f"{out} holds a run with another {', '.join(other)}: go on as it was, or name another folder"
        )


def reopen(out: Path) -> tuple[Order, TickTock, Engine]:
    """What the run in a folder was asked for."""
    if not (out / "config.json").exists():
        for name, what in ((AGAIN, "training the whole network once more"), (BASELINE, "its baseline")):
            if (out / name / "config.json").exists():
                raise InvalidSetting(f"{out} was still at {what}: give the same command as before to go on")
        raise InvalidSetting(
            f"{out} is not a run: it has no config.json; name the run's own folder, or give the command that begins it"
        )
    config = read_config(out)
    if "order" not in config:
        raise InvalidSetting(
            f"{out} was started from Python: call the same again with folder={str(out)!r}, or after "
            "secateur.prune_further to prune further"
        )
    try:
        return Order(**config["order"]), TickTock.from_dict(config["settings"]), Engine(**config["engine"])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise DamagedRun(
            f"{out / 'config.json'} is damaged, or of another version: {error}; start a new run elsewhere"
        ) from error


def _check_first(order: Order, settings: TickTock, engine: Engine, out: Path, device: torch.device) -> None:
    """Before a training that may take long: would the pruning begin that comes after it?"""
    untrained = order.weights is None and not order.is_own
    due = [folder for folder, wanted in ((BASELINE, untrained), (AGAIN, order.again)) if wanted]
    if settings.keep_macs == 1 or settings.keep_latency is not None:
        return
    if any(not (out / folder / "result" / "summary.json").is_file() for folder in due):
        job = build(order, settings.seed, device)
        Run(settings, job.model, analyze(job.model, job.example), job.task, engine=engine)


def _with_baseline(
    order: Order, settings: TickTock, engine: Engine, out: Path, device: torch.device, watcher: Watcher
) -> Order:
    """For a recipe that is to be pruned and has no weights yet: train it first, in a run of its own."""
    if order.weights is not None or order.is_own or settings.keep_macs == 1:
        return order
    folder = out / BASELINE
    training = find_recipe(order.recipe).training.scaled(order.epochs_scale).settings(settings.seed)
    why = f"no weights are given: training for {counted(training.finetune_epochs, 'epoch')} first, in {folder}"
    _train(why, replace(order, again=0), training, engine, folder, device, watcher)
    return replace(order, weights=str(folder))


def _with_again(
    order: Order, settings: TickTock, engine: Engine, out: Path, device: torch.device, watcher: Watcher
) -> Order:
    """For a network that is to be trained once more before it is pruned: do that, in a run of its own."""
    if not order.again or settings.keep_macs == 1:
        return order
    folder, order, epochs = out / AGAIN, replace(order, again=0), order.again
    budget = {**dict.fromkeys(BUDGETS), "keep_macs": 1.0}
    whole = settings.but(**budget, rank="score", distill=0.0, finetune_epochs=epochs)
    why = f"training the whole network once more, for {counted(epochs, 'epoch')}, in {folder}"
    _train(why, order, whole, engine, folder, device, watcher)
    return replace(order, weights=str(folder))


def _train(
    why: str, order: Order, settings: TickTock, engine: Engine, folder: Path, device: torch.device, watcher: Watcher
) -> None:
    """Do what comes before the run, unless it is done already."""
    if (folder / "result" / "summary.json").is_file():
        done, wanted = reopen(folder)[1].to_dict(), settings.to_dict()
        other = [name for name in wanted if done[name] != wanted[name]]
        if other:
            raise InvalidSetting(
                f"{folder} was trained with another {', '.join(other)}: name it as the weights, or another folder"
            )
        return
    watcher.say(why)
    try:
        perform(order, settings, engine, folder, device, watcher)
    except Interrupted as stop:
        raise stop.within("the same command as before") from None


def _again_of(out: Path, order: Order) -> dict[str, Any] | None:
    """Of a run that starts from a network which was trained once more, here or in the run it goes on from: how."""
    for folder in (out / AGAIN, Path(order.weights or "")):
        summary, parent = folder / "result" / "summary.json", folder.parent
        of_a_run = folder.name == AGAIN and (parent == out or (parent / "config.json").is_file())
        if of_a_run and summary.is_file():
            first = read_json(summary)
            metrics = {"before": first["before"]["metrics"], "metrics": first["after"]["metrics"]}
            return {"weights": first["order"]["weights"], "seconds": first["seconds"], **metrics}
    return None
