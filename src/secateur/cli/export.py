"""`secateur export` and `secateur bench`: other formats, and how fast networks are."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from secateur.cli.display import waiting
from secateur.cli.flags import Switch
from secateur.cli.options import Output, find_device, parse_shape
from secateur.errors import InvalidModel, InvalidSetting, NotEquivalent


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a pruned network for other programs, and check that it gives the same output.

    examples:
      secateur export runs/pruned --onnx network.onnx
      secateur export runs/pruned --pt2 network.pt2 --fold-batchnorm
      secateur export runs/mine --build my_project.networks:build --state-dict weights.safetensors
    """

    network: str
    """A run or its result; a network's name; or NETWORK=FILE with weights from a file."""

    onnx: Path | None = None
    """Write ONNX, for batches of any size; it is run in onnxruntime once."""

    pt2: Path | None = None
    """Write a program that torch.export.load reads without Secateur, for batches of any size."""

    torchscript: Path | None = None
    """Write TorchScript."""

    state_dict: Path | None = None
    """Write the weights alone: .safetensors, or torch's own format."""

    fold_batchnorm: Switch = False
    """First fold batch norms into the convolutions before them."""

    build: str | None = None
    """What makes the whole network, where that is your own code: package.module:callable."""

    input: str | None = None
    """Shape of the input, as 1x3x224x224; without it, the run's."""

    output: Output = field(default_factory=Output)

    def run(self) -> str:
        from secateur.results import export
        from secateur.results.network import check_runs, open_network

        kinds = {
            "onnx": (self.onnx, export.export_onnx),
            "pt2": (self.pt2, export.export_program),
            "torchscript": (self.torchscript, export.export_torchscript),
        }
        if self.state_dict is None and not any(path for path, _ in kinds.values()):
            remedy = "Say what to write: --onnx FILE, --pt2 FILE, --torchscript FILE or --state-dict FILE"
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

    runner: Literal["eager", "captured", "compiled", "onnxruntime"] = "eager"
    """What runs it; captured: as a CUDA graph, without the time to launch kernels."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of weights and images."""

    channels_last: Switch = False
    """Use the channels-last memory format."""

    repetitions: int = 30
    """Timed passes of each network, by turns, after three to warm up."""

    device: str = "auto"
    """Where: cpu, cuda, cuda:1; auto takes CUDA if there is."""

    build: str | None = None
    """What makes the whole network, for results of your own code: package.module:callable."""

    output: Output = field(default_factory=Output)

    def run(self) -> str:
        from secateur.results.bench import bench, table

        if not self.networks:
            remedy = "Name one or several: secateur bench resnet56 runs/pruned"
            raise InvalidSetting("no network is named", remedy=remedy)
        shape = parse_shape(self.input)
        with waiting("timing") as say:
            timings, place = bench(
                self.networks,
                batch=self.batch,
                shape=shape,
                how=self.runner,
                precision=self.precision,
                channels_last=self.channels_last,
                repetitions=self.repetitions,
                device=find_device(self.device),
                build=self.build,
                say=say,
            )
        if self.output.json:
            how = {name: getattr(self, name) for name in ("runner", "precision", "channels_last", "repetitions")}
            return json.dumps({"where": place, **how, "networks": [timing.to_dict() for timing in timings]})
        how = f"{self.runner}, {self.precision}, batches of {self.batch}, medians of n = {self.repetitions} by turns"
        return f"{table(timings)}\n\n{place}, {how}"
