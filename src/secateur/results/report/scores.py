"""Charts of the distribution of scores at each Tick, with the threshold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from secateur.results.report.charts import Chart, colour, tick_step
from secateur.results.report.read import Moment, Run
from secateur.results.report.words import drawn, precise

NUM_DECILES = 11
"""With the smallest and the largest score."""
MANY = 60
"""Ticks from which on only lines are drawn."""


def score_charts(runs: Sequence[Run]) -> list[Chart]:
    """One per run."""
    return [_fan(run, index, len(runs) > 1) for index, run in enumerate(runs)]


def _fan(run: Run, index: int, several: bool) -> Chart:
    ticks = [moment for moment in run.moments if len(moment.scores) == NUM_DECILES and None not in moment.scores]
    log, floor = _scale(ticks)
    columns = [[max(floor, score or 0.0) for score in (*moment.scores, moment.threshold)] for moment in ticks]
    across: list[float] = [moment.number for moment in ticks]
    if len(ticks) == 1:
        # A band needs some width to be seen.
        across, columns = [across[0] - 0.4, across[0] + 0.4], columns * 2
    *deciles, threshold = map(list, zip(*columns, strict=True)) if ticks else [[]] * (NUM_DECILES + 1)
    traces = [
        *(_edge(across, decile, place) for place, decile in enumerate(deciles)),
        _line(across, deciles[NUM_DECILES // 2], "median", {"color": colour(index)}),
        _line(across, threshold, "removed below", {"color": "--threshold", "dash": "dash"}),
    ]
    zeros = log and any(score == 0 for moment in ticks for score in moment.scores)
    words = ["smallest", *(f"{10 * d}%" for d in range(1, NUM_DECILES - 1)), "largest"]
    return Chart(
        id=f"scores-{index}",
        title="Spread of the channels' scores" + (f": {run.name}" if several else ""),
        caption="Each shade holds a tenth of the channels; those below the dashed line were removed, as far as the "
        "floors allow." + (" Scores that are zero stand at the lower edge." if zeros else ""),
        heads=["after", *words, "removed below"],
        rows=[[m.name, *map(precise, m.scores), precise(m.threshold)] for m in ticks],
        traces=traces if ticks else [],
        layout={
            "xaxis": {"title": {"text": "Tick"}, "dtick": tick_step(len(ticks))},
            "yaxis": {"title": {"text": "score"}, "type": "log" if log else "linear", "tickformat": "~g"},
            "hovermode": "x",
            "showlegend": True,
        },
    )


def _scale(ticks: Sequence[Moment]) -> tuple[bool, float]:
    """Whether the axis can be logarithmic, and the smallest value that is drawn on it."""
    scores = [score for moment in ticks for score in moment.scores if score is not None]
    positive = [score for score in scores if score > 0]
    log = bool(positive) and min(scores) >= 0
    return log, min(positive) if log else min(scores, default=0.0)


def _edge(across: list[float], values: list[float], place: int) -> dict[str, Any]:
    """A decile; the area down to the previous one has a shade that is strongest in the middle."""
    filled = {"fill": "tonexty", "fillcolor": f"--fan-{min(place, NUM_DECILES - place)}"} if place else {}
    return {
        "type": "scatter",
        "mode": "lines",
        "x": across,
        "y": drawn(values),
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        **filled,
    }


def _line(across: list[float], values: list[float], name: str, style: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(across) < MANY else "lines",
        "name": name,
        "x": across,
        "y": drawn(values),
        "line": {**style, "width": 2},
        "marker": {"size": 5, "color": style["color"]},
        "hovertemplate": f"Tick %{{x:.0f}}: {name} %{{y:.3~g}}<extra></extra>",
    }
