"""Charts of the main metric over the share of MACs that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from secateur.results.report.charts import Chart, colour
from secateur.results.report.progress import MANY, SYMBOLS
from secateur.results.report.read import Run
from secateur.results.report.words import drawn, markup, precise, sentence, share

LEGEND = "From left to right: ● Start and Ticks, ◆ epochs of Tocks, ■ epochs of training and fine-tuning, ★ the result."


@dataclass(frozen=True)
class Point:
    """The network after an event, or the result."""

    name: str
    symbol: str
    left: float
    """Percent of the MACs."""
    value: float


def tradeoff_charts(runs: Sequence[Run]) -> list[Chart]:
    """One per metric that is the main one of a run that prunes."""
    metrics = dict.fromkeys(run.main_metric for run in runs if run.prunes and run.main_metric is not None)
    return [_over_macs(runs, name, f"tradeoff-{index}") for index, name in enumerate(metrics)]


def _over_macs(runs: Sequence[Run], metric: str, name: str) -> Chart:
    several = len(runs) > 1
    traces, rows, ends = [], [], []
    for index, run in enumerate(runs):
        points = _points(run, metric) if run.prunes else []
        if not points:
            continue
        traces.append(_line(run, points, metric, index, several))
        rows += [[*([run.name] if several else []), p.name, _percent(p.left), precise(p.value)] for p in points]
        first, last = (f"{precise(p.value)} with {_percent(p.left)} of the MACs" for p in (points[0], points[-1]))
        ends.append(f"{run.name}: {last}" if several else f"From {first} to {last}")
    return Chart(
        id=name,
        title=sentence(f"{metric} over MACs"),
        caption="; ".join(ends) + ".",
        heads=[*(["run"] if several else []), "after", "MACs left", metric],
        rows=rows,
        traces=traces,
        layout={
            "height": 360,
            "xaxis": {"title": {"text": "MACs left"}, "ticksuffix": "%", "autorange": "reversed", "zeroline": False},
            "yaxis": {"title": {"text": markup(metric)}},
            "hovermode": "closest",
            "showlegend": several,
        },
    )


def _points(run: Run, metric: str) -> list[Point]:
    """From the start of pruning on, as far as the metric is known."""
    moments = run.since_start
    whole = run.moments[0].costs["macs"] if run.moments else None
    found = [(m.name, SYMBOLS[m.phase], share(m.costs["macs"], whole), m.metrics.get(metric)) for m in moments]
    if run.finished:
        before, after = run.cost("macs")
        found.append(("Result", "star", share(after, before), run.metric(metric)[1]))
    return [
        Point(name, symbol, 100 * left, value)
        for name, symbol, left, value in found
        if left is not None and value is not None
    ]


def _line(run: Run, points: Sequence[Point], metric: str, index: int, several: bool) -> dict[str, Any]:
    sizes = [14 if point.symbol == "star" else 6 if len(points) < MANY else 0 for point in points]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": markup(run.name),
        "x": drawn([point.left for point in points]),
        "y": drawn([point.value for point in points]),
        "customdata": [markup(point.name) for point in points],
        "line": {"color": colour(index), "width": 2},
        "marker": {
            "symbol": [point.symbol for point in points],
            "size": sizes,
            "opacity": 1,
            "color": colour(index),
            "line": {"width": 0},
        },
        "hovertemplate": f"%{{customdata}}: {markup(metric)} %{{y:.4~g}} with %{{x:.4~g}}% of the MACs"
        f"<extra>{markup(run.name) if several else ''}</extra>",
    }


def _percent(left: float) -> str:
    return f"{left:.4g}%"
