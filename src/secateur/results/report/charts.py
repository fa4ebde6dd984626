"""A chart: a plotly figure as plain data, and its numbers as a table.

Colours are variables of the page's style sheet (`--series-1`), so that charts follow light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from secateur.results.report.words import markup

NUM_COLOURS = 12
"""Enough for every score and one of the user's own."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure and its numbers; one without traces is not shown."""

    id: str
    title: str
    caption: str
    """What it shows."""
    heads: list[str]
    rows: list[list[str]]
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    steps: bool = False
    """Whether its axis is the course of the run; such charts are zoomed together."""

    def figure(self) -> dict[str, Any]:
        return {"data": self.traces, "layout": self.layout, "steps": self.steps}


def colour(index: int) -> str:
    """The colour of a run."""
    return f"--series-{index % NUM_COLOURS + 1}"


def layer_axis(names: Sequence[str]) -> dict[str, Any]:
    """An axis with these names; of long ones the end is shown."""
    return {
        "type": "category",
        "labelalias": {markup(name): f"…{markup(name[-19:])}" for name in names if len(name) > 20},
        "unifiedhovertitle": {"text": "%{x}"},
        "tickfont": {"size": 10},
    }


def tick_step(count: int) -> int | None:
    """The step of an axis that counts: 1 while numbers are few, then what plotly chooses."""
    return 1 if count < 12 else None
