"""The section on Group Pruning: which networks lose channels of their trunks, and what that costs."""

from __future__ import annotations

from collections import defaultdict
from statistics import mean
from typing import Any

from evidence import RESULTS, Evidence, spread

from secateur.files import read_json
from secateur.recipes.reports import in_markdown as table

TRUNKS = ("conv1", "stage2.0.conv2", "stage3.0.conv2")
"""The first layer of each trunk of ResNet-56."""
LAYERS = 57
RANKS = {"score": "score", "score_per_mac": "score per MAC"}
TEXT = """\
A trunk is a group of channels coupled by residual sums: one channel has a gate in every block of its stage. The scores
of these gates add up, so the channel goes late in a ranking by score. It saves MACs in as many layers, so it goes
earlier by score per MAC.

**All at once, without training.** The checkpoint of the paper's authors, Taylor's score on {labelled} images, repaired
with {images} others. "Kept": the trunks must stay whole.

{table}

By score the trunks stay whole down to a tenth of the MACs. By score per MAC they shrink, the more the less is left, and
that does not pay: at 40% of the MACs and below the network is better with its trunks kept, and better than by score.
The score of a gate is about that gate alone, but the channel leaves all blocks at once. So keep the trunks if you cut
deep in one step: `--at-least conv1 1.0 stage2.0.conv2 1.0 stage3.0.conv2 1.0`; `secateur analyze` shows the names.
Small steps, [above](#without-training), come to a little more, at many times the cost.

Made by `python benchmarks/trunks.py resnet56@cifar10 --data cifar --weights WEIGHTS --seed SEED`.

{where}.

**In Ticks, with training.** Of the {runs} pruned ResNet-56 on this page, {whole} have whole trunks, with the paper's
settings, the authors' and ours, whatever the rank: what is left is scored anew after each Tick, and channels of a trunk
never come to the end of the list. The network that the paper's authors published at -70% has whole trunks too. The
others are controls, whose scores say little:
{others}."""


def trunks(sets: dict[str, dict[str, list[Evidence]]]) -> str:
    """Group Pruning: when trunks shrink, and whether it pays"""
    files = [read_json(path) for path in sorted((RESULTS / "trunks").glob("resnet56-cifar10-*.json"))]
    if not files:
        return ""
    runs = [run for arms in sets.values() for arm in arms.values() for run in arm if is_pruned_resnet56(run)]
    cut = [run for run in runs if not has_whole_trunks(run)]
    arms = {run.name: [widths_of(each) for each in cut if each.name == run.name] for run in cut}
    return TEXT.format(
        labelled=files[0]["labelled"],
        images=files[0]["images"],
        table=table(["ranked by", "MACs", "trunks, free", "accuracy, free", "kept", "n"], rows_of(files)),
        where=f"{files[0]['device']}, torch {files[0]['torch'].partition('+')[0]}, seeds 0 to {len(files) - 1}",
        runs=len(runs),
        whole=len(runs) - len(cut),
        others="; ".join(f"`{name}` with {', '.join(widths)}" for name, widths in arms.items()),
    )


def rows_of(files: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each rank and share, over all seeds."""
    found: dict[tuple[str, int], dict[bool, list[dict[str, Any]]]] = defaultdict(lambda: {True: [], False: []})
    for file in files:
        for row in file["rows"]:
            found[row["rank"], round(10 * row["macs"])][row["free"]].append(row)
    rows = []
    for (rank, tenths), by in found.items():
        widths = zip(*(row["trunks"].values() for row in by[True]), strict=True)
        free, kept = ([row["repaired"] for row in by[each]] for each in (True, False))
        shown = "/".join(f"{mean(each):.0f}" for each in widths)
        rows.append([RANKS[rank], f"{tenths}0%", shown, spread(free), spread(kept), str(len(free))])
    return rows


def is_pruned_resnet56(run: Evidence) -> bool:
    layers = run.structure.layers
    return len(layers) == LAYERS and layers[0].name == TRUNKS[0] and any(each.after < each.before for each in layers)


def has_whole_trunks(run: Evidence) -> bool:
    return all(each.after == each.before for each in run.structure.layers if each.name in TRUNKS)


def widths_of(run: Evidence) -> str:
    return "/".join(str(each.after) for each in run.structure.layers if each.name in TRUNKS)
