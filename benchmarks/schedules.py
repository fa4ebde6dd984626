"""One-Shot, Tick-Only and Tick-Tock at the same cost, on handwritten digits.

python benchmarks/schedules.py                     5 seeds at 20% of the MACs, into docs/schedules.md
python benchmarks/schedules.py --seeds 1 --keep-macs 0.4      something else, printed only
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from coverage_report import hardware

import secateur
from secateur.data.digits import digits
from secateur.recipes.demo import SETTINGS, train_baseline
from secateur.runs.events import Tick

DOCS = Path(__file__).parent.parent / "docs"
SEEDS, SHARE = 5, 0.2
SCHEDULES = {
    "One-Shot": secateur.TickTock.one_shot,
    "Tick-Only": secateur.TickTock.tick_only,
    "Tick-Tock": secateur.TickTock.of,
}
COMMON = {"tick_removes": 0.02, "tock_epochs": 3, "tock_lr": 2e-2, "finetune_epochs": 15}
METHOD = """A ResNet-14 for 8x8 images, trained as `secateur demo` does it, then pruned to {share:.0%} of its MACs and
fine-tuned for 15 epochs, alike for all three. One-Shot scores once and removes everything at once. Tick-Only removes
2% of the remaining filters after each epoch on the gates. Tick-Tock also trains everything for 3 epochs, with the L1
term on the gates, after every 10 of those. Accuracy in percent on the 359 test images, of the last epoch. Mean and
standard deviation over the seeds; a seed changes the baseline too."""


def run_seed(seed: int, share: float) -> list[dict[str, Any]]:
    """Every schedule from one baseline."""
    torch.set_num_threads(1)
    train, test = digits()
    task = secateur.classification(train, test)
    model = train_baseline(task, seed, lambda text: None)
    graph = secateur.analyze(model, test.images[:1])
    rows = []
    for name, build in SCHEDULES.items():
        own = {key: value for key, value in COMMON.items() if name != "One-Shot" or key != "tick_removes"}
        settings = build(keep_macs=share, seed=seed, finetune_lr=SETTINGS.finetune.lr, **own)
        result = secateur.prune(model, test.images[:1], task, settings=settings, graph=graph)
        pruned = next(e for e in reversed(result.history) if isinstance(e, Tick))
        rows.append(
            {
                "schedule": name,
                "seed": seed,
                "baseline": result.metrics_before["accuracy"],
                "before": pruned.metrics["accuracy"],
                "after": result.metrics["accuracy"],
                "macs": result.after.macs / result.before.macs,
                "params": result.after.params / result.before.params,
                "epochs": len(result.history) - 1,
            }
        )
        print(f"seed {seed}, {name}: {rows[-1]['before']:.2f} -> {rows[-1]['after']:.2f}", flush=True)
    return rows


def report(rows: list[dict[str, Any]], share: float, seeds: int) -> str:
    def cell(name: str, key: str, scale: float = 1.0, digits: int = 2) -> str:
        values = [scale * row[key] for row in rows if row["schedule"] == name]
        spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{mean(values):.{digits}f}{spread}"

    lines = [
        "# One-Shot, Tick-Only, Tick-Tock",
        "",
        f"Made by `make schedules` (`python benchmarks/schedules.py`) on {hardware()}; n = {seeds} seeds.",
        "",
        METHOD.format(share=share),
        "",
        "| schedule | MACs left (%) | parameters left (%) | epochs | baseline | pruned | fine-tuned |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in SCHEDULES:
        sizes = f"{cell(name, 'macs', 100, 1)} | {cell(name, 'params', 100, 1)} | {cell(name, 'epochs', 1, 0)}"
        accuracies = " | ".join(cell(name, key) for key in ("baseline", "before", "after"))
        lines.append(f"| {name} | {sizes} | {accuracies} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many")
    parser.add_argument("--keep-macs", type=float, default=SHARE, help="share of the MACs that is left")
    options = parser.parse_args()
    workers = min(options.seeds, os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        parts = pool.map(partial(run_seed, share=options.keep_macs), range(options.seeds), chunksize=1)
    page = report([row for part in parts for row in part], options.keep_macs, options.seeds)
    print(page)
    if (options.seeds, options.keep_macs) == (SEEDS, SHARE):
        (DOCS / "schedules.md").write_text(page)


if __name__ == "__main__":
    main()
