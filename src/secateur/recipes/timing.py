"""A budget of latency: what layers take before a run, and what the network takes after it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.channels.example import Example
from secateur.files import read_json, write_atomic
from secateur.pruning.latency import LatencyTable
from secateur.pruning.measure import measure_latency, time_whole
from secateur.recipes.jobs import Job
from secateur.runs.settings import TickTock
from secateur.training.distributed import World
from secateur.training.engine import Engine
from secateur.training.loop import PRECISIONS

TABLE = "latency.json"
"""In the folder of a run: the times of its layers."""
MISSED = 1.1
"""Times the budget: above this it counts as missed."""


def latency_table(
    job: Job, settings: TickTock, engine: Engine, out: Path, say: Callable[[str], object]
) -> LatencyTable:
    """The times of the layers on this device: measured when the run begins, and kept in its folder."""
    world, path = World.current(), out / TABLE
    if world.leads and not path.is_file():
        say("measuring the layers on this device")
        multiple = settings.limits.multiple_of
        table = measure_latency(job.model, multiple_of=multiple, **_to_time(job, settings, engine))
        write_atomic(path, json.dumps(table.to_dict()))
    world.wait()
    return LatencyTable.from_dict(read_json(path))


def _to_time(job: Job, settings: TickTock, engine: Engine) -> dict[str, Any]:
    """How a network is timed for a budget of latency."""
    example = Example.of(job.example).batch(settings.latency_batch)
    precision = PRECISIONS.get(engine.precision, torch.float32)
    return {"example": example, "precision": precision, "channels_last": engine.channels_last}


def time_left(
    job: Job, whole: nn.Module, cut: nn.Module, settings: TickTock, engine: Engine, say: Callable[[str], object]
) -> float:
    """The share of the whole network's time that the pruned one takes; the table of layers is only an estimate."""
    before, after = (time_whole(model, **_to_time(job, settings, engine)) for model in (whole, cut))
    budget, left = settings.budget.share, after / before
    say(f"the pruned network takes {left:.0%} of the time of the whole one")
    if left > MISSED * budget:
        say(
            f"note: that is more than the budget of {budget:.0%}. Layers of this size hardly get faster when they get "
            "narrower, or the operators between them count: try a larger latency_batch, multiple_of=8, or a budget of "
            "MACs"
        )
    return left
