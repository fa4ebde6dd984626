"""How long every layer takes at every width on this device: what the removal of a channel saves."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from secateur.channels.cost import is_kept
from secateur.channels.example import Example
from secateur.channels.groups import ChannelGraph
from secateur.channels.guard import check_module
from secateur.channels.shapes import channels_last as in_memory
from secateur.channels.shrink import copy_model
from secateur.errors import InvalidData, InvalidSetting
from secateur.modes import evaluating
from secateur.timing import captured, time_in_turn, time_kernels
from secateur.words import counted

SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
"""The widths that are measured, as shares of the channels of a layer; the time is interpolated linearly."""
CAPTURED = 10
"""Calls of a layer in one captured graph on a GPU: a single call would measure its launch."""
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
        return sum(layer.at(*_widths(layer, graph, keep)) for layer in self.layers)

    def savings(self, graph: ChannelGraph, keep: Tensor) -> Tensor:
        """The microseconds that the removal of each channel alone would save now."""
        result = torch.zeros(keep.shape, dtype=torch.float64, device="cpu")
        for layer in self.layers:
            inputs, outputs = _widths(layer, graph, keep)
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
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InvalidData(f"this is not a latency table: {error}", remedy="Measure it again") from error


def measure_latency(
    model: nn.Module,
    example: Any,
    *,
    precision: torch.dtype = torch.float32,
    channels_last: bool = False,
    repetitions: int = 10,
    progress: Callable[[str], object] = lambda text: None,
) -> LatencyTable:
    """Time every convolution and linear layer of the model by itself, at several widths, on the model's device.

    On a GPU the rest of the network's time, of norms, activations and sums, is laid on the layers by how much they put
    out. On a CPU it is not: what runs a network there mostly does such things along with the convolutions.
    """
    check_module(model)
    calls = _watch(model, Example.of(example))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    done: dict[object, LayerTable] = {}
    layers = []
    for number, (name, module, shape, _) in enumerate(calls, 1):
        progress(f"layer {number} of {len(calls)}")
        kind = (type(module), module.extra_repr(), shape)
        if kind not in done:
            done[kind] = _measure_layer(module, shape, precision, layout, repetitions)
        table = done[kind]
        layers.append(LayerTable(f"{name}.weight", table.axes, table.inputs, table.outputs, table.microseconds))
    device = next(model.parameters()).device
    if device.type == "cuda" and layers:
        progress("the whole network")
        whole = time_whole(model, example, precision, channels_last, repetitions)
        layers = with_rest(layers, [size for *_, size in calls], whole)
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else counted(torch.get_num_threads(), "thread")
    batch = calls[0][2][0] if calls else 0
    return LatencyTable(f"{place}, batch {batch}, {str(precision).removeprefix('torch.')}", tuple(layers))


def with_rest(layers: list[LayerTable], sizes: list[int], whole: float) -> list[LayerTable]:
    """The layers, with the rest of the network's time added in proportion to the sizes of their outputs."""
    rest = max(0.0, whole - sum(layer.microseconds[-1][-1] for layer in layers)) / sum(sizes)
    result = []
    for layer, size in zip(layers, sizes, strict=True):
        more = [rest * size * outputs / layer.outputs[-1] for outputs in layer.outputs]
        lines = tuple(tuple(a + b for a, b in zip(line, more, strict=True)) for line in layer.microseconds)
        result.append(replace(layer, microseconds=lines))
    return result


def time_whole(
    model: nn.Module, example: Any, precision: torch.dtype, channels_last: bool, repetitions: int = 10
) -> float:
    """Microseconds of a forward pass; on a GPU without the time to launch its kernels."""
    call, device = Example.of(example).to(precision), next(model.parameters()).device
    whole = copy_model(model).eval().to(dtype=precision)._apply(in_memory if channels_last else Tensor.contiguous)
    with torch.inference_mode():
        if device.type == "cuda":
            return 1e6 * time_kernels(lambda: call(whole), device, repetitions)
        return 1e6 * min(time_in_turn({"": lambda: call(whole)}, device, repetitions)[""])


def _watch(model: nn.Module, example: Example) -> list[tuple[str, Any, tuple[int, ...], int]]:
    """Every call of a convolution or linear layer: name, module, shape of the input, size of the output."""
    calls: list[tuple[str, Any, tuple[int, ...], int]] = []

    def note(name: str) -> Callable[[Any, Any, Any, Any], None]:
        def look(module: Any, args: Any, named: Any, output: Any) -> None:
            given, *_ = *args, *named.values()
            calls.append((name, module, tuple(given.shape), output.numel()))

        return look

    handles = [
        module.register_forward_hook(note(name), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, (_ConvNd, nn.Linear))
    ]
    try:
        with evaluating(model):
            example(model)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _measure_layer(
    module: Any, shape: tuple[int, ...], precision: torch.dtype, layout: torch.memory_format, repetitions: int
) -> LayerTable:
    """One layer over a grid of widths; a grouped layer, whose widths change together, along one line."""
    if isinstance(module, nn.Linear):
        inputs, outputs, axes = module.in_features, module.out_features, (1, 0)
    else:
        inputs, outputs = module.in_channels, module.out_channels
        axes = (0, 1) if isinstance(module, _ConvTransposeNd) else (1, 0)
    grouped = getattr(module, "groups", 1) > 1
    # Of a grouped layer the weight's first axis has all channels, the second those of one group.
    known = tuple(None if grouped and axis == 1 else axis for axis in axes)
    down, across = (
        (whole,) if axis is None else tuple(sorted({max(1, round(share * whole)) for share in SHARES}))
        for axis, whole in zip(known, (inputs, outputs), strict=True)
    )
    device = module.weight.device
    calls: dict[tuple[int, int], Callable[[], object]] = {}
    for a, b in product(down, across):
        share = min(a / inputs, b / outputs)
        widths = (round(share * inputs) or 1, round(share * outputs) or 1) if grouped else (a, b)
        calls[a, b] = _layer(module, *widths, shape, precision, layout)
    times = 1
    if device.type == "cuda":
        times, calls = CAPTURED, {widths: captured(call, device, CAPTURED) for widths, call in calls.items()}
    seconds = time_in_turn(calls, device, repetitions)
    # Whatever else the machine does only adds time, so the shortest is nearest to the truth; and fewer channels never
    # take more of it.
    table = [[1e6 * min(seconds[a, b]) / times for b in across] for a in down]
    for line in table:
        for left, right in reversed(list(pairwise(range(len(line))))):
            line[left] = min(line[left], line[right])
    for upper, lower in reversed(list(pairwise(table))):
        upper[:] = [min(a, b) for a, b in zip(upper, lower, strict=True)]
    return LayerTable("", (known[0], known[1]), down, across, tuple(tuple(line) for line in table))


def _layer(
    module: Any,
    inputs: int,
    outputs: int,
    shape: tuple[int, ...],
    precision: torch.dtype,
    layout: torch.memory_format,
) -> Callable[[], object]:
    """A layer like this one with other widths, and an input for it."""
    device = module.weight.device
    options = {"device": device, "dtype": precision, "bias": module.bias is not None}
    if isinstance(module, nn.Linear):
        layer: nn.Module = nn.Linear(inputs, outputs, **options)
        images = torch.randn(*shape[:-1], inputs, device=device, dtype=precision)
    else:
        groups = 1
        if module.groups > 1:
            groups = max(1, round(module.groups * outputs / module.out_channels))
            outputs = groups * (module.out_channels // module.groups)
            inputs = groups * (module.in_channels // module.groups)
        kind = next(base for base in type(module).__mro__ if base.__module__ == "torch.nn.modules.conv")
        given = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation, "groups": groups}
        layer = kind(inputs, outputs, module.kernel_size, **given, **options)
        images = torch.randn(shape[0], inputs, *shape[2:], device=device, dtype=precision)
        if images.dim() == 4:
            layer.to(memory_format=layout)  # pyright: ignore
            images = images.contiguous(memory_format=layout)

    def call() -> None:
        with torch.inference_mode():
            layer(images)

    return call


def _widths(layer: LayerTable, graph: ChannelGraph, keep: Tensor) -> tuple[int, int]:
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
