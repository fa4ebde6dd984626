"""What a run starts from: random weights, a file, or another run; and, when it is resumed, its own folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from secateur.channels.analyze import analyze
from secateur.channels.groups import ChannelGraph
from secateur.channels.plan import Plan
from secateur.channels.shrink import shrink
from secateur.errors import InvalidData, InvalidSetting
from secateur.files import read_json
from secateur.models.lookup import is_of_library
from secateur.models.weights import SAME_CLASSES, NewHead, load_weights_
from secateur.randomness import seeded
from secateur.recipes.controls import initialize_
from secateur.recipes.jobs import Job, Order, build, narrower
from secateur.results.load import about, find_result, find_whole, read_plan
from secateur.runs.record import ORIGINAL, START_PLAN, WHOLE
from secateur.training.batches import device_of


@dataclass(frozen=True)
class Start:
    """The network that a run starts from."""

    model: nn.Module
    plan: Plan
    """What it keeps of the whole network."""
    whole: nn.Module | None
    """The whole network, if its weights are known."""
    new_head: NewHead | None = None
    """The classifier, if it has random weights and all else has given ones."""


def open_network(order: Order, device: torch.device, seed: int = 0) -> Job:
    """The job with the network that `order.weights` names: for evaluation."""
    job = build(order, seed, device)
    if order.weights is None:
        return job
    source = find_source(order.weights)
    if source.plan is None:
        _check_classes(job, source)
        source.fill_(job.model)
        return job
    graph = analyze(job.model, job.example, ignore=order.ignore, inexact=order.inexact)
    start = begin(job, graph, replace(order, fresh=False, new_head=None), seed)
    if start.whole is None and not job.task.labelled:
        remedy = "Name the folder of the run that pruned it"
        raise InvalidSetting(f"agreement needs the whole network, which {order.weights} lacks", remedy=remedy)
    return replace(job, model=start.model)


@dataclass(frozen=True)
class Source:
    """Files that a run can start from."""

    weights: Path
    plan: Path | None = None
    """Where the network was cut."""
    whole: Path | None = None
    """The network before it was cut."""
    is_result: bool = False
    """Whether the weights are those of a result, and not of anybody's file."""

    def fill_(self, model: nn.Module, new_head: str | None = None, if_needed: bool = False) -> NewHead | None:
        """Give the network, which is already cut, its weights; `new_head` and `if_needed` are for anybody's file."""
        if self.is_result and new_head is not None and not if_needed:
            remedy = "Name a file with weights"
            raise InvalidSetting("a new classifier is not for the result of a run", got=self.weights, remedy=remedy)
        return load_weights_(model, self.weights, exact=self.is_result, new_head=new_head, if_needed=if_needed)


def find_source(name: str) -> Source:
    """A run, its result, or a file with weights."""
    path = Path(name)
    if path.is_file():
        return Source(path)
    if not path.exists():
        raise InvalidSetting(f"there is neither a run nor a file with weights at {path}")
    folder = find_result(path)
    weights, plan = folder / "model.safetensors", folder / "plan.json"
    saved = read_plan(plan)
    if not saved.groups and not saved.branches:
        return Source(weights, is_result=True)
    return Source(weights, plan, find_whole(folder), is_result=True)


def begin(job: Job, graph: ChannelGraph, order: Order, seed: int) -> Start:
    """The start of a new run."""
    whole = Plan(graph, graph.all_kept())
    source = find_source(order.weights) if order.weights is not None else None
    if source is not None and not order.fresh and order.new_head is None:
        _check_classes(job, source)
    if source is None or source.plan is None:
        if order.fresh:
            raise InvalidSetting("there is no shape to take", got=order.weights, wanted="a pruned network")
        head = _fill_whole_(job, graph, order, source) if source is not None else None
        return Start(job.model, whole, job.model, head)
    if order.new_head is not None:
        raise InvalidSetting("a new classifier is not for a pruned network", got=order.weights)
    plan = plan_of(source.plan, graph, order)
    known = None
    if source.whole is not None:
        load_weights_(job.model, source.whole, exact=True)
        known = job.model
    model = shrink(job.model, plan)
    if order.fresh:
        with seeded(seed):
            initialize_(model)
    else:
        source.fill_(model)
    return Start(model, plan, known)


def _check_classes(job: Job, source: Source) -> None:
    """Raise if a result has as many classes as the job, and they have other names: its outputs would mean others."""
    names = about(source.weights.parent).classes if source.is_result else None
    if names is None or job.classes is None or len(names) != len(job.classes):
        return
    for number, (got, wanted) in enumerate(zip(names, job.classes, strict=True), 1):
        if got != wanted:
            remedy = "Name data of the same classes"
            if source.plan is None:
                remedy += f", or the file {source.weights} and --new-head with the layer that gives the output"
            what = f"class {number} of {source.weights.parent} has another name"
            raise InvalidData(what, got=got, wanted=wanted, remedy=remedy)


def teacher_of(job: Job, order: Order) -> nn.Module | None:
    """The network that the order names as teacher: of the same recipe, in full width."""
    if order.teacher is None:
        return None
    source = find_source(order.teacher)
    if source.plan is not None:
        raise InvalidSetting("the teacher is pruned", got=order.teacher, wanted="a whole network")
    _check_classes(job, source)
    teacher = narrower(replace(order, width=1.0), job)(1.0).to(device_of(job.model))
    source.fill_(teacher)
    return teacher


def _fill_whole_(job: Job, graph: ChannelGraph, order: Order, source: Source) -> NewHead | None:
    """Give the whole network its weights, but for a classifier of other classes, where that is known or named."""
    layers = {name.rpartition(".")[0] for name in graph.final}
    classifier = layers.pop() if len(layers) == 1 else None
    if order.new_head is not None:
        if not any(name.startswith(f"{order.new_head}.") for name in graph.final):
            wanted = classifier or " or ".join(sorted(graph.final))
            raise InvalidSetting("new_head is not the layer that gives the output", got=order.new_head, wanted=wanted)
        return source.fill_(job.model, order.new_head)
    if job.network is not None and is_of_library(job.network["name"]):
        return source.fill_(job.model, classifier, if_needed=True)
    try:
        return source.fill_(job.model)
    except InvalidData as error:
        if error.remedy == SAME_CLASSES and classifier is not None:
            file = f"--weights {source.weights} " if source.is_result else ""
            flags = f"{file}--new-head {classifier}"
            error.remedy = f"{SAME_CLASSES}; or make the classifier anew, if only that differs: {flags}"
        raise


def reopen(job: Job, graph: ChannelGraph, order: Order, folder: Path) -> Start:
    """The start of a run that is resumed, from its own folder."""
    plan = Plan(graph, graph.all_kept())
    if not (folder / START_PLAN).is_file():
        load_weights_(job.model, folder / ORIGINAL, exact=True)
        return Start(job.model, plan, job.model)
    plan = plan_of(folder / START_PLAN, graph, order)
    model = shrink(job.model, plan)
    load_weights_(model, folder / ORIGINAL, exact=True)
    known = None
    if (folder / WHOLE).is_file():
        load_weights_(job.model, folder / WHOLE, exact=True)
        known = job.model
    return Start(model, plan, known)


def plan_of(path: Path, graph: ChannelGraph, order: Order) -> Plan:
    """The plan in a file, for the network of that order."""
    data = read_json(path)
    try:
        return Plan.from_json(graph, data)
    except InvalidSetting as error:
        what = f"{path} is not of the network of {order.recipe}: {error}"
        remedy = "Name the recipe that it was made with, with the same --ignore and --inexact"
        raise InvalidSetting(what, remedy=remedy) from error
