"""The settings of Tick-Tock, with the paper's values as defaults. Torch is imported when a run starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from secateur.errors import InvalidSetting
from secateur.training.engine import Engine
from secateur.training.kinds import check_kinds
from secateur.training.schedules import Shape

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from secateur.channels.groups import ChannelGraph
    from secateur.pruning.latency import LatencyTable
    from secateur.pruning.scores import Score
    from secateur.runs.events import Event, Result
    from secateur.training.task import Task

    ScoreOrName = Score | str
else:
    ScoreOrName = str  # all that a command can say


@dataclass(frozen=True, kw_only=True)
class TickTock:
    """Prune by Tick-Tock: Ticks train the gates and remove a little, Tocks train everything; then fine-tune."""

    keep_macs: float | None = None
    """Stop when the network has this share of its MACs left. One budget is needed."""

    keep_params: float | None = None
    """The same for parameters."""

    keep_filters: float | None = None
    """The same for filters."""

    keep_latency: float | None = None
    """The same for the time that the layers take on the device, by a table that is measured once."""

    latency_batch: int = 1
    """Images in the batch for which that time counts."""

    score: ScoreOrName = "taylor"
    """What a channel is worth: taylor (the paper's), fisher, slim, pcnn, l1, l2, fpgm, apoz, random, or your own."""

    rank: Literal["auto", "score", "score_per_mac", "score_per_param", "score_per_microsecond"] = "auto"
    """By the score, or per MAC, parameter or microsecond saved; auto: the last with keep_latency, else the first."""

    rank_power: float = 1.0
    """How much that saving counts: the score is divided by this power of it."""

    tick_removes: float = 0.01
    """Share of the remaining filters that a Tick removes. The paper: 0.01, and 0.002 for ResNets."""

    tick_data: float = 1.0
    """Share of the training data that a Tick sees, drawn anew each time."""

    tick_per_class: int | None = None
    """Instead: this many examples of each class. The paper: 100 on ImageNet."""

    tick_epochs: int = 1
    """Epochs of a Tick."""

    tick_lr: float = 1e-3
    """Learning rate of a Tick."""

    tick_shifts: bool = False
    """Whether a Tick trains the gated batch norms' shifts beside the gates and the final layer."""

    ticks_per_tock: int = 10
    """A Tock follows this many Ticks; 0: there are no Tocks."""

    tock_first: bool = False
    """Whether a Tock comes before the first Tick."""

    tock_epochs: int = 10
    """Epochs of a Tock."""

    tock_lr: tuple[float, float] = (1e-3, 1e-2)
    """Lowest and highest learning rate of a Tock."""

    tock_shape: Shape = "triangle"
    """triangle (the paper's: up, down), warmup (up for a fifth, down to zero), cosine (down), steps or constant."""

    sparsity: float = 1e-3
    """Weight of the L1 term on the gates in a Tock."""

    finetune_epochs: int = 40
    """Epochs of training after pruning."""

    finetune_lr: tuple[float, float] = (1e-3, 1e-2)
    """Lowest and highest learning rate of fine-tuning."""

    finetune_shape: Shape = "triangle"
    """How it goes; as for a Tock."""

    milestones: tuple[float, ...] = (0.6, 0.8, 0.9)
    """Where "steps" divides the learning rate, as shares of the epochs. The paper: 36, 48 and 54 of 60 on ImageNet."""

    milestone_divides: float = 10.0
    """By how much."""

    optimizer: str = "sgd"
    """Any of torch's, by name: sgd, adamw, ..."""

    momentum: float = 0.9
    """Momentum, for optimizers that have it."""

    nesterov: bool = False
    """Nesterov's form of it."""

    weight_decay: float = 1e-4
    """Weight decay, on the gates too."""

    decay_norms: bool = True
    """Weight decay acts on gates, batch norms and biases too; --no-decay-norms: on filters alone."""

    distill: float = 0.0
    """Share of the loss that is distance from the unpruned network's output, in Tocks and fine-tuning."""

    distill_temperature: float = 4.0
    """How much both outputs are softened for that."""

    ema: float = 0.0
    """Decay of a moving average of the weights over fine-tuning, which is then the result; 0: none."""

    min_channels: int = 1
    """No group of channels gets narrower than this."""

    min_ratio: float = 0.1
    """No group of channels gets narrower than this share of its width, rounded down as in the paper's code."""

    multiple_of: int = 1
    """Keep widths at multiples of this, as hardware likes them: 8 or 16."""

    at_least: dict[str, int | float] = field(default_factory=dict)
    """By name of a layer, with wildcards: how many channels to keep of it (2), or which share (0.5; 1.0 for all)."""

    filter_scale: Literal["norm", "mean"] = "norm"
    """Gates of filters without batch norm: the filter's norm, or with "mean" the paper's, for tiny learning rates."""

    cut: Literal["auto", "now", "end"] = "auto"
    """When removed channels are cut out of the tensors: after every Tick, at the end, or whichever is faster here."""

    evaluate: Literal["always", "phases", "end"] = "always"
    """When the metrics are computed: after every epoch, when a Tock, pruning or fine-tuning ends, or at the end."""

    seed: int = 0
    """Seed of everything random in a run."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if hasattr(value, "item"):
                object.__setattr__(self, f.name, value.item())  # a number of numpy's or torch's
        check_kinds(self)
        if not 0 <= self.seed < 2**63:
            raise InvalidSetting(f"seed must be at least 0 and below 2**63, got {self.seed}")
        for name in ("tock_lr", "finetune_lr"):
            ends = getattr(self, name)
            if not _are_numbers(ends) or len(ends) != 2 or not 0 <= ends[0] <= ends[1] < math.inf:
                raise InvalidSetting(f"{name} is the lowest and the highest rate, as (0.001, 0.01), got {ends}")
        budgets = {name: share for name, share in self.budgets.items() if share is not None}
        if len(budgets) != 1:
            got = " and ".join(budgets) if budgets else "none"
            raise InvalidSetting(f"one budget is needed: {', '.join(BUDGETS[:-1])} or {BUDGETS[-1]}; got {got}")
        name, share = budgets.popitem()
        if not 0 < share <= 1:
            raise InvalidSetting(f"{name} is the share that is left, above 0 and at most 1, got {share}")
        for name in ("tick_removes", "tick_data"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidSetting(f"{name} is a share, above 0 and at most 1, got {getattr(self, name)}")
        for name in ("tick_epochs", "tock_epochs", "min_channels", "multiple_of", "latency_batch"):
            if getattr(self, name) < 1:
                raise InvalidSetting(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("distill", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidSetting(f"{name} is a share, at least 0 and below 1, got {getattr(self, name)}")
        counts = ("ticks_per_tock", "finetune_epochs")
        for name in (*counts, "sparsity", "momentum", "weight_decay", "tick_lr", "rank_power"):
            if getattr(self, name) < 0:
                raise InvalidSetting(f"{name} must not be negative, got {getattr(self, name)}")
        if self.distill_temperature <= 0:
            raise InvalidSetting(f"distill_temperature must be above 0, got {self.distill_temperature}")
        if self.tick_per_class is not None and self.tick_per_class < 1:
            raise InvalidSetting(f"tick_per_class must be 1 or more, got {self.tick_per_class}")
        are_shares = _are_numbers(self.milestones) and all(0 < share < 1 for share in self.milestones)
        if not are_shares or self.milestone_divides <= 0:
            raise InvalidSetting(
                f"milestones are shares of the epochs, between 0 and 1, and milestone_divides is above 0, got "
                f"{self.milestones} and {self.milestone_divides}"
            )

    @classmethod
    def one_shot(cls, **settings: Any) -> TickTock:
        """The baseline that scores once and removes everything at once."""
        return cls(**{"tick_removes": 1.0, "ticks_per_tock": 0, **settings})

    @classmethod
    def tick_only(cls, **settings: Any) -> TickTock:
        """The baseline without Tocks."""
        return cls(**{"ticks_per_tock": 0, **settings})

    @property
    def budgets(self) -> dict[str, float | None]:
        """All of them by name; the one that is given, and None for the others."""
        return {name: getattr(self, name) for name in BUDGETS}

    @property
    def ranking(self) -> str:
        """What is ranked by, once "auto" is decided."""
        if self.rank != "auto":
            return self.rank
        return "score_per_microsecond" if self.keep_latency is not None else "score"

    def but(self, **settings: Any) -> TickTock:
        """The same with other values for some settings.

        >>> TickTock(keep_macs=0.4).but(seed=3).seed
        3
        """
        return replace(self, **settings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if not isinstance(self.score, str):
            from secateur.pruning.scores import describe

            values["score"] = describe(self.score)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TickTock:
        """What `to_dict` has given."""
        known: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**known)

    def __call__(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        task: Task,
        *,
        progress: Callable[[Event], object] | None = None,
        engine: Engine | None = None,
        folder: str | Path | None = None,
        latency: LatencyTable | None = None,
    ) -> Result:
        """Prune and fine-tune a copy of the model; `progress`, e.g. `print`, is called with every event on the way."""
        from secateur.runs.events import Finished

        event = None
        for event in self.steps(model, graph, task, engine=engine, folder=folder, latency=latency):
            if progress is not None:
                progress(event)
        assert isinstance(event, Finished)
        return event.result

    def steps(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        task: Task,
        *,
        engine: Engine | None = None,
        folder: str | Path | None = None,
        latency: LatencyTable | None = None,
    ) -> Iterator[Event]:
        """The same, as events: Start, then Tick and Tock by turns, FineTune per epoch, and Finished with the result.

        engine: how to use the hardware.
        folder: where the run lives; one that was stopped there goes on where it was, given the same again.
        latency: what layers take, from `measure_latency`; for keep_latency.
        """
        from secateur.channels.groups import check_graph
        from secateur.runs.run import Run

        return Run(self, model, check_graph(graph), task, engine=engine, folder=folder, latency=latency).events()


BUDGETS = ("keep_macs", "keep_params", "keep_filters", "keep_latency")


def _are_numbers(values: Any) -> bool:
    return isinstance(values, (tuple, list)) and all(isinstance(value, Real) for value in values)
