"""A budget of latency: what layers take before a run, and what the network takes after it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.channels.cost import Cost
from secateur.channels.example import Example
from secateur.errors import InvalidData, InvalidSetting, SecateurError
from secateur.files import read_json, write_atomic
from secateur.pruning.latency import LatencyTable
from secateur.pruning.measure import measure_latency, time_networks
from secateur.recipes.jobs import Job
from secateur.results.bench import runner, summarize
from secateur.results.summary import device_name
from secateur.runs.settings import TickTock
from secateur.training.distributed import World
from secateur.training.engine import Engine
from secateur.training.loop import PRECISIONS
from secateur.training.settings import Training
from secateur.words import duration

TABLE = "latency.json"
"""In the folder of a run: the times of its layers."""
MISSED = 1.1
"""Times the budget: above this it counts as missed."""
NOISY = 0.1
"""The spread above which a time is called approximate."""
PATIENCE = 5.0
"""Seconds after which three passes of each network are enough."""


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
    return read_table(path)


def read_table(path: Path) -> LatencyTable:
    """The table in a file; raises with its path if it is none."""
    try:
        return LatencyTable.from_dict(read_json(path))
    except SecateurError as error:
        if str(path) in error.what:
            raise
        raise InvalidData(f"{path} is damaged", got=error, remedy="Start a new run in another folder") from error


def _to_time(job: Job, settings: TickTock | Training, engine: Engine) -> dict[str, Any]:
    """How a network is timed, for a budget and in the end: in that batch, precision, memory format and runtime."""
    batch, runtime = (settings.latency_batch, settings.latency_in) if isinstance(settings, TickTock) else (1, "torch")
    example = Example.of(job.example).batch(batch)
    if runtime == "onnxruntime":
        if (device := next(job.model.parameters()).device).type != "cpu":
            raise InvalidSetting("times in onnxruntime are measured on the CPU", got=device, remedy="Use the CPU")
        run: Any = partial(runner, how="onnxruntime")
        return {"example": example, "precision": torch.float32, "channels_last": False, "run": run}
    precision = PRECISIONS.get(engine.precision, torch.float32)
    return {"example": example, "precision": precision, "channels_last": engine.channels_last}


def compare(
    job: Job,
    whole: nn.Module,
    cut: nn.Module,
    settings: TickTock | Training,
    engine: Engine,
    say: Callable[[str], object],
) -> dict[str, Any]:
    """What both networks take, measured in turn, as plain data for the result."""
    how = _to_time(job, settings, engine)
    seconds = time_networks({"before": whole, "after": cut}, patience=PATIENCE, **how)
    times = {name: summarize(name, values, how["example"].size, Cost(0, 0)) for name, values in seconds.items()}
    device = next(cut.parameters()).device
    words = ["onnxruntime" if "run" in how else "torch", str(how["precision"]).removeprefix("torch.")]
    found = {
        **{name: timing.median for name, timing in times.items()},
        "spread": max(timing.spread for timing in times.values()),
        "batch": how["example"].size,
        "device": device_name(device),
        "how": ", ".join([*words, *(["channels last"] if how["channels_last"] else [])]),
    }
    left = found["after"] / found["before"]
    if found["spread"] > NOISY:
        say(f"note: times vary by {found['spread']:.0%} here, so {left:.0%} of the time is only approximate")
    budget = settings.budget if isinstance(settings, TickTock) else None
    if budget is not None and budget.counts == "latency" and left > MISSED * budget.share:
        say(
            f"note: {left:.0%} of the time is more than the budget of {budget.share:.0%}. Layers of this size hardly "
            "get faster when they get narrower, or the operators between them count: try a larger latency_batch, "
            "multiple_of=8, or a budget of MACs"
        )
    return found


def in_words(latency: dict[str, Any]) -> str:
    """One line on what a pruned network takes.

    >>> in_words({"before": 0.004, "after": 0.003, "spread": 0.02, "batch": 1, "device": "H200", "how": "torch"})
    '75% of the time of the whole network: 3.00 ms instead of 4.00 ms (batch 1, torch, H200, spread 2%)'
    """
    before, after = latency["before"], latency["after"]
    where = f"batch {latency['batch']}, {latency['how']}, {latency['device']}, spread {latency['spread']:.0%}"
    times = f"{duration(after)} instead of {duration(before)}"
    return f"{after / before:.0%} of the time of the whole network: {times} ({where})"
