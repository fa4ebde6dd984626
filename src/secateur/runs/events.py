"""What a run reports on its way, and what it gives in the end."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from torch import nn

from secateur.channels.cost import Cost
from secateur.channels.plan import Plan
from secateur.files import numbers
from secateur.words import counted

if TYPE_CHECKING:
    from secateur.runs.settings import TickTock


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something has been done; this is how the network stands."""

    macs: int
    share: float
    """Of the whole network's MACs."""
    params: int
    filters: int
    metrics: dict[str, float]
    """Of the task; empty where they were not computed."""
    seconds: float
    """How long it took, evaluation included."""

    @property
    def name(self) -> str:
        """Which one, in words."""
        words = {"number": "", "epoch": "epoch "}
        numbers = [f"{words[key]}{vars(self)[key]}" for key in words if key in vars(self)]
        return " ".join([type(self).__name__, ", ".join(numbers)]).strip()

    def __str__(self) -> str:
        numbers = [f"{name} {value:.4g}" for name, value in self.metrics.items()]
        return "  ".join([f"{self.name:<18} {self.share:6.1%} of the MACs", *numbers, f"{self.seconds:.1f} s"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"event": type(self).__name__, **{f.name: getattr(self, f.name) for f in fields(self)}}


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """The network as it was given."""


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


@dataclass(frozen=True, kw_only=True)
class Tock(Event):
    """An epoch of training with the L1 term on the gates."""

    number: int
    epoch: int
    epochs: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class FineTune(Event):
    """An epoch of plain training of the pruned network."""

    epoch: int
    epochs: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    """The end."""

    result: Result

    def to_dict(self) -> dict[str, Any]:
        data = {**vars(self)}
        del data["result"]
        return {"event": "Finished", **data}


def from_dict(data: dict[str, Any]) -> Event:
    """The event that `to_dict` has told of."""
    kinds = {kind.__name__: kind for kind in (Start, Tick, Tock, FineTune)}
    values = numbers(data)
    return kinds[values.pop("event")](**values)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A pruned network and how it came about."""

    model: nn.Module
    """Of the class that was given, smaller, with nothing of ours in it."""
    plan: Plan
    """What was kept of the original network."""
    settings: TickTock
    history: tuple[Event, ...]
    final: dict[str, float] = field(default_factory=dict)
    """The metrics at the end, in single precision."""
    original: dict[str, float] | None = None
    """The metrics of the original network, where the run began with one that was cut already."""

    @property
    def before(self) -> Cost:
        return self.plan.graph.cost()

    @property
    def after(self) -> Cost:
        return self.plan.cost

    @property
    def metrics_before(self) -> dict[str, float]:
        """Of the original network."""
        if self.original is not None:
            return numbers(self.original)
        return self.history[0].metrics if self.history else {}

    @property
    def metrics(self) -> dict[str, float]:
        """Those at the end, or the last that were computed."""
        return self.final or next((event.metrics for event in reversed(self.history) if event.metrics), {})

    def __str__(self) -> str:
        rows = [("MACs", self.before.macs, self.after.macs), ("parameters", self.before.params, self.after.params)]
        lines = [f"{name:<12} {a:>14,} -> {b:>14,}  ({b / max(1, a):.1%})" for name, a, b in rows]
        for name, value in self.metrics.items():
            a = f"{self.metrics_before[name]:.4g}" if name in self.metrics_before else "-"
            lines.append(f"{name:<12} {a:>14} -> {value:>14.4g}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        left = self.after.macs / max(1, self.before.macs)
        return f"Result({left:.1%} of the MACs, {counted(len(self.history), 'event')})"
