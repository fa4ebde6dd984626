"""Epochs: forward, loss, backward, optimizer, over any batches, in any precision."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from secateur.errors import InvalidData
from secateur.randomness import preserved, random_state, restore_random
from secateur.training.batches import device_of, is_finite, num_examples, prefetch
from secateur.training.compiled import Compiled, pays, unchanged
from secateur.training.distributed import World
from secateur.training.engine import Engine
from secateur.training.graphed import GraphedStep
from secateur.training.optimizers import can_be_captured, set_rate
from secateur.training.shards import alike, full_size, weighted

LOOK_EVERY = 50
"""Steps between checks of the loss where reading it means waiting for the device."""
NEVER = torch.iinfo(torch.long).max
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Work:
    """What the steps of an epoch do."""

    name: str
    """Epochs of the same name share a captured step."""
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer
    rate: Callable[[int], float]
    """The learning rate of a step, counted from 0."""
    prepare: Callable[[], None] | None = None
    """Called before every forward pass."""
    collect: Callable[[], None] | None = None
    """Called after every backward pass."""
    after_backward: Callable[[], None] | None = None
    """Called after the backward pass, before gradients are clipped and the optimizer steps."""
    after_update: Callable[[], None] | None = None
    """Called after the optimizer's step."""
    trains: bool = True
    """Whether the optimizer steps. Otherwise the network stays as it is, in evaluation mode: for scores alone."""
    fixed_statistics: bool = False
    """Whether batch norms use their running statistics, and keep them, and dropout is off."""
    capturable: bool = True
    """Whether these calls compute on the device alone."""
    compiles: bool = True
    """Whether the network may be compiled: the loss does not look into it."""
    steps: int = 0
    """How many there will be before the network changes, at least: whether compiling pays depends on them."""
    tensors: Callable[[], list[Tensor]] = list
    """Tensors that these calls write to, beside those of the model and the optimizer."""


class NonFiniteLoss(Exception):
    """The loss has become NaN or infinite at this step.

    in_data: whether the batch of that step holds such values; None if that is not known.
    """

    def __init__(self, step: int, in_data: bool | None = None) -> None:
        super().__init__(f"the loss is not finite at step {step}")
        self.step, self.in_data = step, in_data


@dataclass
class Position:
    """How far an epoch has come."""

    step: int = 0
    total: float = 0.0
    """Sum of the losses so far, each over the batch of all processes."""
    random: list[dict[str, Any]] | None = None
    """The random state there, of every process."""


@dataclass
class Trainer:
    """Trains one model.

    partial: a forward pass may not use all parameters.
    """

    model: nn.Module
    engine: Engine = field(default_factory=Engine)
    world: World = field(default_factory=World)
    partial: bool = False
    progress: Callable[[str], object] = lambda text: None

    def __post_init__(self) -> None:
        self.device = device_of(self.model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.engine.precision == "fp16")
        self._graphs: dict[str, GraphedStep | None] = {}
        self._compiled: dict[str, Compiled | None] = {}
        self._alike = True
        """Whether parts of equal weight have equal shapes in all processes."""
        self._full = 0
        """How many examples a batch has, where that is known, unless it is the last one."""
        self._total = torch.zeros((), dtype=torch.float64, device=self.device)
        self._count = torch.zeros((), dtype=torch.long, device=self.device)
        self._broken = torch.full((), NEVER, dtype=torch.long, device=self.device)
        """Twice the first step with a loss that is not finite, and one more if its batch was finite."""

    def forget(self) -> None:
        """Drop captured and compiled steps: the tensors have changed shape, or others train."""
        self._graphs.clear()
        self._compiled.clear()

    def epoch(
        self,
        batches: Iterable[Any],
        work: Work,
        start: Position | None = None,
        after_step: Callable[[int], None] | None = None,
    ) -> float:
        """Train on all batches once; the mean loss over all processes.

        start: continue from here, with the same batches and random numbers.
        after_step: called after every optimizer step, with the number of batches done.

        Raises `NonFiniteLoss` with the step at which the loss stopped being a number.
        """
        position = start or Position()
        set_modes_(self.model, work.trains, work.fixed_statistics)
        self._total.fill_(position.total)
        self._count.fill_(position.step)
        self._broken.fill_(NEVER)
        # Streams and captures are those of the present device, which need not be the model's.
        device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with self.engine.algorithms(), device:
            return self._go(batches, work, position, after_step)

    def _go(
        self, batches: Iterable[Any], work: Work, position: Position, after_step: Callable[[int], None] | None
    ) -> float:
        waiting = False
        self._alike = self.world.size == 1 or alike(batches)
        self._full = full_size(batches)
        start = getattr(batches, "weighted_from", None)
        source = prefetch(weighted(batches) if start is None else start(position.step), self.device)
        for _ in range(position.step if start is None else 0):
            next(source, None)
        if position.random is not None:
            restore_random(position.random[min(self.world.rank, len(position.random) - 1)])
        for step, (weight, batch) in enumerate(source, position.step):
            set_rate(work.optimizer, work.rate(step))
            last = step % self.engine.accumulate == self.engine.accumulate - 1
            self._do(work, batch, weight, first=not waiting, last=last, check=step == position.step)
            waiting = not last
            if (self.device.type == "cpu" and not self.world.joined) or step % LOOK_EVERY == 0:
                self._look()
            if last and after_step is not None:
                after_step(step + 1)
            position = Position(max(position.step, step + 1))
        if not position.step:
            raise InvalidData("the training data yields no batches")
        if waiting:
            self._update(work)
        self._look()
        return float(self.world.average(self._total)) / position.step

    def position(self, step: int) -> Position:
        """Where `epoch` can continue; waits for the device. All processes must call it."""
        self._look()
        return Position(step, float(self.world.average(self._total)), self.world.gather(random_state()))

    def _look(self) -> None:
        if (broken := int(self.world.smallest(self._broken))) != NEVER:
            raise NonFiniteLoss(broken // 2, in_data=broken % 2 == 0)

    def _do(self, work: Work, batch: Any, weight: float, first: bool, last: bool, check: bool) -> None:
        # A run may be resumed with the last batch of an epoch, which is smaller: nothing is made for its shapes.
        size = num_examples(batch)
        known = self._full and (size is None or size >= self._full)
        if work.name not in self._graphs and (known or (weight == 1 and not self._full)):
            self._set_up(work, batch, even=weight == 1)
        # All processes must replay an exchange, or none. If the batch divides evenly, the weight is 1 in all of them.
        graph = self._graphs.get(work.name)
        if graph is not None and weight == 1 and graph.fits(batch):
            graph(batch)
            return
        if first:
            self.model.zero_grad(set_to_none=True)
        self._backward(work, batch, weight, check)
        if last:
            self._update(work)

    def _backward(self, work: Work, batch: Any, weight: float, check: bool) -> None:
        if work.prepare is not None:
            work.prepare()
        finite = is_finite(batch)
        with self.autocast(), norms_named(self.model):
            loss = work.loss(self._compiled.get(work.name) or self.model, batch)
        if check:
            check_loss(loss)
        value = loss.detach()
        self._total.add_(value, alpha=weight)
        here = torch.where(value.isfinite(), NEVER, 2 * self._count + finite)
        self._broken.copy_(torch.minimum(self._broken, here))
        self._count += 1
        self.scaler.scale(loss * (weight / self.engine.accumulate)).backward()
        if work.collect is not None:
            work.collect()
        if check and all(parameter.grad is None for parameter in self.model.parameters()):
            remedy = "Compute the loss from what the model returns"
            raise InvalidData("the loss does not depend on the model that it is given", remedy=remedy)

    def _update(self, work: Work, averages: bool = True) -> None:
        optimizer = work.optimizer
        if averages:
            self.world.average_gradients_(self.model.parameters(), self.partial)
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            others = [p.grad for p in self.model.parameters() if p.grad is not None and id(p) not in held]
            if others:
                torch._foreach_mul_(others, 1 / self.scaler._scale)  # pyright: ignore
        if work.after_backward is not None:
            work.after_backward()
        if self.engine.clip_norm is not None:
            nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], self.engine.clip_norm)
        if work.trains:
            self.scaler.step(optimizer)
        self.scaler.update()
        if work.after_update is not None:
            work.after_update()

    def autocast(self) -> torch.autocast:
        """The precision of the forward pass. Casts are not cached: a captured step would not see the weights change."""
        precision = PRECISIONS.get(self.engine.precision)
        return torch.autocast(self.device.type, precision, enabled=precision is not None, cache_enabled=False)

    def _set_up(self, work: Work, batch: Any, even: bool) -> None:
        """Compile and capture steps of this kind, as far as that is possible and pays.

        even: whether all processes have parts of the same size.
        """
        started = time.perf_counter()
        obstacle = self._obstacle(work, batch, even)
        self._compiled[work.name] = Compiled(self.model) if self._compiles(work, batch, obstacle) else None
        self._graphs[work.name] = self._capture(work, batch, obstacle)
        if self._compiled[work.name] is None:
            return
        if self._graphs[work.name] is not None:
            self.progress(f"{work.name}: the network was compiled in {time.perf_counter() - started:.0f} s")
        elif self.engine.compile == "auto":
            # Perhaps torch cannot compile this network.
            self._compiled[work.name] = None
            self._graphs[work.name] = self._capture(work, batch, obstacle)

    def _compiles(self, work: Work, batch: Any, obstacle: str | None) -> bool:
        if self.engine.compile != "auto" or not work.compiles:
            return self.engine.compile == "always" and work.compiles
        pays_here = False
        if self.device.type == "cuda" and self.engine.tune and obstacle is None:
            with preserved(), unchanged([*self.model.buffers(), *work.tensors()]):
                pays_here = pays(self.model, lambda: self._forward(work, batch), work.steps)
        return self.world.all(pays_here)

    def for_evaluation(self) -> nn.Module:
        """The network as it is evaluated. To compile it by itself would take longer than it saves."""
        if self.engine.compile != "always":
            return self.model
        if self._compiled.get("evaluation") is None:
            self._compiled["evaluation"] = Compiled(self.model)
        return self._compiled["evaluation"] or self.model

    @torch.no_grad()
    def _forward(self, work: Work, batch: Any) -> None:
        """Compute the loss with the network as it is, uncompiled."""
        if work.prepare is not None:
            work.prepare()
        with self.autocast():
            work.loss(self.model, batch)

    def _obstacle(self, work: Work, batch: Any, even: bool) -> str | None:
        """Why steps cannot be captured as a CUDA graph, as far as that is known before; empty where nobody asks."""
        world = self.world
        reasons = {
            "": self.device.type != "cuda" or not self.engine.graphs,
            "gradients are accumulated": self.engine.accumulate > 1,
            "the processes do not use NCCL": not world.capturable,
            "batch norms are synchronised": world.size > 1
            and any(isinstance(module, nn.SyncBatchNorm) for module in self.model.modules()),
            "the processes may use different parameters": world.joined and self.partial,
            "the processes' parts of a batch may differ in shape": not self._alike,
            "batches do not divide evenly among the processes": not even,
            "what is observed needs Python at every step": not work.capturable,
            "its optimizer is neither SGD nor Adam": not can_be_captured(work.optimizer),
            "batches hold other things than tensors": not GraphedStep.can_hold(batch),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _capture(self, work: Work, batch: Any, obstacle: str | None) -> GraphedStep | None:
        """The step as a CUDA graph; None, with the reason reported, where it cannot be captured in all processes."""
        world, reason, graph = self.world, obstacle, None
        if world.all(reason is None):
            # NCCL makes its connections at the first exchange, which a capture is not to be.
            world.average_([torch.zeros_like(p) for p in self.model.parameters() if p.requires_grad])
            try:
                graph = self._captured(work, batch)
            except RuntimeError as error:
                torch.cuda.synchronize()
                reason = str(error).splitlines()[0]
            if not world.all(graph is not None):
                graph, reason = None, reason or "that failed in another process"
        if reason:
            self.progress(f"{work.name}: steps are not captured as a CUDA graph because {reason}")
        return graph

    def _captured(self, work: Work, batch: Any) -> GraphedStep:
        def step(inputs: Any) -> None:
            self.model.zero_grad(set_to_none=True)
            self._backward(work, inputs, 1.0, check=True)
            # The warm-up waits for nobody, since it may fail in some processes only. A capture does not wait at all.
            self._update(work, averages=torch.cuda.is_current_stream_capturing())

        own: list[Any] = [self._total, self._count, self._broken]
        if self.scaler.is_enabled():
            self.scaler.scale(own[0])  # makes its tensors
            own += [self.scaler._scale, self.scaler._growth_tracker]
        forward = partial(self._forward, work)
        return GraphedStep(step, forward, batch, self.model, work.optimizer, [*work.tensors(), *own])


def set_modes_(model: nn.Module, trains: bool, fixed_statistics: bool) -> None:
    """Put the network into the mode in which it trains, or into evaluation mode.

    fixed_statistics: all its layers compute as in evaluation. Modules that hold others keep the mode: detectors return
        losses in no other.

    Recurrent layers are always in training mode: cuDNN gives no gradients in another.
    """
    model.train(trains)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.train()
        elif fixed_statistics and (next(module.children(), None) is None or isinstance(module, _BatchNorm)):
            module.eval()


def check_loss(loss: Any) -> None:
    """Raise unless the loss can be differentiated."""
    if not isinstance(loss, Tensor):
        kind, remedy = type(loss).__name__, "Return it without .item(), and the sum where there are several"
        raise InvalidData("the loss is not a tensor", got=kind, remedy=remedy)
    if loss.dim() != 0:
        raise InvalidData("the loss is not a scalar", got=f"shape {tuple(loss.shape)}", remedy="Reduce it with .mean()")
    if not loss.requires_grad:
        remedy = "Compute it from the output of the model without detach() or no_grad()"
        raise InvalidData("the loss has no gradient", remedy=remedy)


@contextmanager
def norms_named(model: nn.Module) -> Iterator[None]:
    """Name the norm that refuses to train: on one value for each channel, or without an eps."""
    try:
        yield
    except ValueError as error:
        running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        norm = next((module for module in reversed(running) if isinstance(module, _NormBase)), None)
        if norm is None:
            raise
        name = next((name for name, module in model.named_modules() if module is norm), "")
        remedy = "Use batches of two images or more; drop_last=True leaves a single one out"
        if norm.eps <= 0:
            remedy = "Give it an eps above 0"
        raise InvalidData(f"the norm {name!r} cannot train on this batch", got=error, remedy=remedy) from error
