"""Measure how long every layer takes at every width on a device, and networks of several widths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from secateur.channels.analyze import analyze
from secateur.channels.example import Example
from secateur.channels.groups import ChannelGraph
from secateur.channels.guard import check_module
from secateur.channels.plan import Plan
from secateur.channels.shapes import channels_last as in_memory
from secateur.channels.shrink import copy_model, shrink
from secateur.modes import evaluating
from secateur.pruning.calibration import calibrated
from secateur.pruning.latency import LatencyTable, LayerTable
from secateur.pruning.settings import Limits, Multiple
from secateur.timing import captured, time_in_turn, time_kernels
from secateur.words import counted

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""The widths that are measured, as shares of the channels of a layer; the time is interpolated linearly."""
CAPTURED = 10
"""Calls of a layer in one captured graph on a GPU: a single call would measure its launch."""

Run = Callable[[nn.Module, Example], Callable[[], object]]
"""From a network and its input to a function that runs it once."""


def measure_latency(
    model: nn.Module,
    example: Any,
    *,
    precision: torch.dtype = torch.float32,
    channels_last: bool = False,
    repetitions: int = 10,
    run: Run | None = None,
    graph: ChannelGraph | None = None,
    multiple_of: Multiple = "auto",
    progress: Callable[[str], object] = lambda text: None,
) -> LatencyTable:
    """Time every convolution and linear layer of the model by itself, at several widths, on the model's device.

    Networks of several widths are then timed whole, and the layers are scaled so that their sums are those times:
    layers by themselves do not show what norms, activations and sums take, and what runs the network may fuse them.

    run: how the network is to run; from a network and its input to a function that does so once. Without it, as it is;
        on a GPU without the time to launch its kernels.
    graph: the analysis of the model, if you have it.
    multiple_of: that of the limits that the network will be pruned with: networks timed whole have such widths.
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
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else counted(torch.get_num_threads(), "thread")
    batch = calls[0][2][0] if calls else 0
    table = LatencyTable(f"{place}, batch {batch}, {str(precision).removeprefix('torch.')}", tuple(layers))
    if not layers:
        return table
    graph = graph or analyze(model, example, probe=False)
    kinds, sizes = [_kind(module) for _, module, _, _ in calls], [size for *_, size in calls]

    def time(plan: Plan) -> float:
        progress(f"the whole network, {plan.cost.macs / max(1, plan.graph.macs):.0%} of its MACs")
        return time_whole(shrink(model, plan), example, precision, channels_last, repetitions, run)

    macs = [module.weight[0].numel() * size for _, module, _, size in calls]
    return calibrated(table, graph, kinds, sizes, macs, time, Limits(multiple_of=multiple_of).on(device.type).multiple)


def _kind(module: Any) -> str:
    if isinstance(module, nn.Linear):
        return "linear"
    if module.groups > 1:
        return "grouped"
    return "pointwise" if all(side == 1 for side in module.kernel_size) else "convolution"


def time_whole(
    model: nn.Module,
    example: Any,
    precision: torch.dtype,
    channels_last: bool,
    repetitions: int = 10,
    run: Run | None = None,
) -> float:
    """The fewest microseconds of a forward pass; on a GPU without the time to launch its kernels."""
    return 1e6 * min(time_networks({"": model}, example, precision, channels_last, repetitions, run)[""])


def time_networks(
    models: Mapping[str, nn.Module],
    example: Any,
    precision: torch.dtype,
    channels_last: bool,
    repetitions: int = 30,
    run: Run | None = None,
    patience: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds of forward passes of each, in turn; on a GPU without the time to launch kernels.

    run: as of `measure_latency`. patience: as of `time_in_turn`.
    """
    first = next(iter(models.values()))
    call, device = Example.of(example).to(precision), next(first.parameters()).device
    layout = in_memory if channels_last else Tensor.contiguous
    laid_out = {name: copy_model(m).eval().to(dtype=precision)._apply(layout) for name, m in models.items()}
    if run is not None:
        return time_in_turn({name: run(m, call) for name, m in laid_out.items()}, device, repetitions, patience)
    calls = {name: partial(call, m) for name, m in laid_out.items()}
    with torch.inference_mode():
        if device.type == "cuda":
            return {name: time_kernels(each, device, repetitions) for name, each in calls.items()}
        return time_in_turn(calls, device, repetitions, patience)


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
    device, times = module.weight.device, CAPTURED if module.weight.device.type == "cuda" else 1
    table = []
    for inputs_left in down:  # all at once would take much memory
        calls: dict[int, Callable[[], object]] = {}
        for outputs_left in across:
            share = min(inputs_left / inputs, outputs_left / outputs)
            grouped_widths = round(share * inputs) or 1, round(share * outputs) or 1
            widths = grouped_widths if grouped else (inputs_left, outputs_left)
            call = _layer(module, *widths, shape, precision, layout)
            calls[outputs_left] = captured(call, device, times) if device.type == "cuda" else call
        # Whatever else the machine does only adds time, so the shortest is nearest to the truth.
        seconds = time_in_turn(calls, device, repetitions)
        table.append([1e6 * min(seconds[outputs_left]) / times for outputs_left in across])
    if device.type != "cuda":
        # Times on a CPU are noisy, and the widths that a budget chooses would be the lucky ones: fewer channels never
        # take more time.
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
