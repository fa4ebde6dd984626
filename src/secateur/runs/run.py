"""One run of Tick-Tock, from the network as given to the network pruned and fine-tuned."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from secateur.channels.groups import ChannelGraph
from secateur.channels.guard import are_finite
from secateur.channels.shapes import channels_last
from secateur.channels.shrink import copy_model
from secateur.channels.verify import confirm
from secateur.errors import Diverged, Interrupted, NonFiniteLoss
from secateur.pruning.folded import Folded
from secateur.pruning.latency import LatencyTable
from secateur.pruning.pruner import Pruner, make_budget
from secateur.pruning.scores import Random
from secateur.pruning.select import check_reachable
from secateur.randomness import mix, seeded
from secateur.runs.events import Event, FineTune, Finished, Result, Start, Tick, Tock
from secateur.runs.record import Cursor, Record
from secateur.runs.settings import TickTock
from secateur.runs.trained import in_tick, in_tock, only_train_, optimizer_for
from secateur.training.batches import count, device_of, draw, reseed
from secateur.training.distill import distilled, scores_of
from secateur.training.distributed import World, sync_batchnorm_, unsync_batchnorm_
from secateur.training.ema import Ema
from secateur.training.engine import Engine
from secateur.training.loop import LOOK_EVERY, Position, Trainer, Work
from secateur.training.schedules import SHAPES
from secateur.training.shards import shard
from secateur.training.task import Task, check_task

ALIGNED = 8
"""On a GPU tensors are cut to widths that are multiples of this; odd widths are slower than masks."""
WORTH_CUTTING = 0.85
"""And only when so much is left of the MACs since the last cut: new shapes have to be tuned and captured again."""

Some = TypeVar("Some", bound=Event)


class Run:
    """The state of one run. Nothing of what is given to it is changed."""

    def __init__(
        self,
        settings: TickTock,
        model: nn.Module,
        graph: ChannelGraph,
        task: Task,
        *,
        engine: Engine | None = None,
        folder: str | Path | None = None,
        about: dict[str, Any] | None = None,
        say: Callable[[str], None] = lambda text: None,
        teacher: nn.Module | None = None,
        latency: LatencyTable | None = None,
    ) -> None:
        self.settings, self.task, self.given = settings, task, model
        self.engine = engine or Engine()
        self.world = World.current()
        budget = make_budget(**settings.budgets, table=latency)
        assert budget is not None
        self.budget = budget
        with seeded(settings.seed):
            self.num_batches = count(check_task(task).train)
            if settings.tick_per_class is not None:
                # What cannot be drawn from is refused before anything is written.
                draw(task.train, settings.tick_data, settings.tick_per_class, torch.Generator().manual_seed(0))
        self.model = self._copy(model)
        self.synced = self._sync_batchnorm(say)
        """The batch norms that look at the batches of all processes, and their own classes."""
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        """What trains, by the user's own flags."""
        self.pruner = Pruner(
            self.model,
            graph=graph,
            score=Random(settings.seed) if settings.score == "random" else settings.score,
            rank=settings.ranking,  # pyright: ignore
            rank_power=settings.rank_power,
            latency=latency,
            min_channels=settings.min_channels,
            min_ratio=settings.min_ratio,
            multiple_of=settings.multiple_of,
            at_least=settings.at_least,
            filter_scale=settings.filter_scale,
        )
        check_reachable(graph, budget, self.pruner.floors)
        self.pruner.agree = self.world.average
        self.gates = self.pruner.gates
        self.partial = graph.partial
        """Whether a forward pass may leave parts of the model out."""
        self.trainer = Trainer(self.model, self.engine, self.world, say=say)
        self.cursor = Cursor()
        self.position = Position()
        self.history: list[Event] = []
        self.ema: Ema | None = None
        self.folded: Folded | None = None
        self.shapes = self.gates.present
        """What was left of the tensors when steps were last captured."""
        self.stopping: int | None = None
        """The signal that has asked for an end."""
        self.num_steps = 0
        """Optimizer steps since the start of this process."""
        on_cpu = device_of(model).type == "cpu"
        self.cut_at_once = settings.cut == "now" or (settings.cut == "auto" and on_cpu)
        self.aligns = settings.cut == "auto" and not on_cpu
        """Whether tensors are cut to multiples, and what is removed beyond that masked."""
        self.in_tock = in_tock(self.gates, self.trained)
        self.in_tick = in_tick(self.model, self.gates, self.trained, graph.final, settings.tick_shifts)
        self.optimizer = optimizer_for(self.in_tock, settings)
        self.loss = task.loss
        if settings.distill:
            known = self._copy(teacher or model)
            self.loss = distilled(task.loss, known, settings.distill, settings.distill_temperature)
            with torch.no_grad():
                for example in graph.calls.get("eval", ())[:1]:
                    scores_of(example.copied().on(next(known.parameters()).device)(known))
        self._keep_state()
        self.watch: Callable[[str, int, int], None] | None = None
        """Called after every step with the phase, the batches done and how many there are."""
        self.record = Record(self, folder, about or {}) if folder is not None else None

    def _copy(self, model: nn.Module) -> nn.Module:
        copied = copy_model(model)
        if self.engine.channels_last:
            copied._apply(channels_last)
        return copied

    def _sync_batchnorm(self, say: Callable[[str], None]) -> dict[nn.Module, type[nn.Module]]:
        if self.engine.sync_batchnorm and self.world.can_sync(self.model):
            return sync_batchnorm_(self.model)
        if self.engine.sync_batchnorm:
            say("sync_batchnorm has no effect: it is for several processes with a GPU each")
        return {}

    def events(self) -> Iterator[Event]:
        """Do the run, one event at a time."""
        phases = {"Start": self._start, "Tick": self._tick, "Tock": self._tock, "FineTune": self._finetune}
        try:
            while self.cursor.phase != "Finished":
                yield from phases[self.cursor.phase]()
            started = time.perf_counter()
            metrics = self._metrics(exact=True)
            yield self._note(Finished, metrics, started, result=self._result(metrics))
        except KeyboardInterrupt as stop:
            if self.record is not None and self.cursor.phase != "Start":
                where = self.record.path
                stop.add_note(f"saved in {where} up to the last checkpoint: the same call goes on from there")
            raise
        except RuntimeError as error:
            if not bool(self.pruner.kept.all()):
                for note in self.pruner.graph.notes:
                    error.add_note(f"from the analysis: {note}")
            raise
        finally:
            if self.record is not None:
                self.record.finish()

    def _next(self, phase: str) -> None:
        """Go on to another phase."""
        self.cursor.phase = phase
        self.cursor.epoch = 0
        self.cursor.number += 1
        self.position = Position()
        if phase == "FineTune":
            # Code may do otherwise at just these widths: rather no result than a wrong one.
            confirm(self.given, self.pruner.plan)
            self.pruner.cut_(multiple_of=ALIGNED if self.aligns else 1)
            self.begin_finetune()
        self._save(needed=phase in ("FineTune", "Finished"))

    def _met(self) -> bool:
        return self.budget.met(self.pruner.graph, self.pruner.kept)

    @property
    def left(self) -> float:
        """The share that is left of what the budget counts."""
        return self.budget.left(self.pruner.graph, self.pruner.kept)

    def _start(self) -> Iterator[Event]:
        started = time.perf_counter()
        yield self._note(Start, self._metrics(self.given, exact=True), started)
        first = "Tock" if self.settings.tock_first and self.settings.ticks_per_tock else "Tick"
        self._next("FineTune" if self._met() else first)

    def _tick(self) -> Iterator[Event]:
        settings, started = self.settings, time.perf_counter()
        only_train_(self.model, [*self.in_tick, *self.gates.phis])
        if not self.cursor.epoch and not self.position.step:
            # Scores that watch what layers put out have watched Tocks and evaluations too.
            self.pruner.score.begin(self.gates)
        loss = 0.0
        for _ in range(self.cursor.epoch, settings.tick_epochs):
            loss = self._epoch(
                f"Tick {self.cursor.ticks + 1}",
                self.task.loss,
                lambda step: settings.tick_lr,
                after_backward=self.pruner.observe,
            )
        self.cursor.ticks += 1
        skipped = self.pruner.skipped
        removal = self.pruner.prune(
            settings.tick_removes,
            **settings.budgets,
            optimizer=self.optimizer,
            cut=self.cut_at_once,
        )
        self._keep_state()
        metrics = self._metrics_in_phase(self._met())
        yield self._note(
            Tick,
            metrics,
            started,
            number=self.cursor.ticks,
            loss=loss,
            removed=removal.removed,
            skipped=skipped,
            scores=removal.scores,
            threshold=removal.threshold,
        )
        due = settings.ticks_per_tock and self.cursor.ticks % settings.ticks_per_tock == 0
        follows, met = "Tock" if due else "Tick", self._met()
        if met and self.record is not None:
            self.record.keep_pruned(follows)
        self._next("FineTune" if met else follows)

    def _tock(self) -> Iterator[Event]:
        settings = self.settings
        if self.aligns and not self.cursor.epoch and not self.position.step:
            count_macs = self.pruner.graph.count_macs
            if count_macs(self.pruner.widened(ALIGNED)) <= WORTH_CUTTING * count_macs(self.gates.present.kept):
                self.pruner.cut_(self.optimizer, ALIGNED)
                self._keep_state()
        only_train_(self.model, self.in_tock)
        number = self.cursor.tocks + 1
        for epoch in range(self.cursor.epoch, settings.tock_epochs):
            started = time.perf_counter()
            loss = self._epoch(
                f"Tock {number}, epoch {epoch + 1} of {settings.tock_epochs}",
                self.loss,
                self._rate(settings.tock_shape, epoch, settings.tock_epochs, settings.tock_lr),
                after_backward=self._draw_gates_in,
            )
            metrics = self._metrics_in_phase(epoch + 1 == settings.tock_epochs)
            yield self._note(
                Tock, metrics, started, number=number, epoch=epoch + 1, epochs=settings.tock_epochs, loss=loss
            )
            self._save()
        self.cursor.tocks += 1
        self._next("Tick")

    def _draw_gates_in(self) -> None:
        self.gates.add_l1_(self.settings.sparsity)

    def begin_finetune(self) -> None:
        """Merge the gates; what is left is trained like any network."""
        only_train_(self.model, self.trained)
        self.pruner.merge_()
        self.trainer.forget()
        self.optimizer = optimizer_for(self.trained, self.settings)
        if self.settings.ema:
            self.ema = Ema(self.model, self.settings.ema)
        self._keep_state()

    def _finetune(self) -> Iterator[Event]:
        settings = self.settings
        only_train_(self.model, self.trained)
        for epoch in range(self.cursor.epoch, settings.finetune_epochs):
            started = time.perf_counter()
            loss = self._epoch(
                f"FineTune, epoch {epoch + 1} of {settings.finetune_epochs}",
                self.loss,
                self._rate(settings.finetune_shape, epoch, settings.finetune_epochs, settings.finetune_lr),
                after_backward=self.pruner.hold_,
                after_update=self.ema.update if self.ema is not None else None,
            )
            last = epoch + 1 == settings.finetune_epochs
            if last and self.ema is not None:
                self.ema.swap_()
            metrics = self._metrics_in_phase(last)
            yield self._note(FineTune, metrics, started, epoch=epoch + 1, epochs=settings.finetune_epochs, loss=loss)
            self._save()
        self.pruner.finish()
        self.ema = None
        self.optimizer.state.clear()
        self._next("Finished")

    def _rate(self, shape: str, epoch: int, epochs: int, ends: tuple[float, float]) -> Callable[[int], float]:
        before, num_steps = epoch * self.num_batches, epochs * self.num_batches
        divided = (self.settings.milestones, self.settings.milestone_divides) if shape == "steps" else ()
        # A loader may give more batches than it has told of.
        return lambda step: SHAPES[shape](min(before + step, num_steps), num_steps, *ends, *divided)

    def _metrics(self, model: nn.Module | None = None, exact: bool = False) -> dict[str, float]:
        """Computed by the leading process, known to all; on the way in the precision of training."""
        if self.task.evaluate is None:
            return {}
        unfinished = self.cursor.phase == "FineTune" and self.cursor.epoch < self.settings.finetune_epochs
        weights = self.ema.applied() if self.ema is not None and unfinished else nullcontext()
        random = seeded(self.settings.seed, self.cursor.number, self.cursor.epoch)
        with random, weights, nullcontext() if exact else self.trainer.autocast():
            return self.world.tell(self.task.metrics(model or self.model) if self.world.leads else {})

    def _metrics_in_phase(self, last: bool) -> dict[str, float]:
        wanted = self.settings.evaluate == "always" or (self.settings.evaluate == "phases" and last)
        return self._metrics() if wanted else {}

    def _epoch(
        self,
        where: str,
        loss: Callable[[nn.Module, Any], Tensor],
        rate: Callable[[int], float],
        after_backward: Callable[[], None] | None = None,
        after_update: Callable[[], None] | None = None,
    ) -> float:
        """One epoch from the present position, after which the next one is due."""
        if self.shapes is not self.gates.present:
            # Cut since the last epoch, here or by the pruner because a mask would not have held.
            self.shapes, self.folded = self.gates.present, None
            self.trainer.forget()
        phase = self.cursor.phase
        folded = self._folded() if phase != "FineTune" else None
        work = Work(
            phase,
            loss,
            self.optimizer,
            rate,
            prepare=folded.prepare if folded is not None else None,
            collect=folded.collect if folded is not None else None,
            after_backward=after_backward,
            after_update=after_update,
            capturable=phase != "Tick" or self.pruner.score.capturable,
            tensors=lambda: [*self.pruner.score.state().values(), *(self.ema.average if self.ema else ())],
        )
        self.trainer.wrapped = self.world.wrap(self.model, self.partial)
        try:
            with (
                seeded(self.settings.seed, self.cursor.number, self.cursor.epoch),
                folded.in_use() if folded is not None else nullcontext(),
            ):
                mean = self.trainer.epoch(self._batches(), work, self.position, self._after_step)
            if not are_finite(self.model.parameters()):
                raise NonFiniteLoss(self.num_batches - 1)
        except NonFiniteLoss as error:
            raise self._diverged(where, error.step) from error
        finally:
            self.trainer.wrapped = None
        # Batch norms of each process have last seen their own part of a batch.
        self.world.align_([*self.model.buffers(), *(self.ema.average if self.ema is not None else ())])
        self.cursor.epoch += 1
        self.position = Position()
        self._keep_state()
        return mean

    def _batches(self) -> Iterable[Any]:
        """This process's part of the data of the present epoch; a Tick may see some of it only."""
        settings, source = self.settings, self.task.train
        seed = mix(settings.seed, self.cursor.number, self.cursor.epoch)
        source = reseed(source, seed)
        if self.cursor.phase == "Tick":
            generator = torch.Generator().manual_seed(seed)
            source = draw(source, settings.tick_data, settings.tick_per_class, generator)
        return shard(source, self.world.rank, self.world.size)

    def _folded(self) -> Folded | None:
        """On a GPU, where every kernel counts, the norms' gates are folded in together."""
        if self.trainer.device.type != "cuda" or self.world.size > 1 or self.engine.accumulate > 1:
            return None
        if self.folded is None:
            self.folded = Folded(self.gates)
        return self.folded

    def _after_step(self, step: int) -> None:
        if self.watch is not None:
            self.watch(self.cursor.phase, step, self.num_batches)
        self.num_steps += 1
        if self.cursor.phase == "Tick" and not self.pruner.score.resumable:
            return  # what it has seen cannot be written down: wait for the end of the Tick
        # A signal finds every process at another step: they ask each other now and then, and stop at the same one.
        asks = self.world.size == 1 or self.num_steps % LOOK_EVERY == 0
        stopping = self.world.any(self.stopping) if asks else None
        if self.record is not None and (stopping or step % self.engine.checkpoint_steps == 0):
            self.position = self.trainer.position(step)
            self._save()
        elif stopping:
            raise KeyboardInterrupt

    def _save(self, needed: bool = False) -> None:
        if self.record is not None:
            stopping = self.world.any(self.stopping)
            self.record.save(needed or stopping is not None)
            if stopping is not None:
                raise Interrupted(stopping, str(self.record.path))

    def _keep_state(self) -> None:
        """Remember the network as it is, in case training goes wrong."""
        state = self.model.state_dict()
        self.good = {n: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for n, v in state.items()}

    def _diverged(self, where: str, step: int) -> Diverged:
        last = self.history[-1] if self.history else None
        self.model.load_state_dict(self.good)
        only_train_(self.model, self.trained)
        self.pruner.finish()
        done = f"after {last.name}" if last is not None else "at the start"
        return Diverged(
            f"the loss is not finite in {where}, step {step + 1}: the network as it was {done} is in the error's "
            "`result`. If that step's data is finite, a lower learning rate, or gradients that are clipped, may help",
            self._result(),
        )

    def _result(self, metrics: dict[str, float] | None = None) -> Result:
        unsync_batchnorm_(self.synced)
        model, plan = self.model.eval(), self.pruner.plan
        return Result(model=model, plan=plan, settings=self.settings, history=tuple(self.history), final=metrics or {})

    def _note(self, kind: type[Some], metrics: dict[str, float], started: float, **values: Any) -> Some:
        cost = self.pruner.cost
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
        if self.record is not None:
            self.record.note(event)
        return event
