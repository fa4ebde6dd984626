"""Runs that several processes must do as one does: `torchrun many.py FOLDER CASE...` leaves what each process got.

DIE_AT=n in the environment: the second process dies at its nth loss.
"""

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small import CLASSES, Net, batches, graph_of, make_run, quick
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import secateur
import secateur.runs.run
from secateur import Engine, Task, classification
from secateur.data.arrays import Arrays
from secateur.errors import Diverged, Interrupted
from secateur.runs import record
from secateur.runs.events import Finished, Tick
from secateur.runs.run import Run
from secateur.training.distributed import World, join

BATCH = 16


class Bare(nn.Module):
    """No batch norm, so that a network sees every image by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.inner = nn.Conv2d(8, 12, 3, padding=1)
        self.outer = nn.Conv2d(12, 8, 1)
        self.hidden = nn.Linear(8, 9)
        self.last = nn.Linear(9, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem(images))
        x = x + self.outer(F.relu(self.inner(x)))
        return self.last(F.relu(self.hidden(F.relu(x).mean((2, 3)))))


def tensors(count: int) -> tuple[Tensor, Tensor]:
    return batches(1, count)[0]


class Dropping(Net):
    """With chance in the forward pass, of which processes with parts of unequal size need unequal amounts."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(F.dropout(images, 0.2, self.training))


def arrays(count: int, size: int = BATCH) -> Arrays:
    return Arrays(*tensors(count), batch_size=size, shuffle=True, crop=1, flip=True)


def loader(count: int) -> DataLoader:
    return DataLoader(TensorDataset(*tensors(count)), batch_size=BATCH, shuffle=True)


def plain_list(count: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(t.split(BATCH) for t in tensors(count)), strict=True))


EVEN, UNEVEN = 4 * BATCH, 2 * BATCH + 13
CASES: dict[str, tuple[type[nn.Module], Callable[[], Any], dict[str, Any]]] = {
    "part": (Bare, lambda: loader(UNEVEN), {"tick_data": 0.6, "tick_epochs": 2}),
    "masked": (Bare, lambda: plain_list(UNEVEN), {"cut": "end"}),
    "apoz": (Bare, lambda: arrays(EVEN), {"score": "apoz"}),
    "averaged": (Net, lambda: arrays(UNEVEN), {"ema": 0.8}),
    "whole": (Dropping, lambda: arrays(UNEVEN, BATCH - 1), {"ema": 0.8, "retrain_epochs": 1, "repair": 24}),
    "written": (Dropping, lambda: arrays(UNEVEN, BATCH - 1), {"ema": 0.8, "retrain_epochs": 1, "repair": 24}),
    "nan": (Net, lambda: arrays(EVEN), {}),
    "stopped": (Net, lambda: arrays(EVEN), {}),
}
NAN_AT = 4
CONTINUED = "continued"


def run_of(case: str, folder: Path | None = None, change: Callable[[Task], Task] = lambda task: task) -> Run:
    kind, data, values = CASES[case]
    graph = graph_of(kind)
    torch.manual_seed(World.current().rank)  # the first one's network counts
    net, task = kind().double(), change(classification(data(), batches(2)))
    settings = quick(keep_macs=0.6, tick_removes=0.13, min_ratio=0.0, **values)
    engine = Engine(checkpoint_steps=1 if case == "written" else 3)
    return make_run(settings, net, graph, task, engine=engine, folder=folder)


def outcome(run: Run) -> dict[str, Any]:
    """Everything that is to be the same however many processes there are."""
    scores: list[Tensor] = []
    if run.pruner is not None:
        average = run.pruner.agree

        def watched(own: Tensor) -> Tensor:
            scores.append(average(own))
            return scores[-1]

        run.pruner.agree = watched
    seen = count_images(run)
    error, result = None, None
    try:
        for event in run.events():
            if isinstance(event, Finished):
                result = event.result
    except (Diverged, Interrupted) as caught:
        error, result = type(caught).__name__, getattr(caught, "result", None)
    return {
        "kept": run.kept,
        "names": [event.name for event in run.history],
        "removed": [event.removed for event in run.history if isinstance(event, Tick)],
        "losses": [vars(event)["loss"] for event in run.history if "loss" in vars(event)],
        "metrics": [event.metrics for event in run.history],
        "scores": scores,
        "seen": sum(seen),
        "state": dict(result.model.state_dict()) if result is not None else {},
        "error": error,
    }


def count_images(run: Run) -> list[int]:
    """A list that will hold how many images went into each loss of this process."""
    seen: list[int] = []
    loss = run.task.loss

    def counted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(len(batch[1]))
        return loss(model, batch)

    run.task = replace(run.task, loss=counted)
    return seen


def by_parts(task: Task) -> Task:
    """The same for one process, with each half of a batch normalised by itself, as two processes would.

    Of two processes the first one's running statistics count, so the second half leaves none.
    """

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        size = len(batch[1])
        here = size // 2
        first = task.loss(model, (batch[0][:here], batch[1][:here]))
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        for norm in norms:
            norm.track_running_stats = False
        second = task.loss(model, (batch[0][here:], batch[1][here:]))
        for norm in norms:
            norm.track_running_stats = True
        return (here * first + (size - here) * second) / size

    return replace(task, loss=loss)


def at_call(number: int, act: Callable[[Tensor], Tensor]) -> Callable[[Task], Task]:
    """Something else happens to the loss at this call."""
    calls = 0

    def change(task: Task) -> Task:
        def loss(model: nn.Module, batch: Any) -> Tensor:
            nonlocal calls
            calls += 1
            value = task.loss(model, batch)
            return act(value) if calls == number else value

        return replace(task, loss=loss)

    return change


def trouble(case: str, world: World) -> Callable[[Task], Task]:
    """What goes wrong in this process, if anything does."""
    if case == "nan" and not world.leads:
        return at_call(NAN_AT, lambda value: value * math.nan)
    if "DIE_AT" in os.environ and not world.leads:
        return at_call(int(os.environ["DIE_AT"]), lambda value: os._exit(1))
    return lambda task: task


def note_writes(folder: Path) -> list[str]:
    """A list that will hold what this process opens to write, makes, renames or removes in the folder."""
    noted: list[str] = []
    actions = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if (event in actions or (event == "open" and args[2] & writing)) and str(folder) in str(args[0]):
            noted.append(f"{event} {args[0]}")

    sys.addaudithook(hook)
    return noted


def continued(folder: Path) -> dict[str, Any]:
    """A run of all processes, from the end of another one's pruning."""
    task = classification(arrays(EVEN))
    given = {"graph": graph_of(Net), "min_ratio": 0.0, "tick_removes": 0.2, "finetune_epochs": 1, "repair": 0}
    for share, name, source in ((0.8, "first", None), (0.6, "second", folder / "first")):
        torch.manual_seed(0)
        result = secateur.prune(
            Net().double(), batches(1)[0][0], task, keep_macs=share, folder=folder / name, continue_from=source, **given
        )
    return {"kept": result.plan.kept, "state": dict(result.model.state_dict())}


def main(folder: Path, cases: Sequence[str]) -> None:
    world = join()
    record.PATIENCE = 0
    secateur.runs.run.LOOK_EVERY = 4
    for case in cases:
        if case == CONTINUED:
            torch.save(continued(folder / case), folder / f"{case}-{world.rank}.pt")
            continue
        place = folder / case if case in ("written", "nan", "stopped") else None
        writes = note_writes(place) if place is not None else []
        run = run_of(case, place, trouble(case, world))
        if case == "stopped" and not world.leads:
            run.on_step = lambda phase, step, of, run=run: setattr(run, "stopping", signal_for(run))
        torch.save({**outcome(run), "writes": writes}, folder / f"{case}-{world.rank}.pt")
    dist.destroy_process_group()


def signal_for(run: Run) -> int | None:
    """SIGTERM arrives in the first Tock."""
    return 15 if vars(run.phase).get("part") == "Tock" else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
