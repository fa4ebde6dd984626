"""Charts along the run: metrics, loss, and the share of the network that is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from secateur.results.report.charts import Chart, colour, tick_step
from secateur.results.report.read import COUNTED, PHASES, Moment, Run
from secateur.results.report.words import drawn, markup, precise, sentence, share

SYMBOLS = {"Start": "circle", "Train": "square", "Tick": "circle", "Tock": "diamond", "FineTune": "square"}
DASHES = ("solid", "dash", "dot", "dashdot")
MANY = 150
"""Points from which on only the line is drawn."""

Value = Callable[[Run, Moment], float | None]


def progress_charts(runs: Sequence[Run]) -> list[Chart]:
    """One per metric, one of the loss, and of the cost if a run prunes."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics if name != "loss"))
    charts = [
        _along(runs, f"metric-{index}", name, {name: lambda run, moment, name=name: moment.metrics.get(name)})
        for index, name in enumerate(names)
    ]
    return [*charts, _loss(runs), *_costs(runs)]


def _loss(runs: Sequence[Run]) -> Chart:
    values: dict[str, Value] = {"training loss": lambda run, moment: moment.loss}
    if any("loss" in run.metrics for run in runs):
        values = {"test loss": lambda run, moment: moment.metrics.get("loss"), **values}
    return _along(runs, "loss", "loss", values)


def _costs(runs: Sequence[Run]) -> list[Chart]:
    """The cost of runs that prune. Several are compared by one measure in each chart: three lines each are too many."""
    budgets = {run.budget[0] for run in runs if run.budget is not None}
    keys = [key for key in COUNTED if key != "latency" or key in budgets]
    if not any(run.prunes for run in runs):
        return []
    if len(runs) == 1:
        return [_cost(runs, "cost", "what is left of the network", keys)]
    compared = [key for key in keys if key == "macs" or key in budgets]
    return [_cost(runs, "cost" if key == "macs" else f"cost-{key}", f"{COUNTED[key]} left", [key]) for key in compared]


def _cost(runs: Sequence[Run], name: str, title: str, keys: Sequence[str]) -> Chart:
    values: dict[str, Value] = {
        COUNTED[key]: lambda run, moment, key=key: _left(run, moment, key) if run.prunes else None for key in keys
    }
    return _along(runs, name, title, values, unit="%", budgets=_budgets(runs, keys))


def _left(run: Run, moment: Moment, key: str) -> float | None:
    """In percent."""
    left = moment.time_left if key == "latency" else share(moment.costs[key], run.moments[0].costs[key])
    return None if left is None else 100 * left


def _budgets(runs: Sequence[Run], keys: Sequence[str]) -> list[dict[str, Any]]:
    """A line across for each budget, in the colour of what it is the budget of; grey if that is several runs."""
    shades: dict[tuple[str, float], list[str]] = {}
    for index, run in enumerate(runs):
        if run.budget is not None and run.budget[0] in keys:
            place = index if len(runs) > 1 else keys.index(run.budget[0])
            shades.setdefault(run.budget, []).append(colour(place))
    return [
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": 100 * stays,
            "y1": 100 * stays,
            "line": {"color": of[0] if len(of) == 1 else "--quiet", "width": 1.5, "dash": "dot"},
            "name": f"budget: {100 * stays:.4g}% of the {COUNTED[key]}",
            "showlegend": True,
        }
        for (key, stays), of in shades.items()
    ]


def _along(
    runs: Sequence[Run],
    name: str,
    title: str,
    values: dict[str, Value],
    unit: str = "",
    budgets: Sequence[dict[str, Any]] = (),
) -> Chart:
    """Lines through the moments of the runs: a colour per run, or per value of a single run; a symbol per phase.

    budgets: lines across, with their names.
    """
    several = len(runs) > 1
    traces, rows, ends = [], [], []
    for index, run in enumerate(runs):
        lines = {word: [value(run, moment) for moment in run.moments] for word, value in values.items()}
        for place, (word, line) in enumerate(lines.items()):
            known = [precise(y) + unit for y in line if y is not None]
            if not known:
                continue
            said = word if not several else run.name if len(values) == 1 else f"{run.name}: {word}"
            traces.append(
                {
                    **_trace(run, line, colour(index if several else place), DASHES[place]),
                    "name": markup(said),
                    "hovertemplate": f"%{{customdata}}: {markup(word)} %{{y:.4~g}}{unit}"
                    f"<extra>{markup(run.name) if several else ''}</extra>",
                }
            )
            ends.append(f"{said} from {known[0]} to {known[-1]}")
        for moment, *numbers in zip(run.moments, *lines.values(), strict=True):
            cells = [precise(y) + (unit if y is not None else "") for y in numbers]
            rows.append([*([run.name] if several else []), moment.name, *cells])
    if several and len(values) > 1:
        ends = [f"{style}: {word}" for style, word in zip(("solid", "dashed"), values, strict=False)]
    ends += [budget["name"] for budget in budgets]
    longest = max(len(run.moments) for run in runs)
    across = "Ticks and epochs" if any(run.prunes for run in runs) else "epochs"
    return Chart(
        id=name,
        title=sentence(title),
        caption=("; ".join(ends) if several else sentence("; ".join(ends))) + ".",
        heads=[*(["run"] if several else []), "after", *values],
        rows=rows,
        traces=traces,
        layout={
            "height": 300 + 9 * max(0, len(traces) + len(budgets) - 3),  # the legend takes room
            "xaxis": {"title": {"text": across}, "zeroline": False, "dtick": tick_step(longest)},
            "yaxis": {"ticksuffix": unit, "rangemode": "tozero" if unit else "normal"},
            "hovermode": "x",
            "showlegend": True,
            "shapes": [*(_endings(runs) if several else _phases(runs[0])), *budgets],
        },
        steps=True,
    )


def _trace(run: Run, line: list[float | None], shade: str, dash: str) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines",
        "x": list(range(len(line))),
        "y": drawn(line),
        "customdata": [markup(moment.name) for moment in run.moments],
        "line": {"color": shade, "dash": dash, "width": 2},
        "connectgaps": True,
    }
    if len(line) < MANY:
        symbols = [SYMBOLS[moment.phase] for moment in run.moments]
        trace |= {"mode": "lines+markers", "marker": {"symbol": symbols, "size": 6, "color": shade}}
    return trace


def _phases(run: Run) -> list[dict[str, Any]]:
    """A band behind each phase. Those of a kind are one shape: thousands of shapes would take seconds to draw."""
    bands: dict[str, str] = {}
    for phase, group in groupby(enumerate(run.moments), key=lambda pair: pair[1].phase):
        places = [place for place, _ in group]
        if phase != "Start":
            start, end = places[0] - 0.5, places[-1] + 0.5
            bands[phase] = f"{bands.get(phase, '')}M{start},0H{end}V1H{start}Z"
    return [
        {
            "type": "path",
            "layer": "below",
            "xref": "x",
            "yref": "paper",
            "path": path,
            "line": {"width": 0},
            "fillcolor": f"--band-{phase.lower()}",
            "name": PHASES[phase],
            "showlegend": True,
        }
        for phase, path in bands.items()
    ]


def _endings(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A line in the run's colour where its pruning ends; bands of several runs would hide each other."""
    lines = []
    for index, run in enumerate(runs):
        ticks = [place for place, moment in enumerate(run.moments) if moment.phase == "Tick"]
        if ticks and run.moments[-1].phase == "FineTune":
            where = {"xref": "x", "yref": "paper", "x0": ticks[-1] + 0.5, "x1": ticks[-1] + 0.5, "y0": 0, "y1": 1}
            lines.append({"type": "line", "line": {"color": colour(index), "width": 1, "dash": "dot"}, **where})
    return lines
