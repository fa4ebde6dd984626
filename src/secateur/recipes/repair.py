"""Repair the network of a run, or of a recipe with a plan, and compare it with the plain cut."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from secateur.channels.analyze import analyze
from secateur.channels.shrink import shrink, tensors_of
from secateur.channels.verify import confirm
from secateur.errors import InvalidSetting
from secateur.files import serialize
from secateur.pruning.repair import repair
from secateur.pruning.selection import count_filters
from secateur.randomness import seeded
from secateur.recipes.jobs import Job, Order, build
from secateur.recipes.starts import begin, plan_of
from secateur.results.artifact import write_result
from secateur.results.summary import shape_of
from secateur.runs.events import Result, Start
from secateur.runs.record import WHOLE
from secateur.settings import check_seed
from secateur.training.batches import reseed, unaugmented
from secateur.training.settings import Training


@dataclass(frozen=True, kw_only=True)
class Repaired:
    """A repaired network, and what it is compared with."""

    result: Result
    plain: dict[str, float]
    """The metrics of the plain cut."""
    notes: list[str]
    """The layers that keep their plain cut, and why."""

    @property
    def networks(self) -> dict[str, dict[str, Any]]:
        """MACs, parameters and metrics of the whole network, the plain cut and the repaired network."""
        before, after = vars(self.result.before), vars(self.result.after)
        return {
            "whole": {**before, "metrics": self.result.metrics_before},
            "plain": {**after, "metrics": self.plain},
            "repaired": {**after, "metrics": self.result.metrics},
        }


def repair_network(
    order: Order,
    plan: Path | None,
    out: Path,
    device: torch.device,
    *,
    images: int = 512,
    seed: int = 0,
    progress: Callable[[str], object] = lambda step: None,
) -> Repaired:
    """Repair the whole network that `order.weights` names, and save the result in a folder.

    plan: a file; without it, that of the pruned network that `order.weights` names.
    images: how many training images to use; their labels are ignored.
    progress: called with the name of each step.
    """
    check_seed(seed)
    progress("building")
    job = build(order, seed, device)
    graph = analyze(job.model, job.example, ignore=order.ignore, inexact=order.inexact)
    start = begin(job, graph, order, seed)
    if start.new_head is not None:
        raise InvalidSetting(f"repair does not train, and {start.new_head}", remedy="Train it first: secateur train")
    if start.whole is None:
        remedy = "Name the folder of the run that pruned it"
        raise InvalidSetting(f"repair needs the whole network, which {order.weights} lacks", remedy=remedy)
    whole, chosen = start.whole, plan_of(plan, graph, order) if plan is not None else start.plan
    if bool(chosen.kept.all()):
        raise InvalidSetting("there is nothing to repair", got="a plan that keeps all channels")
    progress("checking the plan")
    verification = confirm(whole, chosen)
    started = time.perf_counter()
    notes: list[str] = []
    progress("re-fitting layers")
    with seeded(seed):
        batches = _calibration(job, seed)
        model = repair(whole, chosen, batches, images=images, seed=seed, progress=progress, note=notes.append).eval()
    seconds = time.perf_counter() - started
    metrics: list[dict[str, float]] = []
    for name, network in (("whole", whole), ("plainly cut", shrink(whole, chosen)), ("repaired", model)):
        progress(f"testing the {name} network")
        with seeded(seed):
            metrics.append(job.task.metrics(network))
    event = Start(
        macs=graph.macs,
        share=1.0,
        params=graph.params,
        filters=count_filters(graph, graph.all_kept()),
        metrics=metrics[0],
        seconds=seconds,
    )
    settings = Training.of(epochs=0, seed=seed)
    result = Result(
        model=model, plan=chosen, settings=settings, history=(event,), final=metrics[2], verification=verification
    )
    done = Repaired(result=result, plain=metrics[1], notes=notes)
    about = {
        "order": order.to_dict(),
        **job.about,
        "input": shape_of(graph.input),
        "repair": {"images": images, "plan": str(plan) if plan is not None else None, "plain": done.plain},
    }
    write_result(result, out, about, {WHOLE: serialize(tensors_of(whole))})
    return done


def _calibration(job: Job, seed: int) -> Any:
    """Training images, where they are in memory without augmentation, in an order that the seed decides."""
    return unaugmented(reseed(job.task.train, seed))
