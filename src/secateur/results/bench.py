"""Time networks, and compare them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn

from secateur.channels.analyze import analyze
from secateur.channels.cost import Cost
from secateur.channels.example import Example
from secateur.channels.shapes import channels_last as in_memory
from secateur.errors import InvalidSetting
from secateur.modes import evaluating
from secateur.results.network import open_network
from secateur.results.summary import device_name
from secateur.timing import captured, time_in_turn

Runner = Literal["eager", "captured", "compiled", "onnxruntime", "onnxruntime-int8", "openvino", "ncnn", "executorch"]
IN_TORCH = "eager", "captured", "compiled"
"""Runners that can use a GPU, and any precision."""
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST = 10**6
"""Images at a time, and repetitions: more is a mistake."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one forward pass of a whole batch."""

    name: str
    batch: int
    median: float
    p90: float
    spread: float
    """Half the distance between the quartiles, as a share of the median."""
    macs: int
    params: int

    @property
    def throughput(self) -> float:
        """Images per second."""
        return self.batch / self.median

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "throughput": self.throughput}


def latency(
    models: dict[str, nn.Module], example: Any, repetitions: int = 30, patience: float = 5.0
) -> dict[str, float]:
    """Median seconds of one forward pass of each; three repetitions are enough after `patience` seconds."""
    call = Example.of(example)
    device = call.tensors[0].device if call.tensors else torch.device("cpu")
    calls = {name: partial(call, model) for name, model in models.items()}
    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(evaluating(model))
        seconds = time_in_turn(calls, device, repetitions, patience)
    return {name: statistics.median(values) for name, values in seconds.items()}


def bench(
    names: Sequence[str],
    *,
    batch: int,
    shape: tuple[int, ...] | None,
    how: Runner,
    precision: str,
    channels_last: bool,
    repetitions: int,
    device: torch.device,
    build: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[list[Timing], str]:
    """Time networks by name; also returns the name of the device."""
    if not (1 <= batch <= MOST and 2 <= repetitions <= MOST):
        got = f"batch {batch} and repetitions {repetitions}"
        raise InvalidSetting("networks cannot be timed", got=got, wanted="1 to a million, and 2 to a million")
    calls: dict[str, Callable[[], object]] = {}
    costs: dict[str, Cost] = {}
    laid_out = in_memory if channels_last else Tensor.contiguous
    first = None
    for name in names:
        say(name)
        model, example = open_network(name, build, shape)
        call = Example.of(example)
        size = ", ".join("x".join(map(str, tensor.shape[1:])) for tensor in call.tensors)
        first = first or size
        if size != first:
            got, wanted = f"{size} of {name}", f"{first} of {names[0]}"
            raise InvalidSetting("the inputs differ", got=got, wanted=wanted, remedy="Give one shape for all")
        costs[name] = analyze(model, call.batch(1), probe=False).cost()
        model.to(device, PRECISIONS[precision])._apply(laid_out)
        drawn = call.batch(batch, torch.Generator().manual_seed(0)).on(device).to(PRECISIONS[precision])
        calls[name] = runner(model, drawn.map(laid_out), how)
    say("in turn")
    seconds = time_in_turn(calls, device, repetitions)
    timings = [summarize(name, seconds[name], batch, costs[name]) for name in calls]
    return timings, device_name(device)


def runner(model: nn.Module, example: Any, how: Runner) -> Callable[[], object]:
    """A function that runs one forward pass in that way."""
    call = Example.of(example)
    if how not in IN_TORCH:
        return _in_runtime(model, call, how)
    device = call.tensors[0].device
    if how == "captured" and device.type != "cuda":
        raise InvalidSetting("a forward pass can be captured as a CUDA graph only", got=device, wanted="a CUDA device")
    called: Any = torch.compile(model) if how == "compiled" else model

    def run() -> None:
        with torch.inference_mode():
            call(called)

    return captured(run, device) if how == "captured" else run


def _in_runtime(model: nn.Module, call: Example, how: Runner) -> Callable[[], object]:
    """Export the network, and run it in another runtime."""
    from secateur.results import runtimes
    from secateur.results.export import export_onnx, open_onnx
    from secateur.results.quantize import export_roughly_int8

    if any(t.device.type != "cpu" or t.dtype in (torch.bfloat16, torch.float16) for t in call.tensors):
        got = f"{call.tensors[0].device}, {call.tensors[0].dtype}".replace("torch.", "")
        remedy = "Choose the device cpu and the precision fp32"
        raise InvalidSetting(f"{how} runs on a CPU in single precision here", got=got, remedy=remedy)
    write, read = {
        "onnxruntime": (export_onnx, open_onnx),
        "onnxruntime-int8": (export_roughly_int8, open_onnx),
        "openvino": (runtimes.export_openvino, runtimes.open_openvino),
        "ncnn": (runtimes.export_ncnn, runtimes.open_ncnn),
        "executorch": (runtimes.export_executorch, runtimes.open_executorch),
    }[how]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "network.xml"
        write(model, call.batch(1), path)
        network = read(path)
    return partial(network, call)


def summarize(name: str, seconds: list[float], batch: int, cost: Cost) -> Timing:
    """The statistics of one network's times."""
    median = statistics.median(seconds)
    ordered = sorted(seconds)
    p90 = ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))]
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (median, median, median)
    return Timing(name, batch, median, p90, (high - low) / 2 / median, cost.macs, cost.params)


def table(timings: list[Timing]) -> str:
    """A table of networks, compared with the first."""
    first = timings[0]
    wide = max(7, *(len(timing.name) for timing in timings))
    heads = f"{'MACs':>9} {'params':>9} {'median ms':>10} {'p90 ms':>9} {'images/s':>9} {'faster':>7} {'spread':>7}"
    rows = [
        f"{t.name:<{wide}} {t.macs / 1e6:>8.1f}M {t.params / 1e6:>8.2f}M {1000 * t.median:>10.2f} {1000 * t.p90:>9.2f} "
        f"{t.throughput:>9.0f} {first.median / t.median:>6.2f}x {t.spread:>6.0%}"
        for t in timings
    ]
    return "\n".join([f"{'network':<{wide}} {heads}", *rows, *_remarks(timings)])


def _remarks(timings: list[Timing]) -> list[str]:
    """Advice for networks that are smaller than the first but not faster."""
    first = timings[0]
    slow = [t for t in timings if t.macs < first.macs and t.median >= first.median]
    return [
        f"\n{t.name} has {t.macs / first.macs:.0%} of the MACs of {first.name} and is not faster here. If this is the "
        "batch size that counts, prune with multiple_of=8, since GPUs are slow at odd widths, or with keep_latency"
        for t in slow
    ]
