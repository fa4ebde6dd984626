"""Export a network for OpenVINO, ncnn and ExecuTorch, run it there, and check what was written.

All of them run on the CPU, in single precision, with as many threads as torch.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.example import Example
from secateur.errors import InvalidModel
from secateur.extras import import_extra
from secateur.files import write_atomic
from secateur.results.export import export_onnx, feed, fill_checked, quiet, write_checked

Network = Callable[[Example], list[Tensor]]
"""What runs a network in a runtime."""


def export_openvino(model: nn.Module, example: Any, path: str | Path) -> float:
    """Write OpenVINO's two files for batches of any size, run them, and return the largest difference.

    path: the .xml file, beside which the .bin file is put; or a folder for network.xml.
    """
    openvino = import_extra("openvino", "openvino")
    path = Path(path) if Path(path).suffix == ".xml" else Path(path) / "network.xml"

    def fill(folder: Path) -> None:
        export_onnx(model, example, folder / "network.onnx")
        network = openvino.convert_model(folder / "network.onnx")
        openvino.save_model(network, folder / "network.xml", compress_to_fp16=False)

    files = {"network.xml": path, "network.bin": path.with_suffix(".bin")}
    return _write_files("OpenVINO", model, example, files, fill, lambda folder: open_openvino(folder / "network.xml"))


def open_openvino(path: Path) -> Network:
    """The network in a .xml file and the .bin file beside it."""
    openvino = import_extra("openvino", "openvino")
    options = {
        "INFERENCE_PRECISION_HINT": "f32",  # otherwise CPUs that can do so compute in bfloat16
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    network = openvino.Core().compile_model(path, "CPU", options)
    names = [given.any_name for given in network.inputs]

    def run(call: Example) -> list[Tensor]:
        found = network(feed(names, call))
        return [torch.from_numpy(found[each]) for each in network.outputs]

    return run


def export_ncnn(model: nn.Module, example: Any, path: str | Path) -> float:
    """Write ncnn's two files through pnnx, run them, and return the largest difference; one image at a time.

    path: without an ending; PATH.param and PATH.bin are written.
    """
    pnnx = import_extra("pnnx", "ncnn")
    import_extra("ncnn", "ncnn")
    call = Example.of(example).batch(1)
    if len(call.args) != 1 or call.kwargs or call.tensors[0].dtype != torch.float32:
        got = f"inputs of {', '.join(str(tensor.dtype) for tensor in call.tensors)}"
        what = f"{type(model).__name__} cannot be written for ncnn"
        raise InvalidModel(what, got=got, wanted="one tensor of torch.float32")

    def fill(folder: Path) -> None:
        with quiet():
            traced = torch.jit.trace(model, call.args, strict=False)
            torch.jit.save(traced, str(folder / "network.pt"))
        shape = ",".join(map(str, call.tensors[0].shape))
        command = [pnnx.EXEC_PATH, "network.pt", f"inputshape=[{shape}]f32", "fp16=0"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
        if done.returncode or not (folder / "network.ncnn.param").is_file():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise InvalidModel(f"{type(model).__name__} cannot be written for ncnn", got=f"pnnx: {last}")

    files = {f"network.ncnn.{ending}": Path(f"{path}.{ending}") for ending in ("param", "bin")}
    return _write_files("ncnn", model, example, files, fill, lambda folder: open_ncnn(folder / "network.ncnn"))


def open_ncnn(path: Path) -> Network:
    """The network in PATH.param and PATH.bin."""
    ncnn = import_extra("ncnn", "ncnn")
    network = ncnn.Net()
    network.opt.num_threads = torch.get_num_threads()
    network.opt.openmp_blocktime = 0
    for name in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
        setattr(network.opt, name, False)
    if network.load_param(f"{path}.param") or network.load_model(f"{path}.bin"):
        remedy = "pnnx has left an operator that ncnn lacks; look for its name in what ncnn has printed"
        raise InvalidModel("ncnn cannot read what was written for it", remedy=remedy)
    (given,), names = network.input_names(), network.output_names()

    def one(image: Example) -> list[Tensor]:
        with network.create_extractor() as extractor:
            extractor.input(given, ncnn.Mat(image.tensors[0][0].numpy()).clone())
            return [torch.tensor(extractor.extract(name)[1].numpy())[None] for name in names]

    return lambda call: _one_by_one(call, one)


def export_executorch(model: nn.Module, example: Any, path: str | Path) -> float:
    """Write a program for ExecuTorch with XNNPACK's kernels, run it, and return the largest difference.

    It takes one image at a time: the memory of larger batches would be set aside for every image.
    """
    with quiet():
        exir = import_extra("executorch.exir", "executorch")
        xnnpack = import_extra("executorch.backends.xnnpack.partition.xnnpack_partitioner", "executorch")
    call = Example.of(example)

    def fill(target: Path) -> None:
        one = call.batch(1)
        with quiet():
            program = torch.export.export(model, one.args, one.kwargs)
            lowered = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
            target.write_bytes(lowered.to_executorch().buffer)

    return write_checked("ExecuTorch", model, call, path, fill, open_executorch)


def open_executorch(path: Path) -> Network:
    """The program in a .pte file."""
    with quiet():
        runtime = import_extra("executorch.runtime", "executorch")
        portable = import_extra("executorch.extension.pybindings.portable_lib", "executorch")
    portable._unsafe_reset_threadpool(torch.get_num_threads())
    data = path.read_bytes()
    program = runtime.Runtime.get().load_program(data)
    method = program.load_method("forward")

    def one(image: Example, held: Any = (program, data)) -> list[Tensor]:  # the method reads what it does not hold
        return [each.clone() for each in method.execute(image.tensors)]

    return lambda call: _one_by_one(call, one)


def _one_by_one(call: Example, run: Network) -> list[Tensor]:
    """The outputs for a batch from a network that takes one image at a time."""
    size = call.size

    def of(index: int) -> Example:
        return call.map(lambda t: t[index : index + 1] if t.dim() and t.shape[0] == size else t)

    return [torch.cat(parts) for parts in zip(*(run(of(index)) for index in range(size)), strict=True)]


def _write_files(
    kind: str,
    model: nn.Module,
    example: Any,
    files: dict[str, Path],
    fill: Callable[[Path], object],
    read: Callable[[Path], Network],
) -> float:
    """Write the network into a temporary folder, check it, and put its files where they belong."""
    with TemporaryDirectory() as folder:
        difference = fill_checked(kind, model, Example.of(example), Path(folder), fill, read)
        for name, path in files.items():
            write_atomic(path, (Path(folder) / name).read_bytes())
    return difference
