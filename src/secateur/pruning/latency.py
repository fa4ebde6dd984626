"""How long every layer takes at every width on this device: what the removal of a channel saves."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.channels.cost import is_kept
from secateur.channels.groups import ChannelGraph
from secateur.errors import InvalidData, InvalidSetting

SMALLEST_SAVING = 1e-3
"""Microseconds that a channel saves at least, where none can be measured."""


@dataclass(frozen=True)
class LayerTable:
    """Microseconds of one layer by the number of its inputs and outputs."""

    name: str
    """Of the layer's weight."""
    axes: tuple[int | None, int | None]
    """The axes of the weight for inputs and outputs; None for one that follows the other, as in depthwise layers."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    microseconds: tuple[tuple[float, ...], ...]
    """A row for each number of inputs."""

    def at(self, inputs: float, outputs: float) -> float:
        """Interpolated between the four nearest widths."""
        row, down = _place(self.inputs, inputs)
        column, right = _place(self.outputs, outputs)
        table = self.microseconds
        ends = [
            (1 - right) * line[column] + right * line[min(column + 1, len(line) - 1)]
            for line in (table[row], table[min(row + 1, len(table) - 1)])
        ]
        return (1 - down) * ends[0] + down * ends[1]


@dataclass(frozen=True)
class LatencyTable:
    """The convolutions and linear layers of one network on one device; on a GPU with a share of all other operators."""

    where: str
    """Device, batch, number format."""
    layers: tuple[LayerTable, ...]

    def check(self, graph: ChannelGraph) -> None:
        """Raise if this is the table of another network."""
        # Weights that are computed, or have another name too, are not in the graph.
        known = [layer for layer in self.layers if layer.name in graph.shapes]
        problem = "no layer in common" if self.layers and not known else ""
        for layer in known:
            shape = graph.shapes[layer.name]
            for axis, whole in zip(layer.axes, (layer.inputs[-1], layer.outputs[-1]), strict=True):
                if axis is not None and shape[axis] != whole:
                    problem = problem or f"{layer.name} of width {whole} instead of {shape[axis]}"
        if problem:
            remedy = "Measure this network with measure_latency(model, example)"
            raise InvalidSetting("the latency table is of another network", got=problem, remedy=remedy)

    def value(self, graph: ChannelGraph, keep: Tensor) -> float:
        """Microseconds of all layers when only these channels are kept."""
        gone = graph.tensors_of(graph.without(keep))
        return sum(layer.at(*widths_of(layer, graph, keep)) for layer in self.layers if layer.name not in gone)

    def savings(self, graph: ChannelGraph, keep: Tensor) -> Tensor:
        """The microseconds that the removal of each channel alone would save now."""
        result = torch.zeros(keep.shape, dtype=torch.float64, device="cpu")
        gone = graph.tensors_of(graph.without(keep))
        for layer in self.layers:
            if layer.name in gone:
                continue
            inputs, outputs = widths_of(layer, graph, keep)
            now = layer.at(inputs, outputs)
            fewer = (layer.at(inputs - 1, outputs), layer.at(inputs, outputs - 1))
            for axis, less in zip(layer.axes, fewer, strict=True):
                channels = graph.axes.get((layer.name, axis)) if axis is not None else None
                if channels is not None:
                    here = channels[(channels >= 0) & is_kept(channels, keep)]
                    result.index_add_(0, here, torch.full(here.shape, max(0.0, now - less), dtype=torch.float64))
        return result.clamp_min(SMALLEST_SAVING)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "format": "secateur-latency",
            "version": 1,
            "where": self.where,
            "layers": [vars(x) for x in self.layers],
        }

    @classmethod
    def from_dict(cls, data: Any) -> LatencyTable:
        """What `to_dict` has given."""
        try:
            if (data["format"], data["version"]) != ("secateur-latency", 1):
                raise ValueError("it is of another format or version")
            layers = [
                LayerTable(
                    str(row["name"]),
                    (row["axes"][0], row["axes"][1]),
                    tuple(map(int, row["inputs"])),
                    tuple(map(int, row["outputs"])),
                    tuple(tuple(map(float, line)) for line in row["microseconds"]),
                )
                for row in data["layers"]
            ]
            if any(
                len(x.microseconds) != len(x.inputs) or {len(line) for line in x.microseconds} != {len(x.outputs)}
                for x in layers
            ):
                raise ValueError("a row does not have a number for each width")
            return cls(str(data["where"]), tuple(layers))
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise InvalidData(f"this is not a latency table: {error}", remedy="Measure it again") from error


def widths_of(layer: LayerTable, graph: ChannelGraph, keep: Tensor) -> tuple[int, int]:
    """How many inputs and outputs are left of a layer."""
    counts = []
    for axis, whole in zip(layer.axes, (layer.inputs[-1], layer.outputs[-1]), strict=True):
        channels = graph.axes.get((layer.name, axis)) if axis is not None else None
        counts.append(whole if channels is None else int(is_kept(channels, keep).sum()))
    return counts[0], counts[1]


def _place(grid: tuple[int, ...], value: float) -> tuple[int, float]:
    """The grid point below the value, and how far it is from there to the next; extrapolated below the first."""
    index = max(0, min(bisect_right(grid, value) - 1, len(grid) - 2))
    if len(grid) == 1:
        return 0, 0.0
    return index, (value - grid[index]) / (grid[index + 1] - grid[index])
