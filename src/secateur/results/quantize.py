"""Quantise a network to INT8 with calibration images, by onnxruntime, and measure what that changes."""

from __future__ import annotations

import logging
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn

from secateur.channels.example import Example
from secateur.errors import InvalidModel, NotEquivalent
from secateur.extras import import_extra
from secateur.files import write_atomic
from secateur.modes import evaluating
from secateur.pruning.repair import gather
from secateur.randomness import seeded
from secateur.results.export import BATCHES, export_onnx, feed, fold_batchnorm, input_names, open_onnx
from secateur.timing import time_in_turn
from secateur.training.batches import reseed, unaugmented
from secateur.training.task import Task
from secateur.words import digits

Method = Literal["minmax", "entropy", "percentile"]
METHODS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}
"""How a range is chosen from the values that calibration images give; the names in onnxruntime."""
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators with weights."""
AT_ONCE = 32
"""Images in a batch of calibration: what all layers give for them is in memory."""
TOLERATED = 1.0
"""Points of accuracy, or of agreement where there are no labels, that a network may lose without a warning."""


@dataclass(frozen=True)
class Quantized:
    """What quantisation changed."""

    before: dict[str, float]
    """Metrics of the task through onnxruntime; none without labels."""
    after: dict[str, float]
    agreement: float
    """Percent of the images, or pixels, that get the class that the unquantised network gives them."""
    seconds_before: float
    """The median of one image."""
    seconds_after: float
    bytes_before: int
    bytes_after: int
    images: int
    """Calibration images."""
    weight_bits: int = 8

    @property
    def lost(self) -> float:
        """Points of the first metric, where a higher one is better; else of agreement."""
        name = next(iter(self.before), None)
        return self.before[name] - self.after[name] if name in ("accuracy", "miou") else 100 - self.agreement

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "lost": self.lost}

    def __str__(self) -> str:
        rows = [("", "before", "INT8")]
        rows += [(name, digits(self.before[name]), digits(self.after[name])) for name in self.before]
        rows += [
            ("ms per image", f"{1000 * self.seconds_before:.3f}", f"{1000 * self.seconds_after:.3f}"),
            ("file, kB", f"{self.bytes_before / 1000:.0f}", f"{self.bytes_after / 1000:.0f}"),
        ]
        lines = [f"{name:<14}{before:>12}{after:>12}" for name, before, after in rows]
        lines.append(f"{self.agreement:.2f}% get the same class; {self.images} calibration images")
        if self.weight_bits < 8:
            lines.append(
                f"weights have {self.weight_bits} bits: this CPU has no VNNI, and sums of larger ones overflow"
            )
        if self.lost > TOLERATED:
            lines.append(
                f"warning: quantisation costs {self.lost:.2f} points. Use more calibration images or another method, "
                "or leave the first and the last layer out"
            )
        return "\n".join(lines)


def export_int8(
    model: nn.Module,
    example: Any,
    task: Task,
    path: str | Path,
    *,
    images: int = 512,
    method: Method = "minmax",
    skip: Sequence[str] = (),
    seed: int = 0,
    metadata: Mapping[str, str] | None = None,
    say: Callable[[str], object] = lambda step: None,
) -> Quantized:
    """Write the network as ONNX in INT8, and compare it with the unquantised one in onnxruntime.

    Batch norms are folded first. Weights have a scale for every output channel, activations one for all.

    images: training images that choose the ranges of activations, without augmentation.
    skip: layers that stay in single precision: "first", "last".
    metadata: as of `export_onnx`.
    """
    call = Example.of(example)
    with evaluating(model):
        _check_kind(model, call)
    model, _ = fold_batchnorm(model, call)
    with TemporaryDirectory() as folder:
        whole, small = Path(folder) / "whole.onnx", Path(folder) / "small.onnx"
        say("onnx")
        export_onnx(model, call, whole, metadata)
        say("calibrating")
        with seeded(seed):
            inputs = gather(map(task.inputs, unaugmented(reseed(task.train, seed))), call, images)
        quantize_file(whole, small, inputs, method, skip)
        before, after = OnnxNetwork(whole), OnnxNetwork(small)
        _check_batches(after, before, call)
        say("testing")
        pair = Pair(before, after)
        metrics = (task.metrics(before), task.metrics(pair)) if task.labelled else ({}, {})
        if not pair.total:
            for batch in unaugmented(task.train):
                for each in gather([task.inputs(batch)], call, sys.maxsize):
                    each(pair)
        agreement = 100 * pair.same / pair.total
        if agreement < 50:
            raise NotEquivalent(
                "the quantised network is another one",
                got=f"the same class for {agreement:.0f}% of the images",
                wanted="most of them",
                remedy="Try another method, or leave the first and the last layer out",
            )
        say("timing")
        calls = {name: partial(call.batch(1), network) for name, network in (("before", before), ("after", after))}
        seconds = time_in_turn(calls, torch.device("cpu"), 30)
        write_atomic(path, small.read_bytes())
        return Quantized(
            *metrics,
            agreement,
            *(statistics.median(values) for values in seconds.values()),
            bytes_before=whole.stat().st_size,
            bytes_after=small.stat().st_size,
            images=sum(each.size for each in inputs),
            weight_bits=7 if overflows() else 8,
        )


def overflows() -> bool:
    """Whether this CPU adds two products in 16 bits, which is too few for weights of 8: x86 without VNNI."""
    known = getattr(torch.cpu, "_is_vnni_supported", lambda: False)
    return platform.machine().lower() in ("x86_64", "amd64") and not known()


def export_roughly_int8(model: nn.Module, example: Any, path: str | Path) -> None:
    """Write ONNX in INT8 with ranges from random inputs: as fast as any other, but not accurate."""
    call = Example.of(example)
    model, _ = fold_batchnorm(model, call)
    with TemporaryDirectory() as folder:
        export_onnx(model, call, Path(folder) / "whole.onnx")
        inputs = [call.batch(4, torch.Generator().manual_seed(0))]
        quantize_file(Path(folder) / "whole.onnx", Path(path), inputs, "minmax")


def quantize_file(
    source: Path, target: Path, inputs: Sequence[Example], method: Method, skip: Sequence[str] = ()
) -> None:
    """Quantise an ONNX file: what each layer gives gets a range from calibration inputs."""
    onnx, runtime = import_extra("onnx", "export"), import_extra("onnxruntime", "export")
    tool = import_extra("onnxruntime.quantization", "export")
    batches = [part for each in inputs for part in _parts(each)]
    session = runtime.InferenceSession(str(source), providers=["CPUExecutionProvider"])

    class Reader(tool.CalibrationDataReader):
        """Batches one by one, so that what layers give for one of them is in memory, not for all."""

        def __len__(self) -> int:
            return len(batches)

        def set_range(self, start_index: int, end_index: int) -> None:
            self.left = iter(batches[start_index:end_index])

        def get_next(self) -> dict[str, Any] | None:
            batch = next(self.left, None)
            return feed(input_names(session), batch) if batch is not None else None

    with TemporaryDirectory() as folder, _quiet():
        prepared = Path(folder) / "prepared.onnx"
        tool.shape_inference.quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        layers = [node.name for node in onnx.load(prepared).graph.node if node.op_type in LAYERS]
        if not layers:
            raise InvalidModel("there is nothing to quantise", wanted="convolutions or linear layers")
        try:
            tool.quantize_static(
                str(prepared),
                str(target),
                Reader(),
                quant_format=tool.QuantFormat.QDQ,
                per_channel=True,
                reduce_range=overflows(),
                activation_type=tool.QuantType.QUInt8,
                weight_type=tool.QuantType.QInt8,
                calibrate_method=getattr(tool.CalibrationMethod, METHODS[method]),
                nodes_to_exclude=[{"first": layers[0], "last": layers[-1]}[place] for place in skip],
                extra_options={"CalibStridedMinMax": 1},
            )
        except Exception as error:  # it raises errors of many types
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise InvalidModel("onnxruntime cannot quantise the network", got=reason) from error


class OnnxNetwork(nn.Module):
    """An ONNX file with one input and one output as a module, so that a task can test it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.run = open_onnx(path)
        self.place = nn.Parameter(torch.empty(0))  # for code that asks a model for its device

    def forward(self, images: Tensor) -> Tensor:
        return self.run(Example.of(images.contiguous()))[0]


class Pair(nn.Module):
    """The quantised network, which counts how often it gives the class that the other one gives."""

    def __init__(self, before: OnnxNetwork, after: OnnxNetwork) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.same = self.total = 0

    def forward(self, images: Tensor) -> Tensor:
        wanted, found = self.before(images), self.after(images)
        same = wanted.argmax(1) == found.argmax(1)
        self.same += int(same.sum())
        self.total += same.numel()
        return found


def _check_kind(model: nn.Module, call: Example) -> None:
    """Raise for networks other than one tensor in and class scores out."""
    output = call(model)
    one = len(call.tensors) == len(call.args) == 1 and not call.kwargs
    if not one or not isinstance(output, Tensor) or output.dim() < 2:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        got, wanted = f"{len(call.tensors)} tensors in and {shape} out", "one tensor in, (images, classes, ...) out"
        raise InvalidModel(f"{type(model).__name__} cannot be quantised", got=got, wanted=wanted)


def _check_batches(network: OnnxNetwork, other: OnnxNetwork, call: Example) -> None:
    """Raise unless the network gives numbers of the right shape for batches of other sizes."""
    for size in BATCHES:
        batch = call.batch(size, torch.Generator().manual_seed(0))
        found, wanted = batch(network), batch(other)
        if found.shape != wanted.shape or not bool(found.isfinite().all()):
            raise NotEquivalent("the quantised network gives another shape, or NaN", got=tuple(found.shape))


def _parts(call: Example) -> Iterator[Example]:
    (images,) = call.tensors
    yield from (Example.of(part) for part in images.cpu().split(AT_ONCE))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the quantiser prints, and tells the root logger."""
    level = logging.root.level
    logging.root.setLevel(logging.ERROR)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        logging.root.setLevel(level)
