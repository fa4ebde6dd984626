"""The report's tables: cards with the numbers that matter, settings, hardware and versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from secateur.results.report.read import COSTS, PHASES, Run
from secateur.results.report.words import brief, number, percent, precise, sentence, share, text
from secateur.runs.settings import TickTock
from secateur.settings import defaults_of
from secateur.training.engine import Engine
from secateur.training.settings import Training
from secateur.words import counted, duration

KINDS = {"prune": TickTock, "train": Training}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One run's value of a measure."""

    before: str = ""
    """Empty if there is no change."""
    after: str
    note: str = ""
    left: float | None = None
    """A share from 0 to 1, drawn as a bar."""


@dataclass(frozen=True)
class Card:
    """One measure of every run."""

    title: str
    lines: list[Line | None]


@dataclass(frozen=True)
class Row:
    """A setting of every run."""

    name: str
    values: list[str]
    default: str = ""
    changed: bool = False
    """Whether some run does not have the default."""
    differs: bool = False
    """Whether the runs have different values."""

    @property
    def marked(self) -> bool:
        return self.changed or self.differs


def make_cards(runs: Sequence[Run]) -> list[Card]:
    """Cards for which at least one run has a value."""
    cards = [Card(sentence(word), [_cost(run, key) for run in runs]) for key, word in COSTS.items()]
    metrics = dict.fromkeys(run.main_metric for run in runs if run.main_metric is not None)
    cards[1:1] = [Card(sentence(name), [_metric(run, name) for run in runs]) for name in metrics]
    cards.append(Card("Latency", [_latency(run) for run in runs]))
    cards.append(Card("Cut checked", [_verification(run) for run in runs]))
    cards.append(Card("Time", [_time(run) for run in runs]))
    return [card for card in cards if any(card.lines)]


def _cost(run: Run, key: str) -> Line | None:
    before, after = run.cost(key)
    if before is None or after is None:
        return None
    if before == after:
        return Line(after=brief(after))
    left = share(after, before)
    return Line(before=brief(before), after=brief(after), note=f"{percent(left)} left", left=left)


def _metric(run: Run, name: str) -> Line | None:
    before, after = run.metric(name)
    if after is None:
        return None
    if before is None:
        return Line(after=precise(after))
    return Line(before=precise(before), after=precise(after), note=f"{after - before:+.3g}")


def _latency(run: Run) -> Line | None:
    before, after = number(run.latency.get("before")), number(run.latency.get("after"))
    if not before or not after:
        return None
    about = {"batch": "batch of ", "device": "", "how": ""}
    said = [f"{word}{text(run.latency[key])}" for key, word in about.items() if key in run.latency]
    return Line(
        before=duration(before),
        after=duration(after),
        note=", ".join([f"{before / after:.2f} times as fast", *said]),
        left=min(1.0, after / before),
    )


def _verification(run: Run) -> Line | None:
    difference, outputs = (number(run.verification.get(key)) for key in ("difference", "outputs"))
    if difference is None or outputs is None:
        return None
    outputs_and_modes = f"{precise(outputs)} outputs ({text(run.verification.get('modes', []))})"
    if run.verification.get("exact") is True:
        said, other = f"agrees to {difference:.0e}" if difference else "agrees exactly", "with the masked network"
    else:
        said, other = f"differs by {difference:.0e}", "from the masked network, inexact by request"
    return Line(after=said, note=f"{other}; relative to the largest of {outputs_and_modes}")


def _time(run: Run) -> Line | None:
    if not run.moments:
        return None
    words = {"Tick": ("Tick", ""), "Tock": ("epoch", " of Tocks")}
    words |= {phase: ("epoch", f" of {PHASES[phase]}") for phase in ("Train", "FineTune")}
    phases = [moment.phase for moment in run.moments]
    said = [counted(phases.count(phase), thing) + rest for phase, (thing, rest) in words.items() if phase in phases]
    return Line(after=duration(sum(moment.seconds for moment in run.moments)), note=", ".join(said))


def make_settings(runs: Sequence[Run]) -> list[Row]:
    """All settings; first those in which the runs differ, then those that are not the default."""
    defaults = {kind: defaults_of(KINDS[kind]) for kind in {run.kind for run in runs} if kind in KINDS}
    rows = _rows([run.settings for run in runs], {k: v for each in defaults.values() for k, v in each.items()})
    rows += _rows([run.engine for run in runs], defaults_of(Engine))
    return sorted(rows, key=lambda row: (not row.differs, not row.changed))


def _rows(found: Sequence[dict[str, Any]], defaults: dict[str, Any]) -> list[Row]:
    rows = []
    for name in dict.fromkeys(name for settings in found for name in settings):
        known = [settings[name] for settings in found if name in settings]
        rows.append(
            Row(
                text(name),
                [text(settings[name]) if name in settings else "-" for settings in found],
                text(defaults[name]) if name in defaults else "-",
                changed=name not in defaults or any(value != defaults[name] for value in known),
                differs=any(value != known[0] for value in known) or len(known) < len(found),
            )
        )
    return rows


def make_facts(runs: Sequence[Run]) -> list[list[str]]:
    """Network, data, machine and versions: a name, and a value of each run."""
    names = dict.fromkeys(name for run in runs for name in run.facts)
    rows = [[name, *(run.facts.get(name, "-") for run in runs)] for name in names]
    return [*rows, ["state", *(run.status for run in runs)]] if rows else []
