"""One run of Tick-Tock, from the network as given to the network pruned and fine-tuned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from secateur.channels.cost import Cost
from secateur.channels.groups import ChannelGraph
from secateur.channels.shrink import copy_model
from secateur.errors import Diverged, NonFiniteLoss
from secateur.pruning.pruner import Pruner, Removal, make_budget
from secateur.pruning.select import Limits, check_reachable
from secateur.ticktock.events import Event, FineTune, Finished, Result, Start, Tick, Tock
from secateur.ticktock.schedule import TickTock
from secateur.training.batches import count, device_of, draw
from secateur.training.loop import mix, seeded, train_epoch, triangle
from secateur.training.task import Task

ALIGNED = 8
"""On a GPU tensors are cut to widths that are multiples of this; odd widths are slower than masks."""

Some = TypeVar("Some", bound=Event)


class Run:
    """The state of one run. Nothing of what is given to it is changed."""

    def __init__(self, settings: TickTock, model: nn.Module, graph: ChannelGraph, task: Task) -> None:
        self.settings = settings
        self.task = task
        self.given = model
        self.budget = make_budget(settings.keep_macs, settings.keep_params, settings.keep_filters)
        assert self.budget is not None
        limits = Limits(settings.min_channels, settings.min_ratio, settings.multiple_of, settings.at_least)
        check_reachable(graph, self.budget, limits.floors(graph))
        self.num_batches = count(task.train)
        self.model = copy_model(model)
        trained = [p.requires_grad for p in self.model.parameters()]
        self.trained = [p for p, flag in zip(self.model.parameters(), trained, strict=True) if flag]
        """What trains, by the user's own flags."""
        self.pruner = Pruner(
            self.model,
            graph=graph,
            score=settings.score,
            rank=settings.rank,
            min_channels=settings.min_channels,
            min_ratio=settings.min_ratio,
            multiple_of=settings.multiple_of,
            at_least=settings.at_least,
            filter_scale=settings.filter_scale,
        )
        self.gates = self.pruner.gates
        self.history: list[Event] = []
        self.phase = 0
        self.ticks = 0
        self.tocks = 0
        self.cut_at_once = settings.cut == "now" or (settings.cut == "auto" and device_of(model).type == "cpu")
        frozen = {id(p) for m in self.gates.modules if m.gate_fold.frozen for p in m.gate_tensors()[1:2]}
        self.in_tock = [*(p for p in self.trained if id(p) not in frozen), *self.gates.trainable]
        self.in_tick = self._trained_in_tick()
        self.optimizer = self._sgd(self.in_tock)
        self._keep_state()

    def _trained_in_tick(self) -> list[nn.Parameter]:
        """The gates and the final layers, and if so set the shifts of gated batch norms."""
        named = dict(self.model.named_parameters())
        final = {id(named[name]) for name in self.pruner.graph.final if name in named}
        if self.settings.tick_shifts:
            final |= {id(p) for m in self.gates.modules if m.gate_fold.frozen for p in m.gate_tensors()[2:]}
        return [*(p for p in self.trained if id(p) in final), *self.gates.trainable]

    def _sgd(self, parameters: list[nn.Parameter]) -> torch.optim.SGD:
        settings = self.settings
        return torch.optim.SGD(parameters, lr=0.0, momentum=settings.momentum, weight_decay=settings.weight_decay)

    def events(self) -> Iterator[Event]:
        """Do the run, one event at a time."""
        settings = self.settings
        started = time.perf_counter()
        yield self._note(Start, self.task.metrics(self.given), started)
        assert self.budget is not None
        if settings.tock_first and settings.ticks_per_tock and not self.budget.met(self.pruner.graph, self.pruner.kept):
            yield from self._tock()
        while not self.budget.met(self.pruner.graph, self.pruner.kept):
            yield self._tick()
            due = settings.ticks_per_tock and self.ticks % settings.ticks_per_tock == 0
            if due and not self.budget.met(self.pruner.graph, self.pruner.kept):
                yield from self._tock()
        self._only_train(self.trained)
        self.pruner.finish()
        self._keep_state()
        yield from self._finetune()
        started = time.perf_counter()
        metrics = self.history[-1].metrics or self.task.metrics(self.model)
        yield self._note(Finished, metrics, started, result=self._result())

    def _tick(self) -> Tick:
        settings, started = self.settings, time.perf_counter()
        self.ticks += 1
        self._only_train([*self.in_tick, *self.gates.phis])
        where = f"Tick {self.ticks}"
        loss = 0.0
        for epoch in range(settings.tick_epochs):
            generator = torch.Generator().manual_seed(mix(settings.seed, self.phase, epoch))
            part = draw(self.task.train, settings.tick_data, settings.tick_per_class, generator)
            loss = self._epoch(where, epoch, part, lambda step: settings.tick_lr, self.pruner.observe)
        skipped = self.pruner.skipped
        removal = self._remove()
        self.phase += 1
        metrics = self.task.metrics(self.model) if settings.evaluate == "always" else {}
        return self._note(
            Tick, metrics, started, number=self.ticks, loss=loss, removed=removal.removed, skipped=skipped
        )

    def _remove(self) -> Removal:
        settings = self.settings
        removal = self.pruner.prune(
            settings.tick_removes,
            keep_macs=settings.keep_macs,
            keep_params=settings.keep_params,
            keep_filters=settings.keep_filters,
            optimizer=self.optimizer,
            cut=self.cut_at_once,
        )
        self._keep_state()
        return removal

    def _tock(self) -> Iterator[Tock]:
        settings = self.settings
        self.tocks += 1
        if settings.cut == "auto" and not self.cut_at_once:
            self.pruner.cut_(self.optimizer, multiple_of=ALIGNED)
            self._keep_state()
        self._only_train(self.in_tock)
        num_steps = settings.tock_epochs * self.num_batches
        for epoch in range(settings.tock_epochs):
            started = time.perf_counter()
            before = epoch * self.num_batches
            loss = self._epoch(
                f"Tock {self.tocks}, epoch {epoch + 1} of {settings.tock_epochs}",
                epoch,
                self.task.train,
                lambda step, before=before: triangle(before + step, num_steps, *settings.tock_lr),
                lambda: self.gates.add_l1_(settings.sparsity),
            )
            metrics = self._metrics_in_phase(epoch + 1 == settings.tock_epochs)
            yield self._note(
                Tock, metrics, started, number=self.tocks, epoch=epoch + 1, epochs=settings.tock_epochs, loss=loss
            )
        self.phase += 1

    def _finetune(self) -> Iterator[FineTune]:
        settings = self.settings
        self.optimizer = self._sgd(self.trained)
        num_steps = settings.finetune_epochs * self.num_batches
        for epoch in range(settings.finetune_epochs):
            started = time.perf_counter()
            before = epoch * self.num_batches
            loss = self._epoch(
                f"fine-tuning, epoch {epoch + 1} of {settings.finetune_epochs}",
                epoch,
                self.task.train,
                lambda step, before=before: triangle(before + step, num_steps, *settings.finetune_lr),
                None,
            )
            metrics = self._metrics_in_phase(epoch + 1 == settings.finetune_epochs)
            yield self._note(FineTune, metrics, started, epoch=epoch + 1, epochs=settings.finetune_epochs, loss=loss)

    def _metrics_in_phase(self, last: bool) -> dict[str, float]:
        wanted = self.settings.evaluate == "always" or (self.settings.evaluate == "phases" and last)
        return self.task.metrics(self.model) if wanted else {}

    def _epoch(
        self,
        where: str,
        epoch: int,
        batches: Any,
        rate: Callable[[int], float],
        after_backward: Callable[[], None] | None,
    ) -> float:
        self.model.train()
        try:
            with seeded(self.settings.seed, self.phase, epoch):
                loss = train_epoch(
                    self.model, batches, self.task.loss, self.optimizer, rate=rate, after_backward=after_backward
                )
            if not _is_finite(self.model):
                raise NonFiniteLoss(self.num_batches - 1)
        except NonFiniteLoss as error:
            raise self._diverged(where, error.step) from error
        self._keep_state()
        return loss

    def _only_train(self, parameters: list[nn.Parameter]) -> None:
        """Nothing else gets a gradient, and so neither weight decay nor momentum moves it."""
        chosen = {id(p) for p in parameters}
        for parameter in self.model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
            parameter.grad = None

    def _keep_state(self) -> None:
        """Remember the network as it is, in case training goes wrong."""
        self.good = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def _diverged(self, where: str, step: int) -> Diverged:
        last = self.history[-1] if self.history else None
        self.model.load_state_dict(self.good)
        self._only_train(self.trained)
        self.pruner.finish()
        done = f"after {last.name}" if last is not None else "at the start"
        return Diverged(
            f"the loss is not finite in {where}, step {step + 1}: the network as it was {done} is in the error's "
            "`result`. A lower learning rate, or gradients that are clipped in the loss, may help",
            self._result(),
        )

    def _result(self) -> Result:
        return Result(
            model=self.model.eval(), plan=self.pruner.plan, settings=self.settings, history=tuple(self.history)
        )

    def _note(self, kind: type[Some], metrics: dict[str, float], started: float, **values: Any) -> Some:
        cost: Cost = self.pruner.cost
        event = kind(
            macs=cost.macs,
            share=cost.macs / self.pruner.graph.macs,
            params=cost.params,
            filters=self.pruner.filters,
            metrics=metrics,
            seconds=time.perf_counter() - started,
            **values,
        )
        self.history.append(event)
        return event


@torch.no_grad()
def _is_finite(model: nn.Module) -> bool:
    sums: list[Tensor] = [p.sum(dtype=torch.float64) for p in model.parameters() if p.is_floating_point()]
    return bool(torch.stack(sums).isfinite().all())
