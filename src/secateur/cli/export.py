"""`secateur export` and `secateur bench`: other formats, and how fast networks are."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from secateur.cli.display import waiting
from secateur.cli.flags import Switch
from secateur.cli.options import Output, Source, check_folder, find_device, order_of_run, parse_shape
from secateur.errors import InvalidModel, InvalidSetting, NotEquivalent
from secateur.files import to_json
from secateur.recipes.paper import is_recipe

if TYPE_CHECKING:
    from secateur.recipes.jobs import Order


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a pruned network for other programs, and check that it gives the same output.

    examples:
      secateur export runs/pruned --onnx network.onnx
      secateur export runs/pruned --pt2 network.pt2 --fold-batchnorm
      secateur export runs/mine --build my_project.networks:build --state-dict weights.safetensors
      secateur export runs/pruned --onnx network.onnx --int8 --data cifar
      secateur export resnet56@cifar10=baseline.pth --onnx network.onnx --int8 --data cifar
    """

    network: str
    """A run or its result; a network's name; or NETWORK=FILE with weights; for INT8, also NETWORK@DATASET=FILE."""

    onnx: Path | None = None
    """Write ONNX, for batches of any size, with class names and preprocessing; it is run in onnxruntime once."""

    openvino: Path | None = None
    """Write OpenVINO's .xml file and the .bin file beside it, or both into a folder, for batches of any size."""

    ncnn: Path | None = None
    """Write ncnn's files, this name with .param and .bin, for one image at a time."""

    executorch: Path | None = None
    """Write a program for ExecuTorch with XNNPACK, a .pte file, for one image at a time."""

    pt2: Path | None = None
    """Write a program that torch.export.load reads without Secateur, for batches of any size."""

    torchscript: Path | None = None
    """Write TorchScript."""

    state_dict: Path | None = None
    """Write the weights alone: .safetensors, or torch's own format."""

    fold_batchnorm: Switch = False
    """First fold batch norms into the convolutions before them."""

    int8: Switch = False
    """Write the ONNX file in INT8, calibrated with training images, and compare accuracy, time and size."""

    int8_images: int = 512
    """Calibration images."""

    int8_method: Literal["minmax", "entropy", "percentile"] = "minmax"
    """How the range of an activation is chosen."""

    int8_skip: tuple[Literal["first", "last"], ...] = ()
    """Layers that stay in single precision."""

    data: Path | None = None
    """Folder of the dataset, for INT8; without it, the run's."""

    build: str | None = None
    """What makes the whole network, where that is your own code: package.module:callable."""

    input: str | None = None
    """Shape of the input, as 1x3x224x224; without it, the run's."""

    output: Output = field(default_factory=Output)

    def run(self) -> str:
        if self.int8:
            return self._run_int8(self.onnx)
        from secateur.results import export, runtimes
        from secateur.results.load import about
        from secateur.results.network import check_runs, open_network

        metadata = about(self.network).metadata if Path(self.network).is_dir() else {}
        kinds = {
            "onnx": (self.onnx, partial(export.export_onnx, metadata=metadata)),
            "openvino": (self.openvino, runtimes.export_openvino),
            "ncnn": (self.ncnn, runtimes.export_ncnn),
            "executorch": (self.executorch, runtimes.export_executorch),
            "pt2": (self.pt2, export.export_program),
            "torchscript": (self.torchscript, export.export_torchscript),
        }
        if self.state_dict is None and not any(path for path, _ in kinds.values()):
            remedy = "Say what to write, as --onnx FILE, --openvino FILE, --pt2 FILE or --state-dict FILE"
            raise InvalidSetting("there is nothing to write", remedy=remedy)
        written: list[dict[str, object]] = []
        failed: list[str] = []
        with waiting(f"exporting {self.network}") as say:
            model, example = open_network(self.network, self.build, parse_shape(self.input))
            check_runs(model, example, self.network)
            folded = 0
            if self.fold_batchnorm:
                model, folded = export.fold_batchnorm(model, example)
            for kind, (path, write) in kinds.items():
                if path is not None:
                    say(kind)
                    try:
                        written.append({"kind": kind, "path": str(path), "difference": write(model, example, path)})
                    except (InvalidModel, NotEquivalent) as error:
                        failed.append(str(error))
            if self.state_dict is not None:
                export.export_weights(model, self.state_dict)
                written.append({"kind": "state dict", "path": str(self.state_dict)})
        if failed:
            done = [f"written: {', '.join(str(each['path']) for each in written)}"] if written else []
            raise InvalidModel("; ".join([*failed, *done]))
        if self.output.json:
            return json.dumps({"written": written, "folded": folded})
        lines = [f"{folded} batch norms folded into convolutions"] if self.fold_batchnorm else []
        for each in written:
            checked = f", differs by {each['difference']:.1e} of the largest output" if "difference" in each else ""
            lines.append(f"{each['kind']}: {each['path']}{checked}")
        return "\n".join(lines)

    def _run_int8(self, path: Path | None) -> str:
        from secateur.recipes.starts import open_network
        from secateur.results.load import About
        from secateur.results.quantize import export_int8

        others = (self.openvino, self.ncnn, self.executorch, self.pt2, self.torchscript, self.state_dict)
        if path is None or any(others) or self.build or self.input:
            raise InvalidSetting(
                "INT8 is written as ONNX alone, with the network and the input of the run or recipe",
                remedy="Give --onnx FILE, and leave out other files, --build and --input",
            )
        order = self._order()
        check_folder(order)
        with waiting(f"quantising {self.network}") as say:
            job = open_network(order, find_device("cpu"))
            options = {"images": self.int8_images, "method": self.int8_method, "skip": self.int8_skip}
            told = About(classes=job.classes, preprocessing=job.preprocessing)
            found = export_int8(job.model, job.example, job.task, path, say=say, metadata=told.metadata, **options)
        if self.output.json:
            return to_json({"path": str(path), **found.to_dict()})
        return f"{found}\nonnx in INT8: {path}"

    def _order(self) -> Order:
        """The network and its data: those of a run, or as `secateur evaluate` names them."""
        folder = Path(self.network)
        if (folder / "config.json").is_file():
            return order_of_run(folder, self.data)
        name, equals, weights = self.network.partition("=")
        if folder.is_dir() or not (is_recipe(name) or ":" in name):
            remedy = "Name a run, or a recipe or NETWORK@DATASET with weights, as resnet56@cifar10=baseline.pth"
            raise InvalidSetting(f"{self.network} does not tell its data, which INT8 needs", remedy=remedy)
        return Source(data=self.data).trained(name, Path(weights) if equals else None, f"{name}=")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time networks side by side on this machine: latency, throughput, and how much faster than the first.

    examples:
      secateur bench resnet56 runs/pruned --batch 128
      secateur bench torchvision:resnet50 runs/resnet50 --input 1x3x224x224 --batch 64 --precision bf16 --channels-last
      secateur bench resnet56 runs/pruned --runner onnxruntime
    """

    networks: tuple[str, ...]
    """Runs or results; names of networks; or NETWORK=FILE with weights from a file."""

    batch: int = 1
    """Images at a time."""

    input: str | None = None
    """Shape of the input, as 1x3x224x224; without it, each network's own."""

    runner: Literal[
        "eager", "captured", "compiled", "onnxruntime", "onnxruntime-int8", "openvino", "ncnn", "executorch"
    ] = "eager"
    """What runs it; captured: as a CUDA graph; onnxruntime-int8: with ranges from random inputs, for the time alone."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of weights and images."""

    channels_last: Switch = False
    """Use the channels-last memory format."""

    repetitions: int = 30
    """Timed passes of each network, in turn, after three warm-up passes."""

    device: str = "auto"
    """Where: cpu, cuda, cuda:1; auto uses CUDA if available and the runner can."""

    build: str | None = None
    """What makes the whole network, for results of your own code: package.module:callable."""

    output: Output = field(default_factory=Output)

    def run(self) -> str:
        from secateur.results.bench import IN_TORCH, bench, table

        if not self.networks:
            remedy = "Name one or several: secateur bench resnet56 runs/pruned"
            raise InvalidSetting("no network is named", remedy=remedy)
        shape = parse_shape(self.input)
        elsewhere = self.device == "auto" and self.runner not in IN_TORCH
        with waiting("timing") as say:
            timings, place = bench(
                self.networks,
                batch=self.batch,
                shape=shape,
                how=self.runner,
                precision=self.precision,
                channels_last=self.channels_last,
                repetitions=self.repetitions,
                device=find_device("cpu" if elsewhere else self.device),
                build=self.build,
                say=say,
            )
        if self.output.json:
            how = {name: getattr(self, name) for name in ("runner", "precision", "channels_last", "repetitions")}
            return json.dumps({"where": place, **how, "networks": [timing.to_dict() for timing in timings]})
        runner = self.runner if self.runner == "onnxruntime-int8" else f"{self.runner}, {self.precision}"
        how = f"{runner}, batches of {self.batch}, medians of n = {self.repetitions} by turns"
        return f"{table(timings)}\n\n{place}, {how}"
