"""The printed form of a channel graph."""

from __future__ import annotations

from secateur.channels.groups import ChannelGraph, ChannelGroup, owner
from secateur.channels.unused import is_within
from secateur.words import counted


def describe(graph: ChannelGraph) -> str:
    """Totals, then the groups that can be cut, the branches that can go, and what stays and why."""
    filters, free = graph.num_filters, graph.num_free_filters
    lines = [
        *_unused(graph),
        f"Input {graph.input}: {quantity(graph.macs)} MACs, {quantity(graph.params)} parameters",
        f"{counted(graph.num_channels, 'channel')} in {counted(len(graph.groups), 'group')} can be removed "
        f"({free:,} of {counted(filters, 'filter')}, {free / max(1, filters):.0%})",
    ]
    if graph.groups:
        macs, params = graph.savings()
        rows = [("group", "channels", "filters each", "MACs each", "params each", "made by")]
        for group in graph.groups:
            rows.append(
                (
                    group.name + ("" if group.exact else " ~"),
                    str(group.size),
                    str(group.filters_per_channel),
                    quantity(float(macs[group.span].mean())),
                    quantity(float(params[group.span].mean())),
                    _layers(group),
                )
            )
        lines += ["", *_columns(rows)]
        if any(not group.exact for group in graph.groups):
            reasons = sorted({str(group.inexact) for group in graph.groups if group.inexact})
            lines += ["", "~ inexact, as requested: removing a channel is not the same as zeroing it"]
            lines += [f"  {reason}" for reason in reasons]
    if graph.branches:
        rows = [("branch", "MACs", "params", "what is left of its block")]
        for branch in graph.branches:
            rest = graph.cost(without=[branch.name])
            saved = quantity(graph.macs - rest.macs), quantity(graph.params - rest.params)
            rows.append((branch.name, *saved, ", ".join(branch.left) or "nothing but its input"))
        lines += ["", *_columns(rows)]
    stays = [frozen for frozen in graph.frozen if not is_within(frozen.name, graph.unused)]
    if stays:
        rows = [("stays", "filters", "why")]
        rows += [(frozen.name, str(frozen.size), str(frozen.reason)) for frozen in stays]
        lines += ["", *_columns(rows)]
    if graph.ungated:
        rows = [("group without a factor", "why"), *((name, str(reason)) for name, reason in graph.ungated.items())]
        lines += ["", *_columns(rows)]
    lines += [f"note: {note}" for note in graph.notes]
    return "\n".join(lines)


def _unused(graph: ChannelGraph) -> list[str]:
    """What never ran, and what to do about it."""
    if not graph.unused:
        return []
    rows = [row for row in graph.sizes if is_within(row.name, graph.unused)]
    layers = len({owner(row.name) for row in rows})
    filters = sum(frozen.size for frozen in graph.frozen if is_within(frozen.name, graph.unused))
    params = sum(row.value(graph.all_kept()) for row in rows)
    return [
        f"Never runs: {counted(layers, 'layer')} with {counted(filters, 'filter')} and {params / graph.params:.0%} of "
        f"the parameters, in {', '.join(graph.unused)}",
        "  if no other input runs them: secateur.drop_unused_(model, graph), then analyse again",
    ]


def quantity(value: float) -> str:
    """A number with a unit.

    >>> quantity(4089184256), quantity(25557032), quantity(512)
    ('4.09 G', '25.56 M', '512')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f}"


def _layers(group: ChannelGroup) -> str:
    layers = group.layers
    return ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    # Names of layers may be numbers too: they come first and last.
    last = len(rows[0]) - 1
    numeric = [0 < i < last and all(row[i][:1].isdigit() for row in rows[1:]) for i in range(last + 1)]
    lines = [
        "  ".join(
            cell.rjust(w) if n else cell.ljust(w) for cell, w, n in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
