"""The whole job in one call: `prune` and `train`, and the runs that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from secateur.channels.analyze import Ignore, analyze
from secateur.channels.groups import ChannelGraph, check_graph
from secateur.channels.plan import Plan
from secateur.channels.verify import verify
from secateur.errors import InvalidSetting
from secateur.pruning.latency import LatencyTable
from secateur.pruning.measure import measure_latency
from secateur.runs.adapt import adapted
from secateur.runs.duration import estimate
from secateur.runs.events import Finished, Result
from secateur.runs.phases import Phase, StartPhase, TrainPhase
from secateur.runs.record import continued
from secateur.runs.run import Progress, Run
from secateur.runs.settings import Preset, TickTock
from secateur.runs.ticktock import PruningPhase
from secateur.training.distributed import World
from secateur.training.engine import Engine
from secateur.training.settings import Training, with_epochs
from secateur.training.task import Task

Some = TypeVar("Some", bound=TickTock | Training)


def prune(
    model: nn.Module,
    example: Any,
    task: Task,
    *,
    preset: Preset | None = None,
    settings: TickTock | None = None,
    engine: Engine | None = None,
    folder: str | Path | None = None,
    continue_from: str | Path | None = None,
    progress: Progress | None = None,
    graph: ChannelGraph | None = None,
    ignore: Ignore = (),
    inexact: bool = False,
    latency: LatencyTable | None = None,
    **values: Any,
) -> Result:
    """Analyse, prune, fine-tune and verify a copy of the model.

    example: what the model is called with: a tensor, a tuple of positional or a dict of keyword arguments.
    preset: how to prune: "quick" (the default), "balanced" or "paper", as of `TickTock.preset`.
    settings: instead of a preset. `values` are single settings by flat name, as keep_macs=0.4 or finetune_epochs=10.
    engine: how to use the hardware.
    folder: where the run lives; one that was stopped there is resumed, given the same call.
    continue_from: the folder of a run that pruned less; this one starts from the end of its pruning.
    progress: called with every event, and with lines of text; `print` will do.
    graph: the analysis of the model, if you have it. Without it, `ignore` and `inexact` are those of `analyze`.
    latency: the times of the layers, from `measure_latency`; otherwise they are measured where they are needed.
    """
    settings = chosen(preset, settings, values)
    say = progress or (lambda event: None)
    if graph is None:
        graph = analyze(model, example, ignore=ignore, inexact=inexact, progress=say)
    check_graph(graph)
    for note in graph.notes:
        say(f"note: {note}")
    settings = adapted(settings, model, graph, task, say)
    if latency is None and settings.needs_latency:
        if settings.latency_in != "torch":
            remedy = "Pass latency=measure_latency(model, example, run=...), or use the command line"
            raise InvalidSetting(f"a table of times in {settings.latency_in} is not measured here", remedy=remedy)
        say("measuring the layers on this device")
        latency = measure_latency(model, example, multiple_of=settings.limits.multiple_of, progress=say)
    start = nullcontext()
    if continue_from is not None:
        if folder is None:
            raise InvalidSetting("continue_from needs a folder for the new run")
        if World.current().leads and not (Path(folder) / "config.json").exists():
            start = continued(continue_from, folder, settings)
    phases = pruning_phases(settings, latency)
    whole = Plan(graph, graph.all_kept())
    with start:
        World.current().wait()
        run = Run(settings, phases, model, whole, task, engine=engine, folder=folder, progress=say)
    if progress is not None and not run.history:
        say(estimate(run))
    result = finish(run)
    # Pruning has checked its cuts on random inputs of the example's shape; this is the example itself.
    return replace(result, verification=verify(run.whole or model, result.plan, example))


def chosen(preset: Preset | None, settings: TickTock | None, values: dict[str, Any]) -> TickTock:
    """The settings, or those of a preset, with these values by flat name."""
    if settings is None:
        return TickTock.preset(preset or "quick", **values)
    if preset is not None:
        raise InvalidSetting("preset and settings do not go together", remedy="Pass one of them")
    return checked(settings, TickTock).but(**with_epochs(values, "finetune_"))


def checked(settings: Some, kind: type[Some]) -> Some:
    """The settings; raises for anything else."""
    if not isinstance(settings, kind):
        raise InvalidSetting("the settings are of another kind", got=type(settings).__name__, wanted=kind.__name__)
    return settings


def train(
    model: nn.Module,
    example: Any,
    task: Task,
    *,
    settings: Training | None = None,
    engine: Engine | None = None,
    folder: str | Path | None = None,
    progress: Progress | None = None,
    **values: Any,
) -> Result:
    """Train a copy of the model; the arguments are those of `prune`, and `values` as epochs=10 or lr=0.1."""
    settings = Training.of(**values) if settings is None else checked(settings, Training).but(**with_epochs(values))
    graph = analyze(model, example, probe=False)
    whole, say = Plan(graph, graph.all_kept()), progress or (lambda event: None)
    run = Run(settings, training_phases(settings), model, whole, task, engine=engine, folder=folder, progress=say)
    if progress is not None and not run.history:
        say(estimate(run))
    return finish(run)


def finish(run: Run) -> Result:
    """Do all of a run, and give its result."""
    for event in run.events():
        run.progress(event)
        if isinstance(event, Finished):
            return event.result
    raise AssertionError("a run ends with an event that holds its result")


def pruning_phases(
    settings: TickTock, latency: LatencyTable | None = None, baseline: Training | None = None
) -> Sequence[Phase]:
    """What a pruning run does.

    baseline: first train the network like this.
    """
    learning, phases = settings.learning, list[Phase]()
    if baseline is not None:
        phases.append(TrainPhase("baseline", baseline.schedule, baseline.learning))
    phases.append(StartPhase())
    if settings.retrain_epochs:
        schedule = replace(settings.finetune, epochs=settings.retrain_epochs)
        phases.append(TrainPhase("retrain", schedule, learning, averages=True))
    phases.append(PruningPhase(settings, latency))
    phases.append(TrainPhase("finetune", settings.finetune, learning, distills=True, averages=True, chooses=True))
    return phases


def training_phases(settings: Training) -> Sequence[Phase]:
    """What a training run does."""
    training = TrainPhase("train", settings.schedule, settings.learning, distills=True, averages=True, chooses=True)
    return [StartPhase(), training]
