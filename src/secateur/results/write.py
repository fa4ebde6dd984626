"""Any network, in the format that the name of a file says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from secateur.channels.example import Example
from secateur.channels.shrink import copy_model
from secateur.errors import InvalidSetting
from secateur.results import export as formats
from secateur.results import runtimes
from secateur.results.load import about, load
from secateur.results.network import check_runs, check_tensors, open_network
from secateur.runs.events import Result

WEIGHTS = (".safetensors", ".pth")
FORMATS: dict[str, Callable[..., float]] = {
    ".onnx": formats.export_onnx,
    ".pt2": formats.export_program,
    ".ts": formats.export_torchscript,
    ".xml": runtimes.export_openvino,
    ".param": lambda model, example, path: runtimes.export_ncnn(model, example, Path(path).with_suffix("")),
    ".pte": runtimes.export_executorch,
}


def export(
    network: Result | nn.Module | str | Path,
    path: str | Path,
    example: Any = None,
    *,
    build: Callable[[], Any] | str | None = None,
    fold_batchnorm: bool = False,
) -> float | None:
    """Write a network for other programs, run what was written, and return how much its output differs.

    The difference is a share of the largest output. If it is more than rounding, there is an error and no file. It is
    None for weights alone.

    network: a result, a model, or the folder of a run or a result.
    path: its ending says the format: .onnx, .pt2 (an exported program), .ts (TorchScript), .xml (OpenVINO, with a .bin
        file beside it), .param (ncnn, likewise), .pte (ExecuTorch), .safetensors or .pth (weights alone).
    example: an input; needed for a model, and for folders that do not tell its shape.
    build: as of `load`, for a folder.
    fold_batchnorm: first fold batch norms into the convolutions before them.
    """
    ending = Path(path).suffix.lower()
    if ending not in (*FORMATS, *WEIGHTS):
        raise InvalidSetting(
            "the name of the file does not say its format", got=str(path), wanted=", ".join([*FORMATS, *WEIGHTS])
        )
    if build is not None and isinstance(network, (Result, nn.Module)):
        raise InvalidSetting("build is for a folder", got=f"it beside a {type(network).__name__}")
    metadata: dict[str, str] = {}
    if isinstance(network, (str, Path)):
        name, metadata = str(network), about(network).metadata
        if example is None:
            model, example = open_network(name, build)
        else:
            model = load(network, build)
    elif isinstance(network, Result):
        name, model = "the result", network.model
        example = example if example is not None else network.plan.graph.calls["eval"][0]
    else:
        name, model = type(network).__name__, network
    if ending in WEIGHTS and not fold_batchnorm:
        formats.export_weights(model, path)
        return None
    if example is None:
        remedy = "Pass one input of the model: secateur.export(model, path, example)"
        raise InvalidSetting("a model alone does not tell its input", remedy=remedy)
    model, call = copy_model(model).cpu().eval(), Example.of(example).map(lambda tensor: tensor.detach().cpu())
    check_tensors(call, name)
    check_runs(model, call, name)
    if fold_batchnorm:
        model, _ = formats.fold_batchnorm(model, call)
    if ending in WEIGHTS:
        formats.export_weights(model, path)
        return None
    write = partial(FORMATS[ending], metadata=metadata) if ending == ".onnx" else FORMATS[ending]
    return write(model, call, path)
