"""MACs removed against time saved: with widths as they come, in multiples of 8, and by a budget of latency.

python benchmarks/latency.py                        through onnxruntime on the CPU, into docs/latency_cpu.md
python benchmarks/latency.py --batch 64             the same with batches, into docs/latency_cpu_64.md
python benchmarks/latency.py --device cuda          bf16, channels last, batch 64, into docs/latency_cuda.md
python benchmarks/latency.py --device cuda --size 32 --networks resnet56 vgg16_m      into docs/latency_cuda_32.md
"""

from __future__ import annotations

import argparse
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from coverage_report import hardware
from torch import nn

import secateur
from secateur.errors import UnreachableBudget
from secateur.models.lookup import find_model
from secateur.results.bench import runner, summarize
from secateur.timing import time_in_turn
from secateur.words import counted

DOCS = Path(__file__).parent.parent / "docs"
NETWORKS = ("torchvision:resnet50", "torchvision:mobilenet_v2")
SHARES = (0.6, 0.45)
PAPER = "The paper, ResNet-50 on a Titan X Pascal, batch 64: 59% of the MACs left +30% images/s, 45% left +43%."
METHOD = """Weights are random, and filters ranked by their L1 norm: what is cut is not what a trained network would
lose, but widths and times are of the kind that such a cut gives. "as they come" and "multiples of 8" have a budget of
MACs; "by latency" has the same share as a budget of time, by a table of what the layers take at several widths on this
device, and ranks by score per microsecond. Times are medians of n = {repetitions} passes of {images},
taken by turns with the whole network."""


def pruned(model: nn.Module, example: torch.Tensor, share: float, kind: str, table: Any) -> nn.Module:
    """The network with that share of its MACs, or of its time, left."""
    by_latency = "by latency" in kind
    rank = {"rank": "score_per_microsecond", "latency": table} if by_latency else {}
    limits = secateur.Limits(multiple_of=8 if "8" in kind else 1)
    pruner = secateur.Pruner(deepcopy(model), example, score="l1", limits=limits, **rank)
    pruner.prune(budget=secateur.Budget(latency=share) if by_latency else secateur.Budget(macs=share))
    return pruner.finish().eval()


def measure(name: str, device: torch.device, batch: int, size: int, repetitions: int) -> tuple[list[str], list[str]]:
    """Rows of the table for one network, and what cannot be had."""
    torch.manual_seed(0)
    model = find_model(name).eval()
    example = torch.randn(1, 3, size, size)
    on_gpu = device.type == "cuda"
    precision = torch.bfloat16 if on_gpu else torch.float32
    batched = torch.randn(batch, 3, size, size, device=device)
    # A CPU takes layers of one image as it takes those of many, only sooner.
    some = batched if on_gpu else batched[:1]
    table = secateur.measure_latency(model.to(device), some, precision=precision, channels_last=on_gpu)
    model.to("cpu")
    networks: dict[str, nn.Module] = {"whole": model}
    missing = []
    for share in SHARES:
        for kind in ("as they come", "multiples of 8", f"by latency{', multiples of 8' if on_gpu else ''}"):
            try:
                networks[f"{share:.0%}, {kind}"] = pruned(model, example, share, kind, table)
                print(name, share, kind, flush=True)
            except UnreachableBudget as error:
                missing.append(f"{name}: {str(error).partition('. ')[0]}.")
    costs = {label: secateur.analyze(network, example, probe=False).cost() for label, network in networks.items()}
    layout = torch.channels_last if on_gpu else torch.contiguous_format
    images = batched.to(precision).contiguous(memory_format=layout)
    calls = {}
    for label, network in networks.items():
        network.to(device, precision).to(memory_format=layout)  # pyright: ignore
        calls[label] = runner(network, images, "captured" if on_gpu else "onnxruntime")
    seconds = time_in_turn(calls, device, repetitions)
    timings = [summarize(label, seconds[label], batch, costs[label]) for label in calls]
    whole = timings[0]
    rows = [
        f"| {name} | {t.name} | {t.macs / whole.macs:.1%} | {t.params / whole.params:.1%} | {1000 * t.median:.2f} | "
        f"{t.median / whole.median:.1%} | {whole.median / t.median - 1:+.0%} | {t.spread:.0%} |"
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
                repetitions=options.repetitions, images=f"{counted(batch, 'image')} of {options.size}x{options.size}"
            ),
            "",
            "| network | cut to | MACs left | parameters left | median ms | time left | images/s | spread |",
            "|---|---|---|---|---|---|---|---|",
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
