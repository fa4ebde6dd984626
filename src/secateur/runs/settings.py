"""The settings of Tick-Tock, with the paper's values as defaults, and presets of them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from secateur.errors import InvalidSetting, unknown_name
from secateur.pruning.settings import Budget, Limits, Rank
from secateur.settings import Settings, check_seed, group, is_share
from secateur.training.settings import Evaluate, Learning, Schedule

if TYPE_CHECKING:
    from secateur.pruning.scores import Score

    ScoreOrName = Score | str
else:
    ScoreOrName = str  # all that a command line can give


PER_UNIT: dict[str, Rank] = {
    "macs": "score_per_mac",
    "params": "score_per_param",
    "latency": "score_per_microsecond",
}
"""The rank by what a budget counts."""

STEPS = {
    "tick_removes": 0.05,
    "tick_step": 0.05,
    "tick_data": 1.0,
    "tick_per_class": None,
    "tick_images": 2048,
    "tick_epochs": 1,
    "tick_lr": 0.0,
    "tick_shifts": False,
    "tock_every": 0,
    "repair": 512,
}
"""Small steps without training, with repair after each."""
BY_TEACHER = {"distill": 0.9, "finetune_lr_low": 0.0, "finetune_shape": "warmup", "adapt": True}
"""Fine-tuning with the whole network as teacher, where that is possible."""
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        **STEPS,
        **BY_TEACHER,
        "tick_removes": 1.0,
        "tick_step": 1.0,
        "finetune_epochs": 5,
        "finetune_min_steps": 1000,
    },
    "balanced": {**STEPS, **BY_TEACHER, "finetune_epochs": 25, "finetune_min_steps": 3000},
    "paper": {},
}
"""Settings by what people want, beside the paper's."""
Preset = Literal["quick", "balanced", "paper"]


@dataclass(frozen=True, kw_only=True)
class Ticks(Settings):
    """A Tick trains the gates and the final layer, scores all channels, and removes the lowest."""

    removes: float = 0.01
    """Share of the remaining filters that a Tick removes. The paper: 0.01, and 0.002 for ResNets."""

    step: float = 1.0
    """Share of what the budget counts, such as MACs of the whole network, that a Tick removes at most."""

    data: float = 1.0
    """Share of the training data that a Tick sees, drawn anew each time."""

    per_class: int | None = None
    """Instead of a share: this many examples of each class. The paper: 100 on ImageNet."""

    images: int | None = None
    """Instead of a share: about this many images."""

    epochs: int = 1
    """Epochs of a Tick."""

    lr: float = 1e-3
    """Learning rate of a Tick. With 0 nothing trains: a Tick only scores, with batch norms in evaluation mode."""

    shifts: bool = False
    """Train the shifts of gated batch norms too."""

    def check(self) -> None:
        self.require("a share above 0 and at most 1", "removes", "step", "data", holds=is_share)
        self.require("1 or more", "epochs", holds=lambda value: value >= 1)
        self.require("1 or more", "per_class", "images", holds=lambda value: value is None or value >= 1)
        if self.per_class is not None and self.images is not None:
            raise InvalidSetting("a Tick has two amounts of data", got="per_class and images", wanted="one of them")
        if self.data != 1 and self.images is not None:
            raise InvalidSetting("a Tick has two amounts of data", got="data and images", wanted="one of them")
        self.require("0 or more", "lr", holds=lambda value: value >= 0)


@dataclass(frozen=True, kw_only=True)
class Tocks(Schedule):
    """A Tock trains everything, with an L1 term on the gates."""

    every: int = 10
    """A Tock follows this many Ticks; 0 for no Tocks."""

    first: bool = False
    """Begin with a Tock."""

    sparsity: float = 1e-3
    """Weight of the L1 term on the gates."""

    epochs: int = 10
    """Epochs of a Tock."""

    def check(self) -> None:
        super().check()
        self.require("0 or more", "every", "sparsity", holds=lambda value: value >= 0)
        self.require("1 or more", "epochs", holds=lambda value: value >= 1)


@dataclass(frozen=True, kw_only=True)
class TickTock(Settings):
    """Prune by Tick-Tock: Ticks score and remove a few channels, Tocks train everything; then fine-tune.

    >>> settings = TickTock(budget=Budget(macs=0.4), ticks=Ticks(removes=0.002))
    >>> settings == TickTock.of(keep_macs=0.4, tick_removes=0.002)
    True
    """

    budget: Budget = group(Budget, "keep_")
    limits: Limits = group(Limits)
    ticks: Ticks = group(Ticks, "tick_")
    tocks: Tocks = group(Tocks, "tock_")
    finetune: Schedule = group(Schedule, "finetune_")
    learning: Learning = group(Learning)

    retrain_epochs: int = 0
    """First train the whole network for this many more epochs, with the schedule of fine-tuning; 0 for none."""

    score: ScoreOrName = "taylor"
    """taylor (the paper's), fisher, slim, pcnn, l1, l2, fpgm, apoz, residual, measured, random; or your own."""

    rank: Rank = "auto"
    """Rank by score, or by score per MAC, parameter or microsecond; auto: per microsecond for a latency budget."""

    rank_power: float = 1.0
    """The score is divided by this power of what a channel saves."""

    latency_batch: int = 1
    """Batch size for measuring latency, and for the expected time on a GPU."""

    latency_in: Literal["torch", "onnxruntime"] = "torch"
    """What runs the network where its time is measured: torch, or onnxruntime, for networks on a CPU."""

    repair: int = 0
    """After every removal, re-fit what is left in closed form, with this many training images; 0 for no repair."""

    filter_scale: Literal["norm", "mean"] = "norm"
    """Gates of filters without batch norm: the norm of the filter, or the paper's mean, for tiny learning rates."""

    cut: Literal["auto", "now", "end"] = "auto"
    """When to cut the tensors: after every Tick, at the end, or whichever is faster on this device."""

    adapt: bool = False
    """Leave out repair or distillation where the task does not allow it, with a note, instead of raising."""

    evaluate: Evaluate = "always"
    """When to compute the metrics: after every epoch and Tick, when a Tock or phase ends, or at the end only."""

    seed: int = 0
    """Seed of everything random in a run."""

    def check(self) -> None:
        self.budget.counts  # noqa: B018  # raises without a budget
        self.require("0 or more", "retrain_epochs", "rank_power", "repair", holds=lambda value: value >= 0)
        self.require("1 to a million", "latency_batch", holds=lambda value: 1 <= value <= 10**6)
        check_seed(self.seed)

    @classmethod
    def one_shot(cls, **values: Any) -> TickTock:
        """The paper's baseline that scores once and removes everything at once; values by flat name."""
        return cls.of(**{"tick_removes": 1.0, "tock_every": 0, **values})

    @classmethod
    def tick_only(cls, **values: Any) -> TickTock:
        """The paper's baseline without Tocks; values by flat name."""
        return cls.of(**{"tock_every": 0, **values})

    @classmethod
    def preset(cls, name: Preset, **values: Any) -> TickTock:
        """Settings by what is wanted; `values` by flat name, a budget among them, take precedence.

        quick: score once, remove everything at once, re-fit what is left, and fine-tune for a few epochs.
        balanced: remove in small steps, re-fit after each, and fine-tune for some 25 epochs.
        paper: what the paper does.

        >>> TickTock.preset("quick", keep_macs=0.4).finetune.epochs
        5
        """
        if name not in PRESETS:
            raise unknown_name("preset", name, list(PRESETS))
        chosen = dict(PRESETS[name])
        if "finetune_epochs" in values:
            chosen.pop("finetune_min_steps", None)
        if values.keys() & {"tick_data", "tick_per_class"}:
            chosen.pop("tick_images", None)
        settings = cls.of(**{**chosen, **values})
        if not chosen or "rank" in values:
            return settings
        return settings.but(rank=PER_UNIT.get(settings.budget.counts, "score"))

    def without_training(self) -> TickTock:
        """The same budget and limits without any training: small steps, with repair between them.

        >>> settings = TickTock.of(keep_macs=0.7).without_training()
        >>> settings.trains, settings.repair, settings.rank
        (False, 512, 'score_per_mac')
        """
        return self.but(
            **STEPS,
            finetune_epochs=0,
            retrain_epochs=0,
            distill=0.0,
            distill_features=0.0,
            ema=0.0,
            rank=PER_UNIT.get(self.budget.counts, "score"),
        )

    @property
    def trains(self) -> bool:
        """Whether Ticks or Tocks train anything."""
        return self.ticks.lr > 0 or self.tocks.every > 0

    @property
    def ranking(self) -> Rank:
        """The rank, with "auto" decided."""
        if self.rank != "auto":
            return self.rank
        return "score_per_microsecond" if self.budget.counts == "latency" else "score"

    @property
    def needs_latency(self) -> bool:
        """Whether the times of the layers are needed."""
        return self.budget.counts == "latency" or self.ranking == "score_per_microsecond"

    def to_dict(self) -> dict[str, Any]:
        """Every value by its flat name, ready for JSON."""
        values = super().to_dict()
        if not isinstance(self.score, str):
            from secateur.pruning.scores import describe

            values["score"] = describe(self.score)
        return values
