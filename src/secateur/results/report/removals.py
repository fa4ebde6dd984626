"""Charts of the filters that each Tick removed, by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from secateur.results.report.charts import Chart, layer_axis, tick_step
from secateur.results.report.read import Moment, Run
from secateur.results.report.words import drawn, markup, text
from secateur.words import counted

ROW = 17
"""Height of a layer in pixels."""
MOST_ROWS = 60
"""Layers from which on the height does not grow."""
MANY_TICKS, MANY_LAYERS = 60, 300
"""From which on there is no gap between them: it would take the place of what it separates."""


Lost = list[dict[str, int]]
"""Filters by layer, of every Tick."""


def removal_charts(runs: Sequence[Run]) -> list[Chart]:
    """One per run: with the same colours in all, and the same rows for runs of the same network."""
    lost = [[_lost(run, moment.removed) for moment in _ticks(run)] for run in runs]
    shares = [_shares(run, each) for run, each in zip(runs, lost, strict=True)]
    most = max((max(tick.values(), default=0.0) for each in shares for tick in each), default=0.0)
    networks = [[(layer.name, layer.before) for layer in run.layers] for run in runs]
    charts = []
    for index, run in enumerate(runs):
        alike = [place for place, network in enumerate(networks) if network == networks[index]]
        ever = {name for place in alike for tick in lost[place] for name in tick}
        # A result alone does not tell which layers are in a group; the layer with the group's name stands for it.
        known = any(runs[place].members for place in alike)
        names = [layer.name for layer in run.layers if known or layer.name in ever]
        names += sorted(ever.difference(names))
        charts.append(_removals(run, index, len(runs) > 1, lost[index], shares[index], names, most))
    return charts


def _removals(
    run: Run, index: int, several: bool, lost: Lost, shares: list[dict[str, float]], names: list[str], most: float
) -> Chart:
    """names: of the rows. most: what has the strongest colour, in percent."""
    ticks, total = _ticks(run), sum(sum(each.values()) for each in lost)
    what = counted(total, "filter" if run.members else "channel")
    shared = "" if run.members else ", by groups of layers that share them,"
    trace = {
        "type": "heatmap",
        "x": [moment.number for moment in ticks],
        "y": [markup(text(name)) for name in names],
        "z": [drawn([each.get(name, 0.0) for each in shares]) for name in names],
        "customdata": [[each.get(name, 0) for each in lost] for name in names],
        # Zero has no colour.
        "colorscale": [[0, "--paper"], [1e-6, "--heat-low"], [1, "--heat-high"]],
        "zmin": 0,
        "zmax": most,
        "xgap": 1 if len(ticks) < MANY_TICKS else 0,
        "ygap": 1 if len(names) < MANY_LAYERS else 0,
        "hovertemplate": "%{y}<br>Tick %{x}: %{customdata} removed, %{z:.3~g}%<extra></extra>",
        "colorbar": {
            "orientation": "h",
            "thickness": 8,
            "y": 1,
            "yanchor": "bottom",
            "ypad": 4,
            "nticks": 5,
            "tickangle": 0,
            "ticksuffix": "%",
            "outlinewidth": 0,
        },
    }
    return Chart(
        id=f"removals-{index}",
        title="Removed by each Tick" + (f": {run.name}" if several else ""),
        caption=f"{what}{shared} in {counted(len(ticks), 'Tick')}. The colour is the share of the layer's filters"
        + (", the same in all runs." if several else "."),
        heads=["after", "removed", "where"],
        rows=[
            [moment.name, str(sum(each.values())), ", ".join(f"{text(name)} {count}" for name, count in each.items())]
            for moment, each in zip(ticks, lost, strict=True)
        ],
        traces=[trace] if total else [],
        layout={
            "height": 130 + max(8, min(MOST_ROWS, len(names))) * ROW,
            "xaxis": {"title": {"text": "Tick"}, "showgrid": False, "zeroline": False, "dtick": tick_step(len(ticks))},
            "yaxis": {**layer_axis([text(name) for name in names]), "autorange": "reversed", "showgrid": False},
        },
    )


def _ticks(run: Run) -> list[Moment]:
    return [moment for moment in run.moments if moment.phase == "Tick"]


def _lost(run: Run, removed: dict[str, int]) -> dict[str, int]:
    """Filters by layer, from channels by group."""
    lost: dict[str, int] = {}
    for group, count in removed.items():
        for layer, each in run.members.get(group, {group: 1}).items():
            lost[layer] = lost.get(layer, 0) + each * count
    return {name: count for name, count in lost.items() if count}


def _shares(run: Run, lost: Lost) -> list[dict[str, float]]:
    """The percentage of the layer that each Tick removed.

    A result alone tells channels, each of which may be several filters; all of them together are what the layer lost.
    """
    layers = {layer.name: layer for layer in run.layers}
    all_lost: Counter[str] = Counter()
    for each in lost:
        all_lost.update(each)
    filters = {
        name: 1.0 if run.members else (layers[name].before - layers[name].after) / count
        for name, count in all_lost.items()
        if name in layers
    }
    return [
        {name: 100 * count * filters[name] / layers[name].before for name, count in each.items() if name in filters}
        for each in lost
    ]
