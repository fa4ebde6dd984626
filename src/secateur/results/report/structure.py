"""Charts of the layers: channels before and after, and the percentage removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from secateur.results.report.charts import Chart, colour, layer_axis
from secateur.results.report.read import Run
from secateur.results.report.words import drawn, markup, text
from secateur.results.structure import Layer

WIDTH = 0.86
"""Of all bars of a layer together; 1 leaves no gap."""
MANY = 1000
"""Layers from which on lines are drawn instead of bars, which would be less than a pixel wide and take seconds."""

Placed = list[tuple[int, Run]]
"""Runs with their index among all, which is their colour."""


def structure_charts(runs: Sequence[Run]) -> list[Chart]:
    """Two for every network; runs of the same network share them."""
    networks: dict[tuple[Any, ...], Placed] = {}
    for index, run in enumerate(runs):
        networks.setdefault(tuple((layer.name, layer.before) for layer in run.layers), []).append((index, run))
    charts = []
    for number, placed in enumerate(networks.values()):
        shown = [(index, run) for index, run in placed if run.cut]
        charts += [_channels(shown, number, len(runs) > 1), _percentages(shown, number, len(runs) > 1)]
    return charts


def _channels(shown: Placed, number: int, several: bool) -> Chart:
    """The paper's Appendix E."""
    layers = shown[0][1].layers if shown else []
    outlined = {"color": "--before", "line": {"color": "--quiet", "width": 1}}
    before_each = [layer.before for layer in layers]
    whole = _trace(layers, before_each, "before", "--before", {"width": WIDTH, "marker": outlined})
    after: list[list[float]] = [[layer.after for layer in run.layers] for _, run in shown]
    before = sum(before_each)
    counts = [
        f"{run.name + ': ' if several else ''}{sum(left):,} of {before:,} filters are left"
        for (_, run), left in zip(shown, after, strict=True)
    ]
    return Chart(
        id=f"channels-{number}",
        title="Channels of each layer",
        caption="; ".join(counts) + ", of the layers that could lose some.",
        heads=["layer", "before", *(run.name if several else "after" for _, run in shown)],
        rows=[
            [text(layer.name), str(layer.before), *(str(left[place]) for left in after)]
            for place, layer in enumerate(layers)
        ],
        traces=[whole, *_beside(shown, after, "after", several)] if shown else [],
        layout=_layout(layers, {"title": {"text": "channels"}}),
    )


def _percentages(shown: Placed, number: int, several: bool) -> Chart:
    """The paper's Appendix D."""
    layers = shown[0][1].layers if shown else []
    removed = [[100 * (1 - layer.after / layer.before) for layer in run.layers] for _, run in shown]
    most, name = max(
        ((share, layer.name) for shares in removed for share, layer in zip(shares, layers, strict=True)),
        default=(0.0, ""),
    )
    return Chart(
        id=f"percent-{number}",
        title="Removed of each layer",
        caption=f"Most: {most:.0f}% of {text(name)}.",
        heads=["layer", *(run.name if several else "removed" for _, run in shown)],
        rows=[
            [text(layer.name), *(f"{shares[place]:.1f}%" for shares in removed)] for place, layer in enumerate(layers)
        ],
        traces=_beside(shown, removed, "removed", several, "%"),
        layout=_layout(layers, {"title": {"text": "removed"}, "ticksuffix": "%", "range": [0, 100]}),
    )


def _beside(
    shown: Placed, heights: list[list[float]], word: str, several: bool, unit: str = ""
) -> list[dict[str, Any]]:
    """The runs, within the width of the layer's bar before pruning."""
    width = WIDTH / max(1, len(shown))
    return [
        _trace(
            run.layers,
            values,
            run.name if several else word,
            colour(index),
            {"width": width, "offset": -WIDTH / 2 + place * width, "marker": {"color": colour(index)}},
            unit,
            filled=len(shown) == 1,
        )
        for place, ((index, run), values) in enumerate(zip(shown, heights, strict=True))
    ]


def _trace(
    layers: list[Layer],
    heights: Sequence[float],
    name: str,
    shade: str,
    bars: dict[str, Any],
    unit: str = "",
    filled: bool = True,
) -> dict[str, Any]:
    """Bars, or a line with steps where there are very many layers."""
    line = {"shape": "hvh", "width": 1, "color": shade}
    lines = {"mode": "lines", "line": line, "fill": "tozeroy" if filled else "none", "fillcolor": shade}
    return {
        "name": markup(name),
        "x": [markup(text(layer.name)) for layer in layers],
        "y": drawn(heights),
        "hovertemplate": f"%{{y:.4~g}}{unit}",
        **({"type": "bar", **bars} if len(layers) <= MANY else {"type": "scatter", **lines}),
    }


def _layout(layers: list[Layer], up: dict[str, Any]) -> dict[str, Any]:
    return {
        "barmode": "overlay",
        "hovermode": "x unified",
        "height": 380,
        "xaxis": {**layer_axis([text(layer.name) for layer in layers]), "tickangle": -90, "showgrid": False},
        "yaxis": up,
    }
