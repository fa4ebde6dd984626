"""How long it takes to analyse and cut a network, beside Torch-Pruning.

python benchmarks/analysis_speed.py                             the whole table, into docs/analysis_speed.md
python benchmarks/analysis_speed.py --networks resnet50 -n 3    some networks, printed only

The whole table takes some twenty minutes, nearly all of them Torch-Pruning's on DenseNet-201.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch_pruning
from coverage_report import hardware
from torch import Tensor, nn

import secateur
from secateur.models.lookup import find_model

DOCS = Path(__file__).parent.parent / "docs"
SEED = 0
RATIO = 0.3
SIZE = 224
"""Of the input, in pixels."""
NETWORKS = ("resnet50", "mobilenet_v2", "densenet121", "densenet201")
GROWING = ("resnet50", "resnet101", "resnet152")

METHOD = f"""CPU seconds on one thread at {SIZE} px, medians over the repetitions of one run. The contestants take
turns, each on a fresh copy of the network that is made outside the timed part. What is timed:

- Secateur: `analyze(probe=False)`, `Plan.random(graph, {RATIO})` and `shrink_`
- with probe: the same with `analyze(probe=True)`, the default
- Torch-Pruning: the pruner's constructor, which builds the graph, and one global step at the same ratio, by group
  magnitude, with the last layer excluded by hand
- Torch-Pruning, random: the same with a random ranking, which is what `Plan.random` has
- its graph alone: what the constructor does first, and a user who wants to look at the groups does by itself"""

Seconds = dict[str, list[float]]
Work = Callable[[nn.Module, Tensor], None]


def secateur_without_probe(model: nn.Module, example: Tensor) -> None:
    graph = secateur.analyze(model, example, probe=False)
    secateur.shrink_(model, secateur.Plan.random(graph, RATIO, SEED))


def secateur_with_probe(model: nn.Module, example: Tensor) -> None:
    graph = secateur.analyze(model, example)
    secateur.shrink_(model, secateur.Plan.random(graph, RATIO, SEED))


def torch_pruning_by(importance: Callable[[], Any]) -> Work:
    """Torch-Pruning's constructor and step with this ranking."""

    def prune(model: nn.Module, example: Tensor) -> None:
        last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        pruner = torch_pruning.pruner.BasePruner(
            model, example, importance(), global_pruning=True, pruning_ratio=RATIO, ignored_layers=[last]
        )
        pruner.step()

    return prune


def torch_pruning_graph(model: nn.Module, example: Tensor) -> None:
    torch_pruning.DependencyGraph().build_dependency(model, example_inputs=example)


OURS: dict[str, Work] = {"Secateur": secateur_without_probe, "with probe": secateur_with_probe}
PEERS: dict[str, Work] = {
    "Torch-Pruning": torch_pruning_by(torch_pruning.importance.GroupMagnitudeImportance),
    "Torch-Pruning, random": torch_pruning_by(torch_pruning.importance.RandomImportance),
}
GRAPH: dict[str, Work] = {"its graph alone": torch_pruning_graph}


def measure(name: str, contestants: dict[str, Work], repeats: int) -> Seconds:
    """CPU seconds of every repetition of every contestant."""
    torch.manual_seed(SEED)
    original = find_model(f"torchvision:{name}").eval()
    example = torch.randn(1, 3, SIZE, SIZE)
    with torch.no_grad():
        original(example)
    seconds: Seconds = {contestant: [] for contestant in contestants}
    for repeat in range(repeats):
        for contestant, work in contestants.items():
            model = copy.deepcopy(original)
            gc.collect()
            start = time.process_time()
            work(model, example)
            seconds[contestant].append(time.process_time() - start)
        print(f"{name}: {repeat + 1}/{repeats}", file=sys.stderr, flush=True)
    return seconds


def warm_up(contestants: dict[str, Work]) -> None:
    """What only the first call pays for, such as imports."""
    for work in contestants.values():
        work(find_model("torchvision:resnet18").eval(), torch.randn(1, 3, 64, 64))


def report(runs: list[dict[str, Any]], growth: list[dict[str, Any]], repeats: int) -> str:
    """The page: how it was measured, the race, and how the time grows."""
    lines = [
        "# Speed of the analysis",
        "",
        f"Made by `python benchmarks/analysis_speed.py -n {repeats}` on {hardware()}, "
        f"Torch-Pruning {version('torch-pruning')}; n = {repeats}, seed {SEED}.",
        "",
        METHOD,
    ]
    if runs:
        lines += ["", "| network | " + " | ".join([*OURS, *PEERS, *GRAPH]) + " | times faster | than random |"]
        lines.append("|---" + "|---:" * (len(OURS) + len(PEERS) + len(GRAPH) + 2) + "|")
        for run in runs:
            medians = {contestant: median(values) for contestant, values in run["seconds"].items()}
            ratios = [medians[peer] / medians["Secateur"] for peer in PEERS]
            cells = [run["network"], *(f"{value:.3f}" for value in medians.values())]
            lines.append("| " + " | ".join([*cells, *(f"{ratio:.1f}" for ratio in ratios)]) + " |")
    if growth:
        lines += ["", "How the time grows with the depth of a network:", ""]
        lines += [
            "| network | convolutions | Secateur | per convolution, ms | with probe |",
            "|---|---:|---:|---:|---:|",
        ]
        for run in growth:
            plain, probed = (median(run["seconds"][contestant]) for contestant in OURS)
            each = 1000 * plain / run["convolutions"]
            cells = [run["network"], str(run["convolutions"]), f"{plain:.3f}", f"{each:.2f}", f"{probed:.3f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def count_convolutions(name: str) -> int:
    with torch.device("meta"):
        return sum(isinstance(module, nn.Conv2d) for module in find_model(f"torchvision:{name}").modules())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--repeats", type=int, default=5, help="repetitions of each measurement")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, help="only these, without growth, and print only")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every measured value there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warm_up(OURS | PEERS | GRAPH)
    runs = [
        {"network": name, "seconds": measure(name, OURS | PEERS | GRAPH, options.repeats)}
        for name in options.networks or NETWORKS
    ]
    growth = [
        {
            "network": name,
            "convolutions": count_convolutions(name),
            "seconds": measure(name, OURS, options.repeats),
        }
        for name in (() if options.networks else GROWING)
    ]
    page = report(runs, growth, options.repeats)
    print(page)
    if options.json:
        data = {"hardware": hardware(), "repeats": options.repeats, "seed": SEED, "ratio": RATIO, "size": SIZE}
        options.json.write_text(json.dumps({**data, "networks": runs, "growth": growth}, indent=1) + "\n")
    if not options.networks:
        DOCS.mkdir(exist_ok=True)
        (DOCS / "analysis_speed.md").write_text(page)


if __name__ == "__main__":
    main()
