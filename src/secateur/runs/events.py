"""What a run reports, and what it gives in the end."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from torch import nn

from secateur.channels.cost import Cost
from secateur.channels.plan import Plan
from secateur.channels.verify import Verification
from secateur.files import numbers
from secateur.words import counted, digits

if TYPE_CHECKING:
    from secateur.runs.settings import TickTock
    from secateur.training.settings import Training


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something was done, and this is the network after it."""

    macs: int
    share: float
    """Of the MACs of the whole network."""
    params: int
    filters: int
    metrics: dict[str, float]
    """Of the task; empty where they were not computed."""
    seconds: float
    """How long it took, evaluation included."""
    left: dict[str, float] = field(default_factory=dict)
    """The share that is left of what the budget counts, by its unit, where that is not MACs."""

    @property
    def name(self) -> str:
        """Which event this is, as "Tock 2, epoch 3"."""
        return type(self).__name__

    def __str__(self) -> str:
        left = [f"{self.share:6.1%} of the MACs", *(f"{share:.1%} of the {unit}" for unit, share in self.left.items())]
        metrics = [f"{name} {digits(value)}" for name, value in self.metrics.items()]
        return "  ".join([f"{self.name:<18} {', '.join(left)}", *metrics, f"{self.seconds:.1f} s"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"event": type(self).__name__, **{f.name: getattr(self, f.name) for f in fields(self)}}


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """The network before it is pruned."""

    original: dict[str, float] = field(default_factory=dict)
    """The metrics of the whole network, where the run starts from one that is already pruned."""


@dataclass(frozen=True, kw_only=True)
class Tick(Event):
    """Gates were trained and scored, and some channels removed."""

    number: int
    loss: float
    removed: dict[str, int]
    """Channels by group."""
    skipped: int
    """Batches that the score left out because their gradient was not finite."""
    scores: list[float] = field(default_factory=list)
    """Deciles of what the channels were ranked by, from the smallest to the largest."""
    threshold: float = 0.0
    """The largest of those that were removed."""
    branches: list[str] = field(default_factory=list)
    """Branches that were removed as a whole."""

    @property
    def name(self) -> str:
        return f"Tick {self.number}"

    def __str__(self) -> str:
        gone = f"  {counted(len(self.branches), 'branch', 'branches')} removed" if self.branches else ""
        return f"{super().__str__()}{gone}"


@dataclass(frozen=True, kw_only=True)
class Epoch(Event):
    """An epoch of training."""

    epoch: int
    epochs: int
    loss: float

    @property
    def name(self) -> str:
        return f"{type(self).__name__} epoch {self.epoch}"


@dataclass(frozen=True, kw_only=True)
class Train(Epoch):
    """An epoch of training that removes nothing: of the baseline, of the whole network, or of a pruned one."""

    phase: str

    @property
    def name(self) -> str:
        return f"{self.phase.capitalize()} epoch {self.epoch}"


@dataclass(frozen=True, kw_only=True)
class Tock(Epoch):
    """An epoch of training with the L1 term on the gates."""

    number: int

    @property
    def name(self) -> str:
        return f"Tock {self.number}, epoch {self.epoch}"


@dataclass(frozen=True, kw_only=True)
class FineTune(Epoch):
    """An epoch of training the pruned network."""


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    """The end of the run."""

    result: Result

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        del values["result"]
        return values


def from_dict(data: dict[str, Any]) -> Event:
    """The event that `to_dict` has described."""
    kinds = {kind.__name__: kind for kind in (Start, Train, Tick, Tock, FineTune)}
    values = numbers(data)
    return kinds[values.pop("event")](**values)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A network that was pruned, or trained, and how."""

    model: nn.Module
    """Of the class that was given, with smaller tensors and nothing of ours in it."""
    plan: Plan
    """What was kept of the whole network."""
    settings: TickTock | Training
    history: tuple[Event, ...]
    final: dict[str, float] = field(default_factory=dict)
    """The metrics at the end, in single precision."""
    verification: Verification | None = None
    """How far the masked and the cut network are apart, where they were compared."""

    @property
    def before(self) -> Cost:
        return self.plan.graph.cost()

    @property
    def after(self) -> Cost:
        return self.plan.cost

    @property
    def metrics_before(self) -> dict[str, float]:
        """Of the whole network, before it was pruned or trained further; empty if they are not known."""
        start = next((event for event in self.history if isinstance(event, Start)), None)
        if start is None or start.original:
            return start.original if start is not None else {}
        return start.metrics if start.share == 1 else {}

    @property
    def metrics(self) -> dict[str, float]:
        """Those at the end, or the last that were computed."""
        return self.final or next((event.metrics for event in reversed(self.history) if event.metrics), {})

    def __str__(self) -> str:
        rows = [("MACs", self.before.macs, self.after.macs), ("parameters", self.before.params, self.after.params)]
        lines = [f"{name:<12} {a:>14,} -> {b:>14,}  ({b / max(1, a):.1%})" for name, a, b in rows]
        for name, value in self.metrics.items():
            before = digits(self.metrics_before[name]) if name in self.metrics_before else "-"
            lines.append(f"{name:<12} {before:>14} -> {digits(value):>14}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        left = self.after.macs / max(1, self.before.macs)
        return f"Result({left:.1%} of the MACs, {counted(len(self.history), 'event')})"
