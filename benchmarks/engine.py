"""How fast the engine trains: seconds per epoch on a GPU, overhead over a bare loop on the CPU.

python benchmarks/engine.py --device cuda      ResNet-56 and VGG-16-M beside a plain loop, into docs/performance.md
python benchmarks/engine.py --device cpu       the loop's overhead, printed only
python benchmarks/engine.py --processes 2      two runs on one GPU at the same time, printed only
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import secateur
from secateur.data.arrays import Arrays
from secateur.models.lookup import find_model
from secateur.runs.prune import pruning_phases
from secateur.runs.run import Run
from secateur.training.engine import Engine
from secateur.training.loop import Trainer, Work
from secateur.training.optimizers import make_optimizer

DOCS = Path(__file__).parent.parent / "docs"
NETWORKS = ("resnet56", "vgg16_m")
IMAGES, BATCH = 50_000, 128
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def arrays(device: str, count: int, batch: int = BATCH, **options: Any) -> Arrays:
    """Images of noise, as large as CIFAR's."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return Arrays(images, labels, batch, mean=MEAN, std=STD, **options).to(device)


def phases(name: str, engine: Engine, repeats: int, **changes: Any) -> dict[str, float]:
    """Median seconds of a Tick, a Tock epoch and a fine-tuning epoch; the first of each captures and is left out."""
    torch.manual_seed(0)
    model = find_model(name).cuda()
    train = arrays("cuda", IMAGES, shuffle=True, crop=4, flip=True, channels_last=engine.channels_last, drop_last=True)
    task = secateur.classification(train)
    graph = secateur.analyze(model, torch.randn(1, 3, 32, 32, device="cuda"))
    common = {"tick_removes": 0.002, "tock_every": repeats + 1, "tock_epochs": repeats + 1, **changes}
    pruning = secateur.TickTock.of(keep_macs=0.3, **common)
    tuning = secateur.TickTock.of(keep_macs=1.0, finetune_epochs=repeats + 1, **changes)
    whole = secateur.Plan(graph, graph.all_kept())
    seconds: dict[str, list[float]] = {}
    for settings, wanted in ((pruning, ("Tick", "Tock")), (tuning, ("FineTune",))):
        for event in Run(settings, pruning_phases(settings), model, whole, task, engine=engine).events():
            kind = type(event).__name__
            if kind in wanted:
                seconds.setdefault(kind, []).append(event.seconds)
            if all(len(seconds.get(kind, ())) > repeats for kind in wanted):
                break
    return {kind: median(values[1:]) for kind, values in seconds.items()}


def evaluation(name: str) -> float:
    """Seconds to evaluate 10,000 images, in single precision."""
    model = find_model(name).cuda()
    task = secateur.classification([], arrays("cuda", 10_000, 2000))
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        task.metrics(model)
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])


def at_once(processes: int, repeats: int) -> None:
    """The captured epochs of ResNet-56 in several processes on one GPU at the same time."""
    command = [sys.executable, __file__, "--device", "cuda", "--processes", "1", "-n", str(repeats)]
    for running in [subprocess.Popen(command) for _ in range(processes)]:
        running.wait()


def plain_loop(name: str, workers: int, batches: int, channels_last: bool, precision: str) -> float:
    """Seconds per epoch of a loop as tutorials write it, with torchvision's transforms in a DataLoader."""
    from torchvision import transforms
    from torchvision.transforms.functional import to_pil_image

    class Noise(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.source = arrays("cpu", 2048)
            self.pictures = [to_pil_image(image) for image in self.source.images]
            steps = [transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
            self.transform = transforms.Compose([*steps, transforms.Normalize(MEAN, STD)])

        def __len__(self) -> int:
            return IMAGES

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return self.transform(self.pictures[index % 2048]), int(self.source.labels[index % 2048])

    loader = torch.utils.data.DataLoader(
        Noise(), BATCH, shuffle=True, num_workers=workers, pin_memory=True, drop_last=True, persistent_workers=True
    )
    model = find_model(name).cuda().train()
    if channels_last:
        model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    marks: list[float] = []
    while True:
        for images, labels in loader:
            images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            if channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.cuda.synchronize()
            marks.append(time.perf_counter())
            if len(marks) == batches:
                half = batches // 2  # the first half fills the workers' queues
                return (marks[-1] - marks[half]) / (batches - 1 - half) * (IMAGES // BATCH)


def peak_memory(name: str) -> tuple[float, float]:
    """Peak megabytes of a training step, plain and gated."""
    peaks = []
    for gated in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        model = find_model(name).cuda().train()
        if gated:
            secateur.insert_gates_(model, secateur.analyze(model, torch.randn(1, 3, 32, 32, device="cuda")))
        optimizer = make_optimizer(list(model.parameters()), secateur.Learning())
        batch = arrays("cuda", 1024, 1024)
        work = Work("memory", secateur.classification([]).loss, optimizer, rate=lambda s: 0.01)
        trainer = Trainer(model, Engine(graphs=False))
        trainer.epoch(batch, work)
        torch.cuda.reset_peak_memory_stats()
        trainer.epoch(batch, work)
        peaks.append(torch.cuda.max_memory_allocated() / 1e6)
    return peaks[0], peaks[1]


def floor(name: str) -> tuple[float, float]:
    """Seconds an epoch cannot fall below: by arithmetic at 790 TFLOP/s, and by memory traffic at 4.8 TB/s.

    Traffic: every batch norm, ReLU and convolution reads and writes its activations once, forward and backward, in two
    bytes; that is about ten passes over the output of each convolution.
    """
    model = find_model(name)
    graph = secateur.analyze(model, torch.randn(1, 3, 32, 32), probe=False)
    sizes: list[int] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda m, args, out: sizes.append(out.numel()))
    model.eval()(torch.randn(1, 3, 32, 32))
    return 3 * 2 * graph.macs * IMAGES / 790e12, 10 * 2 * sum(sizes) * IMAGES / 4.8e12


def on_cuda(repeats: int, workers: int) -> tuple[str, list[dict[str, Any]]]:
    hardware = f"{torch.cuda.get_device_name()}, torch {version('torch')}"
    rows = []
    for name in NETWORKS:
        fast = Engine(precision="bf16", channels_last=True)
        row: dict[str, Any] = {"network": name, "floor": floor(name)}
        row["captured, bf16"] = phases(name, fast, repeats)
        row["captured, bf16, channels first"] = phases(name, Engine(precision="bf16"), repeats)
        row["captured, fp32"] = phases(name, Engine(channels_last=True), repeats)
        row["captured, bf16, distilled"] = phases(name, fast, repeats, distill=0.9)
        pieces = Engine(precision="bf16", channels_last=True, graphs=False)
        row["piece by piece, bf16"] = phases(name, pieces, 1)
        row["plain loop, bf16"] = plain_loop(name, workers, 300, True, "bf16")
        row["plain loop, fp32"] = plain_loop(name, workers, 300, False, "fp32")
        row["evaluation"] = evaluation(name)
        row["memory"] = peak_memory(name)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return hardware, rows


def report(hardware: str, rows: list[dict[str, Any]], repeats: int) -> str:
    lines = [
        "# How fast the engine trains",
        "",
        f"Made by `python benchmarks/engine.py --device cuda -n {repeats}` on one {hardware}; medians, seed 0.",
        "",
        f"Seconds per epoch of {IMAGES:,} images of 32x32 at batch {BATCH}, crop and flip included. A Tick includes",
        "its removal. The plain loop has torchvision's transforms in a DataLoader.",
        "",
        "| network | how | Tick | Tock | fine-tuning |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        for how, value in row.items():
            if isinstance(value, dict):
                cells = " | ".join(f"{value[kind]:.2f}" for kind in ("Tick", "Tock", "FineTune"))
                lines.append(f"| {row['network']} | {how} | {cells} |")
            elif how.startswith("plain"):
                lines.append(f"| {row['network']} | {how} | | | {value:.2f} |")
    if "evaluation" in rows[0]:
        told = ", ".join(f"{row['network']} {row['evaluation']:.2f} s" for row in rows)
        lines += ["", f"Evaluation of 10,000 images in single precision: {told}."]
    columns = ("network", "arithmetic", "memory", "Tock / larger floor", "images/s in a Tock", "gated / plain memory")
    lines += [
        "",
        "Floors: seconds that arithmetic and memory traffic alone would take.",
        "",
        f"| {' | '.join(columns)} |",
    ]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        tock, (plain, gated) = row["captured, bf16"]["Tock"], row["memory"]
        arithmetic, memory = row["floor"]
        parts = [f"{arithmetic:.2f} s", f"{memory:.2f} s", f"{tock / max(row['floor']):.1f}", f"{IMAGES / tock:,.0f}"]
        lines.append(f"| {row['network']} | {' | '.join(parts)} | {gated / plain:.3f} |")
    return "\n".join(lines) + "\n"


def on_cpu(repeats: int) -> str:
    """The trainer against the same steps written out, by turns."""
    torch.set_num_threads(1)
    data = arrays("cpu", 256, 64)
    batches = list(data)

    def steps() -> Iterator[tuple[str, float]]:
        torch.manual_seed(0)
        ours, bare = find_model("resnet20").train(), find_model("resnet20").train()
        loss = secateur.classification([]).loss
        mine = make_optimizer(list(ours.parameters()), secateur.Learning())
        work = Work("overhead", loss, mine, rate=lambda s: 0.01)
        trainer = Trainer(ours)
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        for _ in range(repeats + 1):
            start = time.perf_counter()
            trainer.epoch(batches, work)
            yield "engine", time.perf_counter() - start
            start = time.perf_counter()
            for images, labels in batches:
                optimizer.zero_grad()
                F.cross_entropy(bare(images), labels).backward()
                optimizer.step()
            yield "bare loop", time.perf_counter() - start

    seconds: dict[str, list[float]] = {}
    for name, value in steps():
        seconds.setdefault(name, []).append(value)
    ours, bare = (median(seconds[name][1:]) for name in ("engine", "bare loop"))
    ratio = median(a / b for a, b in zip(seconds["engine"][1:], seconds["bare loop"][1:], strict=True))
    return f"ResNet-20, 4 batches of 64: engine {ours:.3f} s, bare loop {bare:.3f} s, ratio {ratio:.3f} (n = {repeats})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("-n", "--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=12, help="of the plain loop's DataLoader")
    parser.add_argument("--processes", type=int, help="only ResNet-56, in so many processes at once")
    options = parser.parse_args()
    if options.processes == 1:
        print(phases("resnet56", Engine(precision="bf16", channels_last=True), options.repeats))
        return
    if options.processes:
        at_once(options.processes, options.repeats)
        return
    if options.device == "cpu":
        print(on_cpu(options.repeats))
        return
    hardware, rows = on_cuda(options.repeats, options.workers)
    page = report(hardware, rows, options.repeats)
    print(page)
    (DOCS / "performance.md").write_text(page)


if __name__ == "__main__":
    main()
