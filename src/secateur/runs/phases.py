"""Phases: the parts that a run is made of, one after another.

A phase says what trains, with which loss and learning rates, and what it reports. It has `state_dict` and
`load_state_dict`, so that a run can be resumed within it. A new idea is a new phase in a file of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from secateur.channels.shrink import copy_model, tensors_of
from secateur.errors import InvalidSetting
from secateur.runs.events import Event, FineTune, Start, Train
from secateur.runs.lessons import loss_of
from secateur.training.ema import Ema
from secateur.training.loop import Work
from secateur.training.optimizers import load_optimizer_state, make_optimizer, optimizer_state
from secateur.training.settings import Learning, Schedule
from secateur.training.task import HOLD_OUT
from secateur.words import counted

if TYPE_CHECKING:
    from secateur.runs.run import Run

TRAIN_FIRST = "Pruning keeps what a network has learned: train it first, or give weights that know these classes"


class Phase:
    """One part of a run."""

    name: str
    trains_whole = False
    """Whether the whole network is other after it than before."""

    def check(self, run: Run) -> None:
        """Raise for settings that do not fit the network, before anything is trained."""

    def start(self, run: Run) -> None:
        """Set up at the first step of the phase, and again when a run is resumed within it."""

    def events(self, run: Run) -> Iterator[Event]:
        """Do the phase from where the run is, and report."""
        raise NotImplementedError

    def state_dict(self, run: Run) -> dict[str, Any]:
        """What `load_state_dict` needs, beside the tensors of the model."""
        return {}

    def load_state_dict(self, run: Run, state: dict[str, Any]) -> None:
        """Continue where another phase was; called after `start`."""

    def progress(self, run: Run) -> float:
        """How much of the phase is done, from 0 to 1."""
        return 0.0

    def resumable(self) -> bool:
        """Whether a checkpoint can be written in the middle of an epoch."""
        return True

    def tensors(self) -> list[Tensor]:
        """Tensors beside the model's that training changes and that all processes share."""
        return []

    def evaluated(self) -> AbstractContextManager[None]:
        """What surrounds an evaluation: the weights that count may be others than those that train."""
        return nullcontext()


class StartPhase(Phase):
    """Evaluate the network before anything is done to it."""

    name = "start"

    def events(self, run: Run) -> Iterator[Event]:
        started = time.perf_counter()
        # Of a copy: a forward pass may write to buffers, and the whole network is the caller's.
        whole = copy_model(run.whole) if run.whole is not None else None
        original = run.metrics(whole, exact=True) if whole is not None and not run.started_whole else {}
        given = whole if run.started_whole else run.model
        metrics = run.metrics(given, exact=True)
        if run.pruning is not None and (doubt := _doubt(run, given, metrics)) is not None:
            run.progress(f"warning: {doubt}. {TRAIN_FIRST}")
        yield run.note(Start, metrics, started, original=original)


def _doubt(run: Run, model: nn.Module | None, metrics: dict[str, float]) -> str | None:
    """Why the network seems to be untrained, if it does."""
    chance = run.task.chance() if run.task.chance is not None else None
    accuracy = metrics.get("accuracy", 100.0)
    if chance is not None and accuracy <= min(1.5 * chance, chance + 0.1 * (100 - chance)):
        return f"the accuracy of {accuracy:.3g}% is near chance: the most frequent class alone gives {chance:.3g}%"
    if model is not None and looks_random(model):
        return "the weights seem to be random: no batch norm has seen data"
    return None


def looks_random(model: nn.Module) -> bool:
    """Whether there are batch norms with statistics, and all of them are as they were made."""
    norms = [module for module in model.modules() if getattr(module, "running_mean", None) is not None]
    return bool(norms) and not any(bool(n.running_mean.any()) or bool((n.running_var != 1).any()) for n in norms)  # pyright: ignore


@dataclass
class Best:
    """The epoch that has done best on held-out images."""

    value: float = -math.inf
    epoch: int = 0
    last: float = -math.inf
    """The value after the last epoch."""
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def see(self, run: Run, epoch: int) -> float:
        """Evaluate the network after an epoch, and keep it if none was better."""
        self.last = run.chosen_by()
        if self.last > self.value:
            self.value, self.epoch = self.last, epoch
            with run.phase.evaluated():
                self.tensors = {name: tensor.detach().clone() for name, tensor in tensors_of(run.model).items()}
        return self.last

    @torch.no_grad()
    def restore_(self, run: Run, epochs: int) -> str:
        """Give the network the weights of that epoch; says so."""
        if not self.epoch:
            return "the last epoch is kept: the metric of the held-out images was never a number"
        if self.epoch == epochs:
            return f"the last epoch is the best on held-out images: {self.value:.2f}"
        tensors = tensors_of(run.model)
        for name, value in self.tensors.items():
            tensors[name].copy_(value)
        return (
            f"kept epoch {self.epoch} of {epochs}: {self.value:.2f} on held-out images, {self.last:.2f} after the last"
        )


class TrainPhase(Phase):
    """Train everything that trains.

    name: baseline, retrain, train or finetune.
    distills: whether the whole network teaches.
    averages: whether a moving average of the weights becomes the result.
    chooses: whether the best epoch may be kept.
    """

    def __init__(
        self,
        name: str,
        schedule: Schedule,
        learning: Learning,
        *,
        distills: bool = False,
        averages: bool = False,
        chooses: bool = False,
    ) -> None:
        self.name, self.schedule, self.learning = name, schedule, learning
        self.distills, self.averages = distills, averages
        self.trains_whole = name in ("baseline", "retrain")
        self.ema: Ema | None = None
        self.best = Best() if chooses and learning.best_epoch else None

    def check(self, run: Run) -> None:
        if self.best is not None and run.task.held_out is None:
            raise InvalidSetting("best_epoch has nothing to choose by", remedy=HOLD_OUT)
        if self.schedule.epochs and not run.task.labelled and not (self.distills and self.learning.distill == 1):
            what = f"{self.name} needs labels, which the data do not have"
            wanted = "0 epochs, or distill=1 to learn from the whole network alone" if self.distills else "0 epochs"
            raise InvalidSetting(what, got=counted(self.schedule.epochs, "epoch"), wanted=wanted)
        if self.distills and self.learning.distill == 1 and _own_teacher(run):
            remedy = "Name another teacher; or let labels count, as with distill=0.9"
            what = "distill=1 learns from the whole network alone, and that is the one that trains"
            raise InvalidSetting(what, got=1.0, remedy=remedy)
        make_optimizer(run.trained, self.learning)

    def start(self, run: Run) -> None:
        only_train_(run.model, run.trained)
        if run.pruner is not None and not run.pruner.gates.merged:
            run.pruner.merge_()
        self.optimizer = make_optimizer(run.trained, self.learning)
        self.loss = loss_of(run, self.learning, features=True) if self.distills else run.task.loss
        self.ema = Ema(run.model, self.learning.ema) if self.averages and self.learning.ema else None
        self.unfinished = True

    def events(self, run: Run) -> Iterator[Event]:
        epochs = self.schedule.length(run.num_batches)
        steps = epochs * run.num_batches
        for epoch in range(run.epoch, epochs):
            started = time.perf_counter()
            before = epoch * run.num_batches
            work = Work(
                self.name,
                self.loss,
                self.optimizer,
                rate=lambda step, before=before: self.schedule.rate(before + step, steps),
                after_backward=run.pruner.hold_ if run.pruner is not None else None,
                after_update=self.ema.update if self.ema is not None else None,
                tensors=self.tensors,
                fixed_statistics=self.learning.fixed_statistics,
                compiles=not (self.distills and self.learning.distill_features),
                steps=steps,
            )
            loss = run.train_epoch(f"{self.name}, epoch {epoch + 1} of {epochs}", work)
            last = epoch + 1 == epochs
            if last and self.ema is not None:
                self.ema.swap_()
                self.unfinished = False
            values: dict[str, Any] = {"epoch": epoch + 1, "epochs": epochs, "loss": loss}
            kind, more = (FineTune, {}) if self.name == "finetune" else (Train, {"phase": self.name})
            metrics = run.metrics_after(last)
            if self.best is not None:
                metrics = {**metrics, "held_out": self.best.see(run, epoch + 1)}
            yield run.note(kind, metrics, started, **values, **more)
            run.save()
        if self.best is not None and epochs:
            run.progress(self.best.restore_(run, epochs))
            self.best = None  # its tensors are wider than those of the network, once that is cut
        if run.pruner is not None:
            run.pruner.finish()
        self.ema = None

    def progress(self, run: Run) -> float:
        return run.epoch / max(1, self.schedule.length(run.num_batches))

    def tensors(self) -> list[Tensor]:
        return self.ema.average if self.ema is not None else []

    def evaluated(self) -> AbstractContextManager[None]:
        return self.ema.applied() if self.ema is not None and self.unfinished else nullcontext()

    def state_dict(self, run: Run) -> dict[str, Any]:
        return {
            "optimizer": optimizer_state(self.optimizer, run.model),
            "ema": self.tensors(),
            "unfinished": self.unfinished,
            "best": dict(vars(self.best)) if self.best is not None else None,
        }

    @torch.no_grad()
    def load_state_dict(self, run: Run, state: dict[str, Any]) -> None:
        load_optimizer_state(self.optimizer, run.model, state["optimizer"])
        if not state["ema"]:
            self.ema = None  # the phase has ended
        for own, value in zip(self.tensors(), state["ema"], strict=True):
            own.copy_(value)
        self.unfinished = state["unfinished"]
        best = state.get("best")
        self.best = Best(**best) if best is not None else None


def _own_teacher(run: Run) -> bool:
    """Whether the network that trains would be its own teacher, as it is now."""
    return run.started_whole and run.teacher is None and run.pruning is None


def only_train_(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Nothing else gets a gradient, and so neither weight decay nor momentum changes it."""
    chosen = {id(p) for p in parameters}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
        parameter.grad = None
