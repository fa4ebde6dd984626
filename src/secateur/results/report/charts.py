"""What a chart is: a figure in plotly's terms, as plain data, and its numbers as a table.

Colours are names of the page's style sheet (`--series-1`), which the page replaces: charts follow light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from secateur.results.report.words import markup

NUM_COLOURS = 10
"""Enough for every score beside one of the user's own."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure and its numbers; one without traces is not shown."""

    id: str
    title: str
    caption: str
    """What there is to see, in words."""
    heads: list[str]
    rows: list[list[str]]
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    steps: bool = False
    """Whether it goes along the run; those that do are zoomed together."""

    def figure(self) -> dict[str, Any]:
        return {"data": self.traces, "layout": self.layout, "steps": self.steps}


def colour(index: int) -> str:
    """Of the run with that place."""
    return f"--series-{index % NUM_COLOURS + 1}"


def layer_axis(names: Sequence[str]) -> dict[str, Any]:
    """An axis with these names, of which long ones are shown by their end."""
    return {
        "type": "category",
        "labelalias": {markup(name): f"…{markup(name[-19:])}" for name in names if len(name) > 20},
        "unifiedhovertitle": {"text": "%{x}"},
        "tickfont": {"size": 10},
    }


def tick_step(count: int) -> int | None:
    """Of an axis that counts: whole numbers while they are few, then whatever fits."""
    return 1 if count < 12 else None
