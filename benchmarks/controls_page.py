"""The section on controls: our recipe, and what differs from it in one thing."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev

from evidence import RESULTS, Evidence, cost, spread

from secateur.files import read_json
from secateur.recipes.reports import in_markdown as table

NETWORKS = {"controls-resnet56": "ResNet-56 on CIFAR-10", "controls-vgg16m": "VGG-16-M on CIFAR-100"}
ARMS = {
    "reference": "the reference",
    "slim": "score: Slim",
    "pcnn": "score: PCNN",
    "l1": "score: L1 norm",
    "random": "score: random",
    "one-shot": "all at once after the Tock",
    "tick-only": "no Tock",
    "tick-tock": "Tocks between Ticks: 5 epochs after every 3 Ticks",
    "no-repair": "no repair",
    "no-distillation": "no distillation",
    "no-squares": "no squares erased",
    "not-lifted": "from the network that was not trained once more",
    "scratch": "the reference's shape, random weights",
    "narrow": "evenly narrower, random weights",
}
TEXT = """\
All arms start from one network that was trained for 80 epochs more, but for those
that say otherwise, and have 50 epochs: a Tock of 10 and 40 of fine-tuning. The reference is our recipe, with repair
after every Tick. Its Tock comes first and alone: between and after its Ticks there is none, and so it is not Tick-Tock
as the paper has it; that is an arm of its own. A difference below twice its standard error counts as equal; an arm of
one seed is taken to spread as the reference does. Made by `secateur reproduce controls`.

{found}{missing}

The network trained once more: {lifted}.{whole}"""

FOUND = {
    "controls-resnet56": """\
Measured at -70% of the MACs; at -60% there is the reference alone, in the first row.

Two things matter: which channels go, and that training starts from trained weights. Channels chosen by L1 norm or at
random end below the reference; Taylor, Slim and PCNN are equal. The shape that pruning found, trained from random
weights for as many epochs, is no better than a network that is evenly narrower, and both stay below. The rest makes no
difference that three seeds would show at this budget: no Tock at all, one before the Ticks, or some between them; Ticks
or all at once; repair; distillation; erased squares; and training the whole network once more. The whole network gains
nothing from 50 epochs more either. Repair pays where there is less training after it; see
[without training](#without-training)."""
}
"""What the runs of a network have shown, which is read again when there are new ones."""
PEERS = {"taylor": "Torch-Pruning: group Taylor", "norm": "Torch-Pruning: group norm", "fastnas": "ModelOpt: FastNAS"}
HEAD_TO_HEAD = """\
**Head to head.** Another tool prunes the same trained network to 30% of the MACs. Loss, teacher, rates and the number
of epochs are ours; it removes a little in each of 100 steps and stops below the budget.

{table}

Made by `python benchmarks/head_to_head.py resnet56-cifar10-ours --data cifar --weights
results/controls-resnet56/lifted-seed0 --method METHOD --keep-macs 0.3 --seed SEED --device cuda --precision bf16`
({versions}). Not measured yet: {missing}."""
DEAD = """\
Runs that ended at chance are left out of the mean; n says how many runs are in it. Pruning broke those networks.
{dead}"""


def controls(sets: dict[str, dict[str, list[Evidence]]]) -> tuple[str, list[Evidence]]:
    """The text, and the runs in it; none where there are none."""
    parts, used = [], []
    for name, title in NETWORKS.items():
        arms = sets.get(name, {})
        rows = [row for percent in (60, 40, 30, 20) for row in rows_of(arms, percent)]
        if not rows:
            continue
        used += [run for arm in arms.values() for run in arm]
        lifted = spread(after(arms["lifted"])) if "lifted" in arms else "-"
        whole = f" The same after 50 epochs more: {spread(after(arms['whole']))}." if "whole" in arms else ""
        heads = ["what differs", "MACs", "parameters", "accuracy", "n", "against the reference"]
        known = {arm.rpartition("-")[0] or arm for arm in arms}
        missing = [arm for arm in (*ARMS, "whole") if arm not in known]
        told = f"\n\nNot measured yet: {', '.join(missing)}." if missing else ""
        given = {"lifted": lifted, "whole": whole, "found": FOUND.get(name, ""), "missing": told}
        parts += [f"{title}.", TEXT.format(**given), table(heads, rows)]
        if name == "controls-resnet56":
            parts += head_to_head(after(arms["reference-30"]))
        dead = [describe(run) for arm in arms.values() for run in arm if not alive(run)]
        parts += [DEAD.format(dead=" ".join(dead))] if dead else []
    return "\n\n".join(parts), used


def head_to_head(reference: Sequence[float]) -> list[str]:
    """What other tools come to, against our reference."""
    found = [read_json(path) for path in sorted((RESULTS / "head-to-head").glob("resnet56-*.json"))]
    rows = []
    for method, what in PEERS.items():
        if runs := [run for run in found if run["method"] == method]:
            values = [run["after"]["accuracy"] for run in runs]
            left = f"{mean(run['macs'] for run in runs) - 1:+.1%}"
            rows.append([what, left, spread(values), str(len(runs)), against(values, reference)])
    if not rows:
        return []
    missing = " and ".join(what for method, what in PEERS.items() if all(run["method"] != method for run in found))
    tools = ("torch-pruning", "nvidia-modelopt")
    versions = ", ".join(sorted({f"{tool} {run[tool]}" for run in found for tool in tools if tool in run}))
    heads = ["pruned by", "MACs", "accuracy", "n", "against the reference"]
    return [HEAD_TO_HEAD.format(table=table(heads, rows), versions=versions, missing=missing)]


def rows_of(arms: dict[str, list[Evidence]], percent: int) -> list[list[str]]:
    reference = arms.get(f"reference-{percent}", [])
    whole = reference[0] if reference else None
    rows = []
    for arm, what in ARMS.items():
        runs = arms.get(f"{arm}-{percent}", [])
        living = [run for run in runs if alive(run)]
        if living:
            n = str(len(runs)) if living == runs else f"{len(living)} of {len(runs)}"
            difference = against(after(living), after([run for run in reference if alive(run)]))
            rows.append([what, *cost(living, whole), spread(after(living)), n, difference])
    return rows


def alive(run: Evidence) -> bool:
    """Whether the network is better than twice chance."""
    return run.metrics[1] > 200 / run.data["network"]["options"]["num_classes"]


def describe(run: Evidence) -> str:
    """The layer that kept the smallest share of its channels."""
    layer = min(run.structure.layers, key=lambda layer: layer.after / layer.before)
    return f"`{run.name}` with seed {run.seed}: {layer.name} kept {layer.after} of {layer.before} channels."


def after(runs: Sequence[Evidence]) -> list[float]:
    return [run.metrics[1] for run in runs]


def against(values: Sequence[float], reference: Sequence[float]) -> str:
    """The difference of two means, or that it is no more than chance.

    One value alone is taken to spread as the reference does.

    >>> against([92.0, 92.1, 92.2], [93.0, 93.1, 93.2]), against([93.0, 93.2, 93.4], [93.0, 93.1, 93.2])
    ('-1.00', 'equal')
    >>> against([92.7], [93.0, 93.1, 93.2]), against([93.0], [93.0, 93.1, 93.2])
    ('-0.40', 'equal')
    """
    if len(reference) < 2 or not values or list(values) == list(reference):
        return "-"
    difference = mean(values) - mean(reference)
    around = stdev(values if len(values) > 1 else reference)
    error = sqrt(around**2 / len(values) + stdev(reference) ** 2 / len(reference))
    return "equal" if abs(difference) < 2 * error else f"{difference:+.2f}"
