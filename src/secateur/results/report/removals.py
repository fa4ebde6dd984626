"""Charts of the filters that each Tick removed, by layer."""

from __future__ import annotations

from collections.abc import Sequence

from secateur.results.report.charts import Chart, layer_axis, tick_step
from secateur.results.report.read import Run
from secateur.results.report.words import markup, text
from secateur.words import counted

ROW = 17
"""Height of a layer in pixels."""
MOST_ROWS = 60
"""Layers from which on the height does not grow."""
MANY = 60
"""Ticks from which on there is no gap between them."""


def removal_charts(runs: Sequence[Run]) -> list[Chart]:
    """One per run."""
    return [_removals(run, index, len(runs) > 1) for index, run in enumerate(runs)]


def _removals(run: Run, index: int, several: bool) -> Chart:
    ticks = [moment for moment in run.moments if moment.phase == "Tick"]
    lost = [_lost(run, moment.removed) for moment in ticks]
    total, ever = sum(sum(each.values()) for each in lost), {name for each in lost for name in each}
    # A result alone does not tell which layers are in a group; the layer with the group's name stands for it.
    names = [layer.name for layer in run.layers if run.members or layer.name in ever]
    names += sorted(ever.difference(names))
    what = counted(total, "filter" if run.members else "channel")
    shared = "" if run.members else ", by groups of layers that share them,"
    trace = {
        "type": "heatmap",
        "x": [moment.number for moment in ticks],
        "y": [markup(text(name)) for name in names],
        "z": [[each.get(name, 0) for each in lost] for name in names],
        # Zero has no colour.
        "colorscale": [[0, "--paper"], [1e-6, "--heat-low"], [1, "--heat-high"]],
        "zmin": 0,
        "xgap": 1 if len(ticks) < MANY else 0,
        "ygap": 1,
        "hovertemplate": "%{y}<br>Tick %{x}: %{z} removed<extra></extra>",
        "colorbar": {
            "orientation": "h",
            "thickness": 8,
            "y": 1,
            "yanchor": "bottom",
            "ypad": 4,
            "nticks": 5,
            "tickangle": 0,
            "outlinewidth": 0,
        },
    }
    return Chart(
        id=f"removals-{index}",
        title="Removed by each Tick" + (f": {run.name}" if several else ""),
        caption=f"{what}{shared} in {counted(len(ticks), 'Tick')}: the stronger the colour, the more.",
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


def _lost(run: Run, removed: dict[str, int]) -> dict[str, int]:
    """Filters by layer, from channels by group."""
    lost: dict[str, int] = {}
    for group, count in removed.items():
        for layer, each in run.members.get(group, {group: 1}).items():
            lost[layer] = lost.get(layer, 0) + each * count
    return {name: count for name, count in lost.items() if count}
