"""Ticks and Tocks: the phase that prunes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from secateur.channels.shrink import copy_model, tensors_of
from secateur.channels.verify import Verification, confirm
from secateur.errors import InvalidSetting
from secateur.pruning.folded import Folded
from secateur.pruning.latency import LatencyTable
from secateur.pruning.pruner import Pruner, Removal
from secateur.pruning.repair import gather
from secateur.pruning.scores import Random, check_state
from secateur.pruning.selection import Target, check_reachable, decided
from secateur.pruning.settings import ALIGNED
from secateur.runs.events import Event, Tick, Tock
from secateur.runs.forecast import NOT_FASTER, forecast
from secateur.runs.lessons import loss_of
from secateur.runs.phases import Phase, only_train_
from secateur.runs.settings import Ticks, TickTock
from secateur.training.batches import draw, share_of, unaugmented
from secateur.training.loop import PRECISIONS, Work
from secateur.training.optimizers import load_optimizer_state, make_optimizer, optimizer_state

if TYPE_CHECKING:
    from secateur.runs.run import Run

WORTH_CUTTING = 0.85
"""On a GPU tensors are cut when this share of the MACs is left since the last cut: new shapes are captured anew."""


class PruningPhase(Phase):
    """Ticks, with a Tock after every few of them, until the budget is met."""

    name = "prune"

    def __init__(self, settings: TickTock, latency: LatencyTable | None = None) -> None:
        self.settings, self.latency = settings, latency
        self.part = "Tock" if settings.tocks.first and settings.tocks.every else "Tick"
        """What comes next."""
        self.ticks = self.tocks = 0
        """How many are done."""
        self.trained = False
        """Whether any of them has trained anything; until then repair can refer to the whole network."""
        self.verification: Verification | None = None
        """How far masked and cut network are apart, once the budget is met."""

    def check(self, run: Run) -> None:
        trial = self.make_pruner(run, copy_model(run.model))
        trial.score.close()

    def make_pruner(self, run: Run, model: nn.Module) -> Pruner:
        """Put gates on the model."""
        settings = self.settings
        if settings.trains and not run.task.labelled:
            remedy = "Prune without training: settings.without_training()"
            raise InvalidSetting("training needs labels, which the data do not have", remedy=remedy)
        self.target = Target(settings.budget, run.graph, self.latency)
        pruner = Pruner(
            model,
            graph=run.graph,
            score=Random(settings.seed) if settings.score == "random" else settings.score,
            rank=settings.ranking,
            rank_power=settings.rank_power,
            limits=decided(settings.limits, self.target, run.trainer.device.type),
            filter_scale=settings.filter_scale,
            latency=self.latency,
        )
        branches = pruner.limits.removable(run.graph, settings.budget)
        check_reachable(self.target, pruner.floors, pruner.limits.multiple, branches)
        if run.folder is not None:
            check_state(pruner.score)
        if settings.repair:
            with run.some_images(1) as (batches, _):
                gather(batches, run.graph.calls["eval"][0], 1)  # batches of another form are reported before any work
        pruner.agree = run.world.average
        return pruner

    def start(self, run: Run) -> None:
        settings, pruner = self.settings, run.pruner
        assert pruner is not None
        self.pruner, self.gates = pruner, pruner.gates
        resumed = any(isinstance(event, Tick | Tock) for event in run.history)
        if not resumed and settings.limits.multiple_of == "auto" and (multiple := pruner.limits.multiple) > 1:
            where = "a GPU" if run.trainer.device.type == "cuda" else "this CPU"
            run.progress(
                f"widths are kept at multiples of {multiple}, which is faster on {where}; multiple_of=1 for any"
            )
        timed = settings.budget.counts == "latency"
        if run.trainer.device.type == "cuda" and run.world.leads and not timed and not resumed:
            self._warn_if_slower(run)
        on_cpu = run.trainer.device.type == "cpu"
        self.cut_at_once = settings.cut == "now" or (settings.cut == "auto" and on_cpu)
        self.aligns = settings.cut == "auto" and not on_cpu
        """Whether tensors are cut to aligned widths, and the rest of what is removed is masked: odd widths are slow."""
        self.in_tock = trained_in_tock(pruner, run.trained)
        self.in_tick = trained_in_tick(run.model, pruner, run.trained, run.graph.final, settings.ticks.shifts)
        self.optimizer = make_optimizer(self.in_tock, settings.learning)
        self.loss = loss_of(run, settings.learning)
        ticks = settings.ticks
        self.tick_share = ticks.data if ticks.images is None else share_of(run.task.train, ticks.images)
        self.alone = run.world.size == 1
        self.folded: Folded | None = None
        self.shapes = self.gates.present
        """What was left of the tensors when steps were last captured."""

    def _warn_if_slower(self, run: Run) -> None:
        """Say so before hours are spent if the network will not be faster here."""
        settings, limits = self.settings, self.pruner.limits
        assert run.whole is not None
        left = forecast(
            copy_model(run.whole).to(run.trainer.device),
            self.target,
            self.pruner.floors,
            limits.multiple,
            run.graph.calls["eval"][0].batch(settings.latency_batch).on(run.trainer.device),
            PRECISIONS.get(run.engine.precision, torch.float32),
            run.engine.channels_last,
        )
        if left > NOT_FASTER:
            blocks = "" if limits.branches == "never" else ", which may take whole blocks"
            remedies = [f"a budget of time (keep_latency){blocks}"]
            remedies = [*remedies, "a larger latency_batch, if that is how it will run"]
            remedies = ["multiple_of=8", *remedies] if limits.multiple == 1 else remedies
            run.progress(
                f"note: a network of this budget will not be faster on this GPU: about {left:.0%} of the time of the "
                f"whole one, in batches of {settings.latency_batch}. Try {', '.join(remedies)}; or go on if it is "
                "meant for another device"
            )

    def met(self) -> bool:
        return self.target.met(self.pruner.kept)

    def progress(self, run: Run) -> float:
        return min(1.0, (1 - self.target.left(self.pruner.kept)) / max(1e-9, 1 - self.settings.budget.share))

    def resumable(self) -> bool:
        score = self.pruner.score
        return self.part == "Tock" or (score.resumable and (self.alone or score.shared or not score.state()))

    def events(self, run: Run) -> Iterator[Event]:
        while not self.met():
            yield from self._tick(run) if self.part == "Tick" else self._tock(run)
        # The code may depend on exactly these widths: no result is better than a wrong one.
        assert run.whole is not None
        self.verification = confirm(run.whole, self.pruner.plan)
        self.pruner.cut_(multiple_of=ALIGNED if self.aligns else 1)

    def _tick(self, run: Run) -> Iterator[Event]:
        ticks, started = self.settings.ticks, time.perf_counter()
        self.trained |= ticks.lr > 0
        only_train_(run.model, [*self.in_tick, *self.gates.phis])
        if not run.epoch and not run.position.step:
            # Scores that observe the outputs of layers have observed Tocks and evaluations too.
            self.pruner.score.begin(self.gates)
        drawn = partial(self._drawn, ticks)
        loss = 0.0
        for _ in range(run.epoch, ticks.epochs):
            work = self._work(
                run,
                run.task.loss,
                rate=lambda step: ticks.lr,
                after_backward=self.pruner.observe,
                # Tensors are cut before Tocks.
                steps=int(self.tick_share * run.num_batches) * ticks.epochs * max(1, self.settings.tocks.every),
            )
            with self.folded.in_use() if self.folded is not None else nullcontext():
                loss = run.train_epoch(f"Tick {self.ticks + 1}", work, drawn)
        self.ticks += 1
        skipped = self.pruner.skipped
        removal = self._remove(run)
        run.keep_good_state()
        met = self.met()
        yield run.note(
            Tick,
            run.metrics_after(met),
            started,
            number=self.ticks,
            loss=loss,
            removed=removal.removed,
            skipped=skipped,
            scores=removal.scores,
            threshold=removal.threshold,
            branches=removal.branches,
        )
        tocks = self.settings.tocks
        self.part = "Tock" if tocks.every and self.ticks % tocks.every == 0 else "Tick"
        if met:
            run.keep_pruned()
        else:
            run.next_stage()

    def _drawn(self, ticks: Ticks, source: Iterable[Any], generator: torch.Generator) -> Iterable[Any]:
        """The images of a Tick; those that only score are not augmented, where that can be avoided."""
        source = source if ticks.lr > 0 else unaugmented(source)
        return draw(source, self.tick_share, ticks.per_class, generator)

    def _remove(self, run: Run) -> Removal:
        """Remove channels. Repair refers to the network just before, or to the whole one where nothing trains."""
        settings = self.settings
        remove = partial(
            self.pruner.prune,
            settings.ticks.removes,
            settings.budget,
            step=settings.ticks.step,
            optimizer=self.optimizer,
            cut=self.cut_at_once,
        )
        if not settings.repair:
            return remove()
        reference = None if self.trained else run.whole
        with run.some_images(settings.repair) as (batches, images):
            removal = remove(repair=batches, images=images, reference=reference)
        run.world.align_(tensors_of(run.model).values())  # solvers need not give the same bits everywhere
        return removal

    def _tock(self, run: Run) -> Iterator[Event]:
        tocks = self.settings.tocks
        if self.aligns and not run.epoch and not run.position.step:
            cost, aligned = run.graph.cost, self.pruner.widened(ALIGNED)
            if cost(aligned).macs <= WORTH_CUTTING * cost(self.gates.present.kept).macs:
                self.pruner.cut_(self.optimizer, ALIGNED)
                run.keep_good_state()
        self.pruner.score.close()  # it has nothing to observe until the next Tick begins
        self.trained = True
        only_train_(run.model, self.in_tock)
        number, epochs = self.tocks + 1, tocks.length(run.num_batches)
        steps = epochs * run.num_batches
        for epoch in range(run.epoch, epochs):
            started = time.perf_counter()
            before = epoch * run.num_batches
            work = self._work(
                run,
                self.loss,
                rate=lambda step, before=before: tocks.rate(before + step, steps),
                after_backward=lambda: self.gates.add_l1_(tocks.sparsity),
                steps=steps,
            )
            with self.folded.in_use() if self.folded is not None else nullcontext():
                loss = run.train_epoch(f"Tock {number}, epoch {epoch + 1} of {epochs}", work)
            metrics = run.metrics_after(epoch + 1 == epochs)
            yield run.note(Tock, metrics, started, number=number, epoch=epoch + 1, epochs=epochs, loss=loss)
            run.save()
        self.tocks += 1
        self.part = "Tick"
        run.next_stage()

    def _work(self, run: Run, loss: Any, **values: Any) -> Work:
        if self.shapes is not self.gates.present:
            # Cut since the last epoch, here or by the pruner because a mask would not have held.
            self.shapes, self.folded = self.gates.present, None
            run.trainer.forget()
        # On a GPU, where every kernel counts, the gates of norms are folded in together.
        folds = run.trainer.device.type == "cuda" and run.engine.accumulate == 1
        if folds and self.folded is None:
            self.folded = Folded(self.gates)
        ticks = self.part == "Tick"
        return Work(
            self.part,
            loss,
            self.optimizer,
            prepare=self.folded.prepare if self.folded is not None else None,
            collect=self.folded.collect if self.folded is not None else None,
            trains=not ticks or self.settings.ticks.lr > 0,
            fixed_statistics=self.settings.learning.fixed_statistics,
            capturable=not ticks or self.pruner.score.capturable,
            tensors=lambda: list(self.pruner.score.state().values()),
            **values,
        )

    def state_dict(self, run: Run) -> dict[str, Any]:
        return {
            "part": self.part,
            "ticks": self.ticks,
            "tocks": self.tocks,
            "trained": self.trained,
            "optimizer": optimizer_state(self.optimizer, run.model),
        }

    def load_state_dict(self, run: Run, state: dict[str, Any]) -> None:
        self.part, self.ticks, self.tocks = state["part"], state["ticks"], state["tocks"]
        if not self.settings.tocks.every:
            self.part = "Tick"  # where the run that this one continues was to go on with a Tock
        self.trained = state.get("trained", True)  # older checkpoints do not say
        load_optimizer_state(self.optimizer, run.model, state["optimizer"])


def trained_in_tick(
    model: nn.Module, pruner: Pruner, trained: list[nn.Parameter], final: tuple[str, ...], shifts: bool
) -> list[nn.Parameter]:
    """The gates and the final layers; with `shifts` those of gated batch norms too."""
    named = dict(model.named_parameters())
    chosen = {id(named[name]) for name in final if name in named}
    if shifts:
        chosen |= {id(p) for m in pruner.gates.modules if m.gate_fold.frozen for p in m.gate_tensors()[2:]}
    return [*(p for p in trained if id(p) in chosen), *pruner.gates.trainable]


def trained_in_tock(pruner: Pruner, trained: list[nn.Parameter]) -> list[nn.Parameter]:
    """Everything but the weights of batch norms that are folded into gates."""
    frozen = {id(p) for m in pruner.gates.modules if m.gate_fold.frozen for p in m.gate_tensors()[1:2]}
    return [*(p for p in trained if id(p) not in frozen), *pruner.gates.trainable]
