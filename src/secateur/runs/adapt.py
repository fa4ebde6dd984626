"""Fit settings to a task: what a preset wants and the task does not allow is left out, and said."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from secateur.channels.groups import ChannelGraph
from secateur.channels.shrink import copy_model
from secateur.errors import SecateurError
from secateur.pruning.repair import gather
from secateur.randomness import seeded
from secateur.runs.settings import TickTock
from secateur.training.distill import scores_of
from secateur.training.task import Task, check_task


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
        settings = settings.but(distill=0.0)
    return settings


@torch.no_grad()
def _why_no_repair(model: nn.Module, graph: ChannelGraph, task: Task) -> str | None:
    """Why there are no images for repair, if so."""
    try:
        with seeded(0):
            call = gather(map(task.inputs, task.train), graph.calls["eval"][0], 1)[0]
    except (SecateurError, KeyError, TypeError) as error:
        return str(error)
    try:
        call.on(next(model.parameters()).device)(copy_model(model).eval())
    except Exception as error:  # of the network's own code
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return f"the network does not take what a batch begins with ({reason}); batch= of the task says what it takes"
    return None


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
