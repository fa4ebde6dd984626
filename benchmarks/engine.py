"""How fast the engine trains: seconds per 50,000 images on a GPU, overhead over a bare loop on the CPU.

python benchmarks/engine.py --device cuda      ResNet-56, VGG-16-M and ResNet-50, beside plain loops
python benchmarks/engine.py --device cuda --networks resnet56 --ways "compiled, bf16"      some of it
python benchmarks/engine.py --device cpu       the loop's overhead, printed only
python benchmarks/engine.py --processes 2      two runs on one GPU at the same time, printed only

What is measured on a GPU is merged into docs/performance.json, from which benchmarks/performance_page.py writes
docs/performance.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
IMAGES, BATCH = 50_000, 128
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Network:
    """What a network is trained on."""

    name: str
    size: int = 32
    """Of its images, in pixels."""
    images: int = IMAGES
    """In an epoch."""
    batch: int = BATCH


NETWORKS = {
    "resnet56": Network("resnet56"),
    "vgg16_m": Network("vgg16_m"),
    "resnet50": Network("torchvision:resnet50", 224, 20_480, 256),
}


def arrays(device: str, count: int, batch: int = BATCH, size: int = 32, **options: Any) -> Arrays:
    """Images of noise, as large as CIFAR's unless another size is given."""
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=generator, device=device)
    labels = torch.randint(10, (count,), generator=generator, device=device)
    return Arrays(images, labels, batch, mean=MEAN, std=STD, **options)


def phases(network: Network, engine: Engine, repeats: int, **changes: Any) -> dict[str, float]:
    """Median seconds per 50,000 images of each phase; its first epoch captures and is left out."""
    torch.manual_seed(0)
    model = find_model(network.name).cuda()
    options = {"shuffle": True, "crop": network.size // 8, "flip": True, "channels_last": engine.channels_last}
    train = arrays("cuda", network.images, network.batch, network.size, drop_last=True, **options)
    task = secateur.classification(train)
    graph = secateur.analyze(model, torch.randn(1, 3, network.size, network.size, device="cuda"), probe=False)
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
    return {kind: median(values[1:]) * IMAGES / network.images for kind, values in seconds.items()}


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


def floor(network: Network) -> tuple[float, float]:
    """Seconds that 50,000 images cannot fall below: by arithmetic at 790 TFLOP/s, and by memory traffic at 4.8 TB/s.

    Traffic: every batch norm, ReLU and convolution reads and writes its activations once, forward and backward, in two
    bytes; that is about ten passes over the output of each convolution.
    """
    model, image = find_model(network.name), torch.randn(1, 3, network.size, network.size)
    graph = secateur.analyze(model, image, probe=False)
    sizes: list[int] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda m, args, out: sizes.append(out.numel()))
    model.eval()(image)
    return 3 * 2 * graph.macs * IMAGES / 790e12, 10 * 2 * sum(sizes) * IMAGES / 4.8e12


def ways(network: Network, repeats: int, workers: int) -> dict[str, Callable[[], Any]]:
    """What can be measured of a network, by name."""
    fast = Engine(precision="bf16", channels_last=True, compile="never")
    found: dict[str, Callable[[], Any]] = {
        "compiled, bf16": lambda: phases(network, replace(fast, compile="always"), repeats),
        "captured, bf16": lambda: phases(network, fast, repeats),
        "piece by piece, bf16": lambda: phases(network, replace(fast, graphs=False), 1),
    }
    if network.size == 32:
        found |= {
            "captured, bf16, channels first": lambda: phases(network, replace(fast, channels_last=False), repeats),
            "captured, fp32": lambda: phases(network, replace(fast, precision="fp32"), repeats),
            "captured, bf16, distilled": lambda: phases(network, fast, repeats, distill=0.9),
            "plain loop, bf16": lambda: plain_loop(network.name, workers, 300, True, "bf16"),
            "plain loop, fp32": lambda: plain_loop(network.name, workers, 300, False, "fp32"),
            "evaluation": lambda: evaluation(network.name),
            "memory": lambda: peak_memory(network.name),
        }
    return found


def on_cuda(networks: list[str], wanted: list[str] | None, repeats: int, workers: int) -> None:
    hardware = f"{torch.cuda.get_device_name()}, torch {version('torch')}, n = {repeats}"
    for name in networks:
        for way, measure in ways(NETWORKS[name], repeats, workers).items():
            if wanted is None or way in wanted:
                value = measure()
                print(json.dumps({"network": name, "way": way, "value": value, "hardware": hardware}), flush=True)
                merge({"engine": {name: {way: {"value": value, "hardware": hardware}}}})
        merge({"floors": {name: floor(NETWORKS[name])}})


def merge(found: dict[str, Any], path: Path = DOCS / "performance.json") -> None:
    """Add numbers to those in the file, in the place of older ones."""

    def into(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        return old | {
            k: into(old[k], v) if isinstance(v, dict) and isinstance(old.get(k), dict) and "value" not in v else v
            for k, v in new.items()
        }

    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(into(before, found), indent=1) + "\n")


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
    parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--ways", nargs="+", help="such as 'compiled, bf16'; all of them by default")
    parser.add_argument("--processes", type=int, help="only ResNet-56, in so many processes at once")
    options = parser.parse_args()
    if options.processes == 1:
        fast = Engine(precision="bf16", channels_last=True, compile="never")
        print(phases(NETWORKS["resnet56"], fast, options.repeats))
        return
    if options.processes:
        at_once(options.processes, options.repeats)
        return
    if options.device == "cpu":
        print(on_cpu(options.repeats))
        return
    on_cuda(options.networks, options.ways, options.repeats, options.workers)


if __name__ == "__main__":
    main()
