"""A short run in one process, and the same under torchrun in several: seconds per step, what is captured, the weights.

python benchmarks/processes.py --backend gloo --processes 2     on the CPU
python benchmarks/processes.py --backend nccl --processes 1     on a GPU; with several GPUs, one process for each

Ticks, Tocks and fine-tuning of ResNet-20 on noise. In the one process every part of a batch is normalised by itself, as
in several. What is printed is for the last epochs of Tocks and fine-tuning; the first of each captures.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine import arrays
from torch import Tensor, nn

import secateur
from secateur.models.lookup import find_model
from secateur.runs.prune import pruning_phases
from secateur.runs.run import Run
from secateur.training.distributed import join, leave
from secateur.training.engine import Engine
from secateur.words import counted

EPOCHS = 3


def short_run(device: str, batches: int, size: int, parts: int) -> dict[str, Any]:
    """Seconds per step and what was captured, by phase, and the weights in the end."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = find_model("resnet20").to(device)
    task = secateur.classification(arrays(device, batches * size, size, shuffle=True, crop=4, flip=True))
    task = replace(task, loss=by_parts(task.loss, parts))
    graph = secateur.analyze(model, torch.randn(1, 3, 32, 32, device=device))
    # At low rates, so that rounding does not grow until other channels are removed.
    rates = {"tick_lr": 1e-4, "tock_lr": 1e-3, "tock_lr_low": 1e-4, "finetune_lr": 1e-3, "finetune_lr_low": 1e-4}
    epochs = {"tock_epochs": EPOCHS, "finetune_epochs": EPOCHS}
    settings = secateur.TickTock.of(keep_macs=0.9, tick_removes=0.05, tock_every=1, **epochs, **rates)
    whole = secateur.Plan(graph, graph.all_kept())
    # Without benchmarks by cuDNN, which may choose another algorithm every time.
    engine = Engine(tune=False)
    run = Run(settings, pruning_phases(settings), model, whole, task, engine=engine, progress=print)
    captured: dict[str, bool] = {}
    run.on_step = lambda *_: captured.update({name: graph is not None for name, graph in run.trainer._graphs.items()})
    seconds: dict[str, float] = {}
    for event in run.events():
        seconds[type(event).__name__] = event.seconds / batches
    names = {"Tock": "Tock", "FineTune": "finetune"}
    return {
        "rows": {kind: (seconds[kind], captured.get(name, False)) for kind, name in names.items()},
        "kept": run.kept,
        "weights": [parameter.detach().cpu() for parameter in run.model.parameters()],
    }


def by_parts(loss: Callable[[nn.Module, Any], Tensor], parts: int) -> Callable[[nn.Module, Any], Tensor]:
    """The mean loss of so many equal parts of the batch, one after another."""

    def mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        cut = zip(*(tensor.chunk(parts) for tensor in batch), strict=True)
        return torch.stack([loss(model, part) for part in cut]).mean()

    return mean


def in_processes(options: argparse.Namespace) -> dict[str, Any]:
    """The same under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "done.pt"
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={options.processes}",
        ]
        flags = [f"--{name}={getattr(options, name)}" for name in ("backend", "batches", "size")]
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
        subprocess.run([*launch, __file__, *flags, f"--save={path}"], check=True, env=environment)
        return torch.load(path)


def report(options: argparse.Namespace, alone: dict[str, Any], together: dict[str, Any]) -> str:
    how = f"{options.backend}, {counted(options.processes, 'process', 'processes')}"
    lines = ["| phase | how | milliseconds per step | captured |", "|---|---|---:|---|"]
    for name, found in (("alone", alone), (how, together)):
        for kind, (seconds, captured) in found["rows"].items():
            lines.append(f"| {kind} | {name} | {1000 * seconds:.1f} | {'yes' if captured else 'no'} |")
    if not torch.equal(alone["kept"], together["kept"]):
        return "\n".join([*lines, "", "other channels were removed"])
    pairs = zip(alone["weights"], together["weights"], strict=True)
    largest = max(float((a - b).abs().max()) for a, b in pairs)
    return "\n".join([*lines, "", f"largest difference of the weights: {largest:.2g}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="gloo")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batches", type=int, default=8, help="in an epoch")
    parser.add_argument("--size", type=int, default=32, help="of a batch")
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cuda" if options.backend == "nccl" else "cpu"
    if options.save is None:
        alone = short_run(device, options.batches, options.size, options.processes)
        print(report(options, alone, in_processes(options)))
        return
    if options.backend == "gloo":
        dist.init_process_group("gloo")
    world = join()
    done = short_run(device, options.batches, options.size, 1)
    if world.leads:
        torch.save(done, options.save)
    leave()


if __name__ == "__main__":
    main()
