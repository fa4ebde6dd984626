"""MACs removed against time saved: by a budget of MACs, aligned or not, and by a budget of time.

python benchmarks/latency.py                        through onnxruntime on the CPU, into docs/latency_cpu.md
python benchmarks/latency.py --batch 64             the same with batches, into docs/latency_cpu_64.md
python benchmarks/latency.py --device cuda          bf16, channels last, batch 64, into docs/latency_cuda.md
python benchmarks/latency.py --device cuda --size 32 --networks resnet56 vgg16_m      into docs/latency_cuda_32.md
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from coverage_report import hardware
from torch import nn

import secateur
from secateur.errors import UnreachableBudget
from secateur.models.lookup import find_model
from secateur.pruning.selection import Target, best_widths, check_reachable, ranked, select
from secateur.results.bench import Runner, runner, summarize
from secateur.timing import time_in_turn
from secateur.words import counted

DOCS = Path(__file__).parent.parent / "docs"
NETWORKS = ("torchvision:resnet50", "torchvision:mobilenet_v2")
SHARES = (0.6, 0.45)
PAPER = "The paper, ResNet-50 on a Titan X Pascal, batch 64: 59% of the MACs left +30% images/s, 45% left +43%."
METHOD = """Weights are random, and the importance of a filter is its L1 norm: what is cut is not what a trained network
would lose, but widths and times are of the kind that such a cut gives. The first rows of a share have that share of the
MACs: by one ranking of all filters with widths as they come, the same in multiples of {multiple}, and by the importance
kept within a time, the time being that at which so many MACs are left. The last ones have that share as a budget of
time: by rank per microsecond, and by the knapsack over widths that a budget of time uses. Times of layers are measured
on this device, at several widths. *Kept* is the share of the whole network's importance. Times are medians of
n = {repetitions} passes of {images}, taken by turns with the whole network."""


def multiple_on(device: torch.device) -> int:
    """What widths are aligned to: onnxruntime computes 16 channels at a time where the CPU has AVX-512."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    return 8 if device.type == "cuda" else 16 if x86 else 4


class Cutter:
    """A network, its importance and its times."""

    def __init__(self, model: nn.Module, example: torch.Tensor, table: Any, multiple: int) -> None:
        self.model, self.table, self.multiple = model, table, multiple
        self.graph = secateur.analyze(model, example)
        self.scores = secateur.Pruner(deepcopy(model), graph=self.graph, score="l1").score.end().double()

    def _kept(self, budget: secateur.Budget, rank: Any, multiple: int) -> torch.Tensor:
        kept, floors = self.graph.all_kept(), secateur.Limits(multiple_of=multiple).floors(self.graph)
        target = Target(budget, self.graph, self.table)
        check_reachable(target, floors)
        if rank == "knapsack":
            floors = best_widths(target, kept, self.scores, floors, multiple)
            return select(self.graph, kept, self.scores, floors, multiple_of=multiple)
        worth = ranked(self.graph, kept, self.scores, rank, self.table)
        return select(self.graph, kept, worth, floors, multiple_of=multiple, target=target)

    def plans(self, share: float) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """The ways to cut to a share of the MACs, or of the time."""
        macs, time = secateur.Budget(macs=share), secateur.Budget(latency=share)
        yield f"{share:.0%} of the MACs, as they come", lambda: self._kept(macs, "score", 1)
        yield f"{share:.0%} of the MACs, multiples of {self.multiple}", lambda: self._kept(macs, "score", self.multiple)
        yield f"{share:.0%} of the MACs, by time", lambda: self._at_macs(share)
        yield f"{share:.0%} of the time, by rank", lambda: self._kept(time, "score_per_microsecond", self.multiple)
        yield f"{share:.0%} of the time, by knapsack", lambda: self._kept(time, "knapsack", self.multiple)

    def _at_macs(self, share: float) -> torch.Tensor:
        """What is kept within the largest time at which no more than this share of the MACs is left."""
        low, high, found = 0.1, 1.0, None
        for _ in range(6):
            middle = (low + high) / 2
            try:
                kept = self._kept(secateur.Budget(latency=middle), "knapsack", self.multiple)
            except UnreachableBudget:
                low = middle
                continue
            if self.graph.count_macs(kept) <= (share + 0.005) * self.graph.macs:
                low, found = middle, kept
            else:
                high = middle
        if found is None:
            raise UnreachableBudget(f"{share:.0%} of the MACs cannot be reached by time")
        return found


def measure(name: str, device: torch.device, batch: int, size: int, repetitions: int) -> tuple[list[str], list[str]]:
    """Rows of the table for one network, and what cannot be had."""
    torch.manual_seed(0)
    model = find_model(name).eval()
    example = torch.randn(1, 3, size, size)
    on_gpu = device.type == "cuda"
    precision = torch.bfloat16 if on_gpu else torch.float32
    how: Runner = "captured" if on_gpu else "onnxruntime"
    batched = torch.randn(batch, 3, size, size, device=device)
    started = time.perf_counter()
    table = secateur.measure_latency(
        model.to(device),
        batched,
        precision=precision,
        channels_last=on_gpu,
        run=lambda network, call: runner(network, call, how),
        progress=lambda text: print(name, text, flush=True),
    )
    model.to("cpu")
    print(f"{name}: times measured in {time.perf_counter() - started:.0f} s", flush=True)
    cutter = Cutter(model, example, table, multiple_on(device))
    cuts: dict[str, torch.Tensor] = {"whole": cutter.graph.all_kept()}
    missing = []
    for share in SHARES:
        for label, cut in cutter.plans(share):
            try:
                cuts[label] = cut()
                print(name, label, flush=True)
            except UnreachableBudget as error:
                missing.append(f"{name}, {label}: {str(error).partition('. ')[0]}.")
    layout = torch.channels_last if on_gpu else torch.contiguous_format
    images = batched.to(precision).contiguous(memory_format=layout)
    calls = {}
    for label, kept in cuts.items():
        network = secateur.shrink(model, secateur.Plan(cutter.graph, kept)).to(device, precision)
        network.to(memory_format=layout)  # pyright: ignore
        calls[label] = runner(network, images, how)
    seconds = time_in_turn(calls, device, repetitions)
    timings = [summarize(label, seconds[label], batch, cutter.graph.cost(kept)) for label, kept in cuts.items()]
    whole, total = timings[0], float(cutter.scores.sum())
    rows = [
        f"| {name} | {t.name} | {t.macs / whole.macs:.1%} | {float(cutter.scores[cuts[t.name]].sum()) / total:.1%} | "
        f"{1000 * t.median:.3f} | {t.median / whole.median:.1%} | "
        f"{table.value(cutter.graph, cuts[t.name]) / table.value(cutter.graph, cuts['whole']):.1%} | "
        f"{whole.median / t.median - 1:+.0%} | {t.spread:.0%} |"
        for t in timings
    ]
    return rows, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--batch", type=int, help="images at a time: 1 on the CPU, 64 on a GPU")
    parser.add_argument("--networks", nargs="+", default=NETWORKS, help="by name")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--repetitions", type=int, default=20, help="timed passes of each network")
    parser.add_argument("--out", type=Path, help="where the page goes")
    options = parser.parse_args()
    device = torch.device(options.device)
    batch = options.batch or (64 if device.type == "cuda" else 1)
    measured = [measure(name, device, batch, options.size, options.repetitions) for name in options.networks]
    rows, missing = ([line for part in parts for line in part] for parts in zip(*measured, strict=True))
    where = torch.cuda.get_device_name() + ", " + hardware() if device.type == "cuda" else hardware()
    how = "bf16, channels last, as a CUDA graph" if device.type == "cuda" else "fp32, through onnxruntime"
    text = "\n".join(
        [
            "# MACs removed against time saved",
            "",
            f"Made by `{' '.join(['python benchmarks/latency.py', *sys.argv[1:]])}` on {where}; {how}; seed 0.",
            "",
            METHOD.format(
                repetitions=options.repetitions,
                multiple=multiple_on(device),
                images=f"{counted(batch, 'image')} of {options.size}x{options.size}",
            ),
            "",
            "| network | cut to | MACs left | kept | median ms | time left | by the table | images/s | spread |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            *(line for sentence in missing for line in (sentence, "")),
            PAPER,
            "",
        ]
    )
    differs = [str(given) for given, usual in ((options.batch, None), (options.size, 224)) if given != usual]
    (options.out or DOCS / f"{'_'.join(['latency', device.type, *differs])}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
