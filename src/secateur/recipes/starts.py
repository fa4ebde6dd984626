"""What a run starts from: the files that its order names, and what it keeps of them in its own folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from secateur.channels.analyze import analyze
from secateur.channels.guard import check_extra_state
from secateur.channels.plan import Plan
from secateur.channels.shrink import copy_model, shrink_
from secateur.errors import DamagedRun, InvalidPlan, InvalidSetting, UnknownName
from secateur.models.weights import load_weights_
from secateur.randomness import seeded
from secateur.recipes.controls import initialize_
from secateur.recipes.jobs import Job, Order, build
from secateur.recipes.timing import TABLE
from secateur.results.atomic import write
from secateur.results.load import fill_, find_result, read_plan
from secateur.runs.record import ORIGINAL
from secateur.runs.settings import TickTock
from secateur.training.batches import device_of
from secateur.training.checkpoint import RunFolder
from secateur.training.distributed import World

SHAPE, TEACHER = "shape.json", "teacher.safetensors"
"""Beside the run: the plan by which the network was cut before, and what it learns from."""
TAKEN = ORIGINAL, SHAPE, TEACHER, TABLE
"""What a run that begins puts into its folder first."""


def open_network(order: Order, device: torch.device, seed: int = 0) -> Job:
    """The job with the network as it is found in `order.weights`: for evaluation."""
    job = build(order, seed, device)
    if order.weights is not None:
        start = find_start(order.weights)
        if start.plan is not None:
            cut_(job, start.plan, order)
        start.fill_(job.model)
    return job


@dataclass(frozen=True)
class Start:
    """Files to start from."""

    weights: Path
    plan: str | None = None
    """The plan by which the network was cut, as text."""
    original: Path | None = None
    """The network before it was cut."""
    of_result: bool = False
    """Whether the weights are a result's, and not anybody's file."""

    def fill_(self, model: nn.Module) -> None:
        """Give the network, which is cut already, its weights."""
        if self.of_result:
            fill_(model, self.weights)
        else:
            load_weights_(model, self.weights)


def find_start(name: str) -> Start:
    """A run, its result, or a file with weights."""
    path = Path(name)
    if path.is_file():
        return Start(path)
    if not path.exists():
        raise InvalidSetting(f"there is neither a run nor a file with weights at {path}")
    folder = find_result(path)
    plan = read_plan(folder / "plan.json")
    if not plan.groups:
        return Start(folder / "model.safetensors", of_result=True)
    # What a run started from is the whole network, unless that was cut before; then it was put beside.
    run = folder.parent
    originals = [run / TEACHER, *([] if (run / SHAPE).is_file() else [run / ORIGINAL])]
    original = next((path for path in originals if path.is_file()), None)
    return Start(folder / "model.safetensors", json.dumps(plan.data), original, of_result=True)


def cut_(job: Job, text: str, order: Order) -> Plan:
    """Cut the job's network by the plan of what it starts from."""
    try:
        plan = Plan.from_json(analyze(job.model, job.example), text)
    except (InvalidPlan, UnknownName) as error:
        told = f"{order.weights} is not of the network of {order.recipe} ({error})"
        raise InvalidPlan(f"{told}: name the recipe that it was made with") from error
    shrink_(job.model, plan)
    return plan


def keep_files(job: Job, order: Order, settings: TickTock, out: Path, further: Path | None) -> None:
    """For a run that begins: put into its folder all that it takes from other files, or what the run before it took."""
    world = World.current()
    if world.leads:
        # Locked, lest another run that has just begun here loses its files.
        with closing(RunFolder(out)):
            for name in TAKEN:
                # What is there without a run was left by one that could not begin.
                (out / name).unlink(missing_ok=True)
                if further is not None and (further / name).is_file():
                    write(out / name, partial(shutil.copyfile, further / name))
            if further is None:
                _remember(replace(job, model=copy_model(job.model)), order, settings, out)
    world.wait()


def sums_of(out: Path) -> dict[str, str]:
    """What tells whether the files that a run has put into its folder are still the same."""
    return {name: _sum_of(out / name) for name in TAKEN if (out / name).is_file()}


def check_files(out: Path, sums: dict[str, str]) -> None:
    """Raise if one of them is another; one that is missing is found out when it is read."""
    for name in TAKEN:
        if name in sums and (out / name).is_file() and _sum_of(out / name) != sums[name]:
            raise DamagedRun(f"{out / name} is damaged: restore it, or start a new run elsewhere")


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prepare(job: Job, order: Order, settings: TickTock, out: Path) -> tuple[nn.Module, nn.Module | None, Plan | None]:
    """Make the network what the run starts from; gives the whole network, what it learns from and how it was cut."""
    whole, plan = job.model, None
    if (out / SHAPE).is_file():
        whole = copy_model(job.model)
        if (out / TEACHER).is_file():
            _fill_(whole, out / TEACHER)
        plan = cut_(job, (out / SHAPE).read_text(), order)
    _fill_(job.model, out / ORIGINAL)
    return whole, whole if settings.distill and plan is not None else None, plan


def _fill_(model: nn.Module, path: Path) -> None:
    try:
        load_model(model, path, device=str(device_of(model)))
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DamagedRun(f"cannot read {path}: {reason}; restore it, or start a new run elsewhere") from error


def _remember(job: Job, order: Order, settings: TickTock, out: Path) -> None:
    """Write down the network that the run starts from, and how it was cut before and what it was then, if so."""
    check_extra_state(job.model)
    start = find_start(order.weights) if order.weights is not None else None
    if start is not None and start.plan is not None:
        if settings.keep_macs != 1:
            raise InvalidSetting(
                f"{order.weights} is pruned already: take its run further (secateur further), or finetune"
            )
        if start.original is not None:
            load_weights_(job.model, start.original)
            write(out / TEACHER, lambda target: save_model(job.model, str(target)))
        elif settings.distill:
            raise InvalidSetting(
                f"distill needs the unpruned network, and there is no {ORIGINAL} with {order.weights}: name the run "
                "that pruned it"
            )
        text = start.plan
        write(out / SHAPE, lambda target: target.write_text(text))
        cut_(job, text, order)
    if order.fresh:
        with seeded(settings.seed):
            initialize_(job.model)
    elif start is not None:
        start.fill_(job.model)
    write(out / ORIGINAL, lambda target: save_model(job.model, str(target)))
