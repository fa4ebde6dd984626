"""Draw docs/results.md and its figures from the runs kept under results/: `make results`.

Sections without runs are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, median
from typing import Any

from evidence import RESULTS, Evidence, read_all, spread

from secateur.recipes.reports import PAPER, curve
from secateur.results.figures import draw_curves, draw_structures

DOCS = Path(__file__).parent.parent / "docs"
Sets = dict[str, dict[str, list[Evidence]]]
WHOSE = {"": "the paper's", "-authors": "the authors'", "-ours": "ours"}
"""Whose settings a recipe has, by the end of its name."""
ELSEWHERE = """\
Reported by others for ResNet-56 on CIFAR-10: the paper 93.43 at -60.1% and 93.07 at -70.3% of the MACs; its authors'
code 93.16 at -70%; DepGraph 93.53 -> 93.64 at -61%; CHIP 93.26 -> 92.43 at -74%."""
INTRODUCTION = """\
# Results

On real CIFAR-10 and CIFAR-100, with the recipes as they come. Accuracy is the last epoch's on all test images, in
percent; where there are several seeds, mean ± standard deviation. Each row is made of files under `results/`, which
hold the recipe, all settings, the seed, the hardware, the versions, the seconds and the whole trajectory. `make
results` draws this page from them; the commands behind the runs are in [The paper's experiments](experiments.md)."""


def table(heads: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows])


def told(runs: list[Evidence]) -> str:
    """Hardware, versions, precision and seeds of runs."""
    hardware = sorted({run.data["hardware"] for run in runs})
    versions = sorted({run.data["versions"]["torch"].partition("+")[0] for run in runs})
    precision = sorted({run.data["engine"]["precision"] for run in runs})
    seeds = sorted({run.seed for run in runs})
    return (
        f"{' and '.join(hardware)}, torch {' and '.join(versions)}, {' and '.join(precision)}, "
        f"seeds {', '.join(map(str, seeds))}."
    )


def cost(runs: list[Evidence]) -> list[str]:
    return [f"{mean(run.left(what) for run in runs) - 1:+.1%}" for what in ("macs", "params")]


def accuracy(runs: list[Evidence]) -> list[str]:
    """Before fine-tuning, after it, and of how many seeds."""
    unrefined = [value for run in runs if (value := run.unrefined) is not None]
    return [spread(unrefined) if unrefined else "-", spread([run.metrics[1] for run in runs]), str(len(runs))]


def table1(sets: Sets) -> str:
    """Table 1: ResNet-56 on CIFAR-10"""
    rows, used = [], []
    for name in ("GBN-40", "GBN-30"):
        for end, whose in WHOSE.items():
            runs = sets.get(f"resnet56-cifar10{end}", {}).get(name, [])
            if runs:
                used += runs
                rows.append([f"{name}, {whose}", *cost(runs), *accuracy(runs), PAPER[name]])
    heads = ["network, settings", "MACs", "parameters", "before fine-tuning", "accuracy", "n", "the paper"]
    before = spread([run.metrics[0] for run in used]) if used else ""
    return page(used, f"The whole network: {before}.\n\n{table(heads, rows)}\n\n{ELSEWHERE}")


def search(sets: Sets) -> str:
    """How our recipe was chosen"""
    runs = sets.get("search", {})
    used = [run for each in runs.values() for run in each]
    if not used:
        return ""
    whole = used[0].data["settings"]
    rows = [[name, differences(whole, each[0]), *cost(each), *accuracy(each)] for name, each in runs.items()]
    heads = ["run", f"settings, where they differ from {used[0].name}", "MACs", "parameters", "before", "after", "n"]
    text = (
        "From a baseline of our own that was trained on 45,000 of the training images; accuracy is over the other "
        "5,000, which neither it nor the pruning has seen."
    )
    return page(used, f"{text}\n\n{table(heads, rows)}")


def differences(whole: dict[str, Any], run: Evidence) -> str:
    changed = {key: value for key, value in run.data["settings"].items() if value != whole.get(key) and key != "seed"}
    return ", ".join(f"{key} {value}" for key, value in changed.items()) or "-"


def table3(sets: Sets) -> str:
    """Table 3: three schedules for VGG-16-M on CIFAR-100"""
    rows, used = [], []
    for end, whose in WHOSE.items():
        runs = sets.get(f"vgg16m-cifar100{end}", {})
        for name in [f"{kind}-{share}" for share in (60, 40, 20) for kind in ("one-shot", "tick-only", "tick-tock")]:
            if name in runs:
                scratch = runs.get(f"{name}-scratch", [])
                used += [*runs[name], *scratch]
                again = spread([run.metrics[1] for run in scratch]) if scratch else "-"
                rows.append([f"{name}, {whose}", *cost(runs[name]), *accuracy(runs[name]), again, PAPER[name]])
    heads = ["schedule, settings", "MACs", "parameters", "before fine-tuning", "accuracy", "n", "from scratch"]
    return page(used, table([*heads, "the paper: parameters, fine-tuned / scratch"], rows))


def gfir(sets: Sets) -> str:
    """Figure GFIR: accuracy before fine-tuning against filters removed"""
    runs = sets.get("vgg16m-cifar100", {})
    names = [name for score in ("taylor", "slim", "pcnn", "l1", "random") for name in (score, f"{score}-sparse")]
    used = [runs[name][0] for name in names if name in runs]
    if not used:
        return ""
    curves = {run.name: curve(run.data["trajectory"]) for run in used}
    draw_curves(curves, DOCS / "images" / "gfir.svg", "% of the filters removed", "accuracy before fine-tuning (%)")
    text = (
        "VGG-16-M on CIFAR-100 stands in for the paper's CUB-200. taylor is the paper's GBN; -sparse has the L1 term."
    )
    return page(used, f"{text}\n\n![Accuracy against filters removed](images/gfir.svg)")


def nas(sets: Sets) -> str:
    """Figure NAS: a quarter of the MACs in three ways"""
    runs = sets.get("vgg16m-cifar100", {})
    names = [name for name in ("shrunk", "quarter", "quarter-scratch") if name in runs]
    rows = [
        [
            name,
            f"{mean(run.data['after']['params'] for run in runs[name]):,.0f}",
            *accuracy(runs[name])[1:],
            PAPER[name],
        ]
        for name in names
    ]
    used = [run for name in names for run in runs[name]]
    return page(used, table(["network", "parameters", "accuracy", "n", "the paper"], rows))


def appendix_e(sets: Sets) -> str:
    """Appendix E: what the three schedules leave at -80%"""
    runs = sets.get("vgg16m-cifar100", {})
    used = [runs[name][0] for kind in ("one-shot", "tick-only", "tick-tock") if (name := f"{kind}-20") in runs]
    if used:
        draw_structures([run.structure for run in used], DOCS / "images" / "appendix_e.svg")
    return page(used, "![Channels of every layer](images/appendix_e.svg)")


def times(sets: Sets) -> str:
    """Time: ResNet-56 to 30% of the MACs"""
    rows, used = [], []
    for end, whose in WHOSE.items():
        for run in sets.get(f"resnet56-cifar10{end}", {}).get("GBN-30", []):
            used.append(run)
            each = [seconds(run.events(kind)) for kind in ("Tick", "Tock", "FineTune")]
            rows.append([whose, str(run.seed), f"{run.data['seconds'] / 60:.1f}", *each])
    heads = ["settings", "seed", "minutes in all", "seconds per Tick", "per epoch of a Tock", "of fine-tuning"]
    note = (
        "The authors' code takes about 13 s for a Tick and 16.7 s for an epoch of a Tock on the same card. Runs that "
        "shared the card with others are slower than one that had it alone."
    )
    return page(used, f"{table(heads, rows)}\n\n{note}")


def seconds(events: list[dict[str, Any]]) -> str:
    return f"{median(event['seconds'] for event in events):.1f}" if events else "-"


def page(used: list[Evidence], text: str) -> str:
    """The section, if there is something in it."""
    return f"{text}\n\n{told(used)}" if used else ""


SECTIONS: list[Callable[[Sets], str]] = [table1, search, table3, gfir, nas, appendix_e, times]


def draw(sets: Sets) -> str:
    parts = [INTRODUCTION]
    for section in SECTIONS:
        if text := section(sets):
            parts.append(f"## {section.__doc__}\n\n{text}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (DOCS / "results.md").write_text(draw(read_all(RESULTS)))
    print(DOCS / "results.md")
