"""Fit settings to a task: what a preset wants and the task does not allow is left out, and said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.groups import ChannelGraph
from secateur.channels.shrink import copy_model
from secateur.errors import InvalidSetting, SecateurError
from secateur.nested import tensors_in
from secateur.pruning.repair import gather
from secateur.randomness import seeded
from secateur.runs.before_scores import find_place
from secateur.runs.settings import TickTock
from secateur.training.batches import prefetch
from secateur.training.distill import scores_of
from secateur.training.task import Loss, Task, check_task


def adapted(
    settings: TickTock, model: nn.Module, graph: ChannelGraph, task: Task, say: Callable[[str], object]
) -> TickTock:
    """The settings without repair or distillation where the task does not allow it, if they say `adapt`."""
    if not settings.adapt or not check_task(task).labelled:
        return settings
    if settings.repair and (why := _why_no_repair(model, graph, task)) is not None:
        say(f"note: no repair, since {why}")
        settings = settings.but(repair=0)
    if settings.learning.distill and (why := _why_no_teacher(model, graph, task)) is not None:
        say(f"note: no distillation, since {why}")
        settings = settings.but(distill=0.0, distill_features=0.0)
    if settings.learning.distill_features:
        try:
            find_place(model, graph)
        except InvalidSetting as error:
            say(f"note: no features are compared, since {error.what}")
            settings = settings.but(distill_features=0.0)
    return settings


@torch.no_grad()
def _why_no_repair(model: nn.Module, graph: ChannelGraph, task: Task) -> str | None:
    """Why repair could not give the network what a batch holds, if so."""
    network = copy_model(model)
    batches = prefetch(task.train, next(model.parameters()).device)
    with seeded(0):
        try:
            batch = next(batches, None)
            if batch is None:
                return None  # the run says that the data are empty
            call = gather([task.inputs(batch)], graph.calls["eval"][0], sys.maxsize)[0]
        except (SecateurError, KeyError, TypeError) as error:
            return str(error)
        try:
            call(network.eval())
        except Exception as error:  # of the network's own code
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            return (
                f"the network does not take what a batch begins with ({reason}); batch= of the task says what it takes"
            )
        if any(map(_scaled, call.tensors, _given_by(task.loss, network.train(), batch))):
            return "the loss gives the network other numbers than the batch holds; prepare images in the data instead"
    return None


def _given_by(loss: Loss, network: nn.Module, batch: Any) -> list[Tensor]:
    """The tensors that the network is called with first."""
    calls: list[list[Tensor]] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(tensors_in((args, kwargs)))

    handle = network.register_forward_pre_hook(note, with_kwargs=True)
    try:
        loss(network, batch)
    except Exception:  # training will say it better
        return []
    finally:
        handle.remove()
    return calls[0] if calls else []


def _scaled(ours: Tensor, theirs: Tensor) -> bool:
    """Whether one has clearly another range than the other; mixing and erasing images does not change it so much."""
    if ours.is_complex() or theirs.is_complex():
        return False
    wide = ours.double(), theirs.double()
    (mean, spread), (other, wanted) = ((float(t.mean()), float(t.std(correction=0))) for t in wide)
    return abs(mean - other) > wanted or spread > 2 * wanted or wanted > 2 * spread


@torch.no_grad()
def _why_no_teacher(model: nn.Module, graph: ChannelGraph, task: Task) -> str | None:
    """Why the whole network cannot teach, if so."""
    if not task.gives_scores:
        return "the task does not say that the model gives class scores: gives_scores=True, if it does"
    try:
        example = graph.calls["eval"][0].copied().on(next(model.parameters()).device)
        scores_of(example(copy_model(model).eval()), task.output)
    except (SecateurError, KeyError) as error:
        return str(error)
    return None
