"""Prune in very many Ticks, and see that nothing grows: memory, open files, the time of a Tick, checkpoints.

python tests/fuzz/long_run.py --ticks 500
python tests/fuzz/long_run.py --ticks 500 --device cuda

A network of three wide layers loses one filter in each Tick. After every Tick the script counts the bytes of the
process and those on the GPU, its open files and the bytes of the last checkpoint, all after a garbage collection. In
the first hundred Ticks the process grows, for oneDNN keeps 1024 kernels; with ONEDNN_PRIMITIVE_CACHE_CAPACITY=0 it
keeps none.
"""

import argparse
import gc
import json
import resource
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

import torch
from torch import nn

from secateur import TickTock, classification, prune
from secateur.data.arrays import Arrays
from secateur.runs.events import Tick

WIDTH, CLASSES = 256, 10
GROWTH = 16 * 2**20
"""Bytes that the process may have more at the end than after a fifth of the Ticks."""
MORE_STATE = 1000
"""Bytes that a checkpoint may hold more beside tensors: numbers get longer, but no event is written again."""
SLOWER = 1.2
"""How much longer the last fifth of the Ticks may take than the first."""


@dataclass(frozen=True)
class Sample:
    """After a Tick."""

    number: int
    clock: float
    memory: int
    on_device: int
    """Bytes that torch has taken of the GPU's memory."""
    files: int
    tensors: int
    """Bytes in the last checkpoint."""
    state: int
    """Bytes of what it holds beside tensors."""


def build() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels in (1, WIDTH, WIDTH):
        layers += [nn.Conv2d(channels, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES))


def long_run(folder: Path, ticks: int, device: str) -> list[Sample]:
    """A run in a folder, with a Tock of an epoch after every ten Ticks, and a sample after each Tick."""
    images, labels = torch.rand(64, 1, 6, 6), torch.arange(64) % CLASSES
    train, test = Arrays(images, labels, 16, shuffle=True), Arrays(images, labels, 64)
    task = classification(train.to(device), test.to(device))
    whole = 3 * WIDTH + CLASSES
    samples: list[Sample] = []

    def look(event: object) -> None:
        if isinstance(event, Tick):
            clock = time.perf_counter()
            gc.collect()
            memory = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            on_device = torch.cuda.memory_reserved() if device.startswith("cuda") else 0
            files = len([*Path("/proc/self/fd").iterdir()])
            *_, last = sorted((folder / "checkpoints").glob("0*"))
            tensors, state = ((last / f"state.{kind}").stat().st_size for kind in ("safetensors", "json"))
            samples.append(Sample(event.number, clock, memory, on_device, files, tensors, state))

    share = (whole - ticks + 0.5) / whole
    epochs = {"tock_epochs": 1, "finetune_epochs": 1}
    widths = {"multiple_of": 1, "cut": "now"}
    settings = TickTock.of(keep_filters=share, tick_removes=1 / whole, tock_every=10, **widths, **epochs)
    prune(build().to(device), images[:1].to(device), task, settings=settings, folder=folder, progress=look)
    return samples


def check(folder: Path, ticks: int, samples: list[Sample]) -> None:
    """Raise if an event is missing or there twice, or something has grown."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    numbers = {kind: [e["number"] for e in events if e["event"] == kind] for kind in ("Tick", "Tock")}
    assert numbers == {"Tick": [*range(1, ticks + 1)], "Tock": [*range(1, (ticks - 1) // 10 + 1)]}
    assert [e["event"] for e in events if e["event"] not in numbers] == ["Start", "FineTune"]
    later = samples[ticks // 5 - 1 :]
    assert later[-1].memory - later[0].memory < GROWTH, [sample.memory for sample in later]
    assert later[-1].on_device - later[0].on_device < GROWTH, [sample.on_device for sample in later]
    assert len({sample.files for sample in later}) == 1, [sample.files for sample in later]
    assert later[-1].state < later[0].state + MORE_STATE, [sample.state for sample in later]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ticks", type=int, default=500)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--untimed", action="store_true", help="on a machine that others use too")
    options = parser.parse_args()
    ticks, fifth = options.ticks, options.ticks // 5
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        samples = long_run(folder, ticks, options.device)
        seconds = [later.clock - sooner.clock for sooner, later in pairwise(samples)]
        print("ticks    memory  on a GPU  files   tensors     state  s per Tick")
        for start in range(0, ticks, fifth):
            now = samples[start + fifth - 1]
            took = mean(seconds[start : start + fifth])
            taken = f"{now.memory / 1e6:6.0f} MB {now.on_device / 1e6:6.0f} MB"
            sizes = f"{taken} {now.files:6} {now.tensors / 1e6:6.2f} MB {now.state / 1e3:6.1f} kB"
            print(f"{now.number:5} {sizes} {took:11.3f}")
        check(folder, ticks, samples)
        slower = mean(seconds[-fifth:]) / mean(seconds[:fifth])
        assert options.untimed or slower < SLOWER, f"the last Ticks took {slower:.2f} times as long as the first"
        print(f"every event is there once; events.jsonl has {(folder / 'events.jsonl').stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
