"""A run: phases one after another on one network, in a folder or not, to be stopped and resumed at any step."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from secateur.channels.guard import are_finite
from secateur.channels.plan import Plan
from secateur.channels.shapes import channels_last
from secateur.channels.shrink import copy_model, tensors_of
from secateur.errors import Diverged, Interrupted
from secateur.pruning.pruner import Pruner
from secateur.pruning.selection import count_filters
from secateur.randomness import mix, seeded
from secateur.runs.events import Event, Finished, Result
from secateur.runs.lessons import check_teacher
from secateur.runs.phases import Phase, only_train_
from secateur.runs.record import Record
from secateur.runs.settings import TickTock
from secateur.runs.ticktock import PruningPhase
from secateur.training.batches import count, draw, prefetch, reseed, share_of, unaugmented
from secateur.training.distributed import World, sync_batchnorm_, unsync_batchnorm_
from secateur.training.engine import Engine
from secateur.training.loop import LOOK_EVERY, NonFiniteLoss, Position, Trainer, Work
from secateur.training.optimizers import make_optimizer
from secateur.training.settings import Training
from secateur.training.shards import shard
from secateur.training.task import Task, check_task

Some = TypeVar("Some", bound=Event)
Progress = Callable[[Any], object]
"""Called with every event, and with lines of text in between; `print` will do."""


class Run:
    """Phases on a copy of the model; nothing that is given is changed.

    plan: what the model keeps of the whole network; all of it, unless the model is already pruned.
    whole: the whole network, where the model is already pruned and the whole network is known.
    teacher: what distillation learns from, if not the whole network.
    folder: where the run lives; a run that was stopped there is resumed, if it is given the same again.
    about: plain data for config.json.
    compared: plain data that must be the same when the run is resumed.
    """

    def __init__(
        self,
        settings: TickTock | Training,
        phases: Sequence[Phase],
        model: nn.Module,
        plan: Plan,
        task: Task,
        *,
        whole: nn.Module | None = None,
        teacher: nn.Module | None = None,
        engine: Engine | None = None,
        folder: str | Path | None = None,
        about: dict[str, Any] | None = None,
        compared: dict[str, Any] | None = None,
        progress: Progress = lambda event: None,
    ) -> None:
        self.settings, self.phases, self.task = settings, list(phases), task
        self.graph, self.started_with = plan.graph, plan
        self.engine = engine or Engine()
        self.world = World.current()
        self.folder = folder
        self.progress = progress
        self._check_data()
        self.started_whole = bool(plan.kept.all()) and not plan.without
        self.whole = model if self.started_whole else whole
        """The whole network as the present phase knows it: it teaches, and cuts are compared with it."""
        self.teacher = teacher
        self.model = self.copied(model)
        self.synced = self._sync_batchnorm()
        """The batch norms that see the batches of all processes, and their own classes."""
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self.pruner: Pruner | None = None
        self.trainer = Trainer(self.model, self.engine, self.world, self.graph.partial, progress)
        self.index = 0
        """The present phase."""
        self.stage = 0
        """How many phases, Ticks and Tocks are done: with the epoch, it decides the random numbers."""
        self.epoch = 0
        """Epochs done in the present stage."""
        self.position = Position()
        self.history: list[Event] = []
        self.stopping: int | None = None
        """The signal that has asked the run to stop."""
        self.num_steps = 0
        """Optimizer steps of this process."""
        self.on_step: Callable[[str, int, int], None] | None = None
        """Called after every step with the phase, the batches done, and how many there are."""
        self._check_phases(next(each for each in (teacher, whole, model) if each is not None))
        self.keep_good_state()
        self.record = Record(self, folder, about or {}, compared or {}) if folder is not None else None

    @property
    def phase(self) -> Phase:
        return self.phases[self.index]

    @property
    def trained(self) -> list[nn.Parameter]:
        """What trains of the network as it is, by the user's own flags."""
        here = {id(parameter) for parameter in self.model.parameters()}
        return [parameter for parameter in self._trained if id(parameter) in here]

    @property
    def pruning(self) -> PruningPhase | None:
        """The phase that prunes, if there is one."""
        return next((phase for phase in self.phases if isinstance(phase, PruningPhase)), None)

    @property
    def kept(self) -> Tensor:
        """The channels of the whole network that are left."""
        return self.pruner.kept if self.pruner is not None else self.started_with.kept

    def _check_data(self) -> None:
        with seeded(self.settings.seed):
            self.num_batches = count(check_task(self.task).train)
            if isinstance(self.settings, TickTock) and self.settings.ticks.per_class is not None:
                ticks = self.settings.ticks
                draw(self.task.train, ticks.data, ticks.per_class, torch.Generator().manual_seed(0))

    def _check_phases(self, teacher: nn.Module) -> None:
        """Raise for what could not be done, before anything is; set up what can be set up now."""
        make_optimizer(self.trained, self.settings.learning)
        check_teacher(self, teacher)
        trains_first = False
        for phase in self.phases:
            trains_first |= phase.trains_whole
            if trains_first or not isinstance(phase, PruningPhase):
                phase.check(self)  # without training before it, pruning is set up below
        if not trains_first:
            self._insert_gates()
        self.phase.start(self)

    def _insert_gates(self) -> None:
        pruning = self.pruning
        if pruning is not None and self.pruner is None:
            self.pruner = pruning.make_pruner(self, self.model)

    def copied(self, model: nn.Module) -> nn.Module:
        """A copy in the memory format of the engine, the same in all processes."""
        copied = copy_model(model)
        if self.engine.channels_last:
            copied._apply(channels_last)
        self.world.align_(tensors_of(copied).values())
        return copied

    def _sync_batchnorm(self) -> dict[nn.Module, type[nn.Module]]:
        if self.engine.sync_batchnorm and self.world.can_sync(self.model):
            return sync_batchnorm_(self.model)
        if self.engine.sync_batchnorm:
            self.progress("sync_batchnorm has no effect: it is for several processes with a GPU each")
        return {}

    def events(self) -> Iterator[Event]:
        """Do the run, one event at a time."""
        try:
            while True:
                yield from self.phase.events(self)
                if self.index + 1 == len(self.phases):
                    break
                self._next_phase()
            if self.record is not None:
                self.record.save(needed=True)
            started = time.perf_counter()
            metrics = self.metrics(exact=True)
            yield self.note(Finished, metrics, started, result=self._result(metrics))
        except KeyboardInterrupt as stop:
            if self.record is not None and self.history:
                stop.add_note(f"saved in {self.record.path} up to the last checkpoint: the same call resumes it")
            raise
        except RuntimeError as error:
            if not bool(self.kept.all()):
                for note in self.graph.notes:
                    error.add_note(f"from the analysis: {note}")
            raise
        finally:
            self.trainer.forget()  # NCCL is not ended while graphs hold its operations
            if self.record is not None:
                self.record.finish()

    def _next_phase(self) -> None:
        if self.phase.trains_whole:
            self.whole = copy_model(self.model)
            if self.record is not None:
                self.record.keep_network(self.phase.name)
        self.index += 1
        if self.phase is self.pruning:
            self._insert_gates()
        self.trainer.forget()
        self.phase.start(self)
        self.keep_good_state()
        self.next_stage(needed=True)

    def next_stage(self, needed: bool = False) -> None:
        """Begin the next phase, Tick or Tock, with random numbers of its own."""
        self.stage += 1
        self.epoch = 0
        self.position = Position()
        self.save(needed)

    def train_epoch(self, where: str, work: Work, drawn: Callable[..., Iterable[Any]] | None = None) -> float:
        """Train for one epoch from the present position; the mean loss.

        where: for messages. drawn: takes a part of the data.
        """
        try:
            with seeded(self.settings.seed, self.stage, self.epoch):
                mean = self.trainer.epoch(self._batches(drawn), work, self.position, self._after_step)
            if not are_finite(self.model.parameters()):
                raise NonFiniteLoss(self.num_batches - 1)
        except NonFiniteLoss as error:
            raise self._diverged(where, error) from error
        self.align_()
        self.epoch += 1
        self.position = Position()
        self.keep_good_state()
        return mean

    def align_(self) -> None:
        """Give all processes the leading one's running statistics: each has seen its own parts of the batches."""
        self.world.align_([*self.model.buffers(), *self.phase.tensors()])

    def _batches(self, drawn: Callable[..., Iterable[Any]] | None) -> Iterable[Any]:
        """This process's part of the data of the present epoch."""
        seed = mix(self.settings.seed, self.stage, self.epoch)
        source = reseed(self.task.train, seed)
        if drawn is not None:
            source = drawn(source, generator=torch.Generator().manual_seed(seed))
        return shard(source, self.world.rank, self.world.size)

    @contextmanager
    def some_images(self, count: int) -> Iterator[tuple[Iterable[Any], int]]:
        """Training batches with so many images or more, and the number that this process uses; drawn by the seed."""

        def drawn(source: Iterable[Any], generator: torch.Generator) -> Iterable[Any]:
            # Of some sources whole batches are drawn; so that there are enough, twice as many images.
            return draw(unaugmented(source), share_of(source, 2 * count), None, generator)

        with seeded(self.settings.seed, self.stage, self.epoch):
            batches = map(self.task.inputs, prefetch(self._batches(drawn), self.trainer.device))
            yield batches, -(-count // self.world.size)

    def _after_step(self, step: int) -> None:
        if self.on_step is not None:
            self.on_step(self.phase.name, step, self.num_batches)
        self.num_steps += 1
        if not self.phase.resumable():
            return  # the next checkpoint is at the end of the epoch
        # A signal finds every process at another step: they ask each other now and then, and stop at the same one.
        asks = not self.world.joined or self.num_steps % LOOK_EVERY == 0
        stopping = self.world.any(self.stopping) if asks else None
        steps = step // self.engine.accumulate
        if self.record is not None and (stopping or steps % self.engine.checkpoint_steps == 0):
            self.position = self.trainer.position(step)
            self.save()
        elif stopping:
            raise KeyboardInterrupt

    def save(self, needed: bool = False) -> None:
        """Write a checkpoint, unless the last one is recent and this one is not needed; stop if asked to."""
        if self.record is not None:
            stopping = self.world.any(self.stopping)
            self.record.save(needed or stopping is not None)
            if stopping is not None:
                raise Interrupted(stopping, str(self.record.path))

    def keep_pruned(self) -> None:
        """Keep the state from which a run with a smaller budget can continue."""
        if self.record is not None:
            state = self.state_dict()
            state |= {"stage": self.stage + 1, "epoch": 0, "position": asdict(Position())}
            self.record.keep_pruned({**state, "pruner": {**state["pruner"], "score": {}}})

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides how the run continues."""
        return {
            "index": self.index,
            "stage": self.stage,
            "epoch": self.epoch,
            "position": asdict(self.position),
            "pruner": self.pruner.state_dict() if self.pruner is not None else None,
            "model": tensors_of(self.model),
            "scaler": self.trainer.scaler.state_dict(),
            "phase": self.phase.state_dict(self),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Bring a new run to where another one was."""
        self.index, self.stage, self.epoch = state["index"], state["stage"], state["epoch"]
        self.position = Position(**state["position"])
        trained = [phase.name for phase in self.phases[: self.index] if phase.trains_whole]
        if trained and self.record is not None:
            self.whole = copy_model(self.model)
            self.record.load_network(trained[-1], self.whole)
        if state["pruner"] is not None:
            self._insert_gates()
            assert self.pruner is not None
            self.pruner.load_state_dict(state["pruner"])
        self.phase.start(self)
        tensors = tensors_of(self.model)
        for name, value in state["model"].items():
            if name in tensors:
                tensors[name].copy_(value)
            else:  # a buffer that the forward pass has made
                path, _, attribute = name.rpartition(".")
                self.model.get_submodule(path).register_buffer(attribute, value.to(self.trainer.device))
        self.trainer.scaler.load_state_dict(state["scaler"])
        self.phase.load_state_dict(self, state["phase"])
        self.keep_good_state()

    @property
    def done(self) -> float:
        """How much of the run is done, from 0 to 1; every phase that takes time counts alike."""
        long = [phase for phase in self.phases if phase.name != "start"]
        before = [phase for phase in self.phases[: self.index] if phase.name != "start"]
        return (len(before) + self.phase.progress(self)) / max(1, len(long))

    def metrics(self, model: nn.Module | None = None, exact: bool = False) -> dict[str, float]:
        """Of the present network or another; in the precision of training unless `exact`."""

        def compute(evaluated: nn.Module) -> dict[str, float]:
            chosen = {"held_out": self.task.chosen_by(evaluated)} if exact and self.task.held_out is not None else {}
            return {**self.task.metrics(evaluated), **chosen}

        return self._evaluate(compute, model, exact)

    def chosen_by(self) -> float:
        """What a choice between epochs is made by."""
        return self._evaluate(self.task.chosen_by, None, exact=False)

    def _evaluate(self, compute: Callable[[nn.Module], Any], model: nn.Module | None, exact: bool) -> Any:
        """What the leading process computes, known to all."""
        random = seeded(self.settings.seed, self.stage, self.epoch)
        weights = self.phase.evaluated() if model is None else nullcontext()
        with random, weights, nullcontext() if exact else self.trainer.autocast():
            evaluated = model or (self.model if exact else self.trainer.for_evaluation())
            return self.world.tell(compute(evaluated) if self.world.leads else None)

    def metrics_after(self, last: bool) -> dict[str, float]:
        """The metrics, if the settings want them after this epoch; `last` if it is the last of its phase or Tock."""
        wanted = self.settings.evaluate == "always" or (self.settings.evaluate == "phases" and last)
        return self.metrics() if wanted else {}

    def keep_good_state(self) -> None:
        """Remember the network as it is, in case training diverges."""
        state = self.model.state_dict()
        self.good = {n: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for n, v in state.items()}

    def _diverged(self, where: str, error: NonFiniteLoss) -> Diverged:
        last = self.history[-1].name if self.history else "the start"
        self.model.load_state_dict(self.good)
        only_train_(self.model, self.trained)
        if self.pruner is not None:
            self.pruner.finish()
        what, remedy = f"the loss is not finite in {where}, step {error.step + 1}", "Correct the data"
        if error.in_data is not None:
            what += f"; its batch holds {'' if error.in_data else 'no '}NaN or infinite values"
        if not error.in_data:
            remedy = "Try a lower learning rate, or clip the gradients"
        remedy = f"The network after {last} is in the error's `result`. {remedy}"
        return Diverged(what, result=self._result(), remedy=remedy)

    def _result(self, metrics: dict[str, float] | None = None) -> Result:
        unsync_batchnorm_(self.synced)
        plan = Plan(self.graph, self.kept, self.started_with.without)
        history = tuple(self.history)
        return Result(model=self.model.eval(), plan=plan, settings=self.settings, history=history, final=metrics or {})

    def note(self, kind: type[Some], metrics: dict[str, float], started: float, **values: Any) -> Some:
        """Make an event, remember it, and write it down."""
        before = self.started_with.without
        cost = self.graph.cost(self.kept, before)
        event = kind(
            macs=cost.macs,
            share=cost.macs / self.graph.macs,
            params=cost.params,
            filters=count_filters(self.graph, self.kept, before),
            metrics=metrics,
            seconds=time.perf_counter() - started,
            left=self._left(),
            **values,
        )
        self.history.append(event)
        if self.record is not None:
            self.record.note(event)
        return event

    def _left(self) -> dict[str, float]:
        """What is left of what the budget counts, where that is not MACs."""
        pruning = self.pruning
        if pruning is None or self.pruner is None or pruning.settings.budget.counts == "macs":
            return {}
        return {pruning.settings.budget.unit: pruning.target.left(self.kept)}
