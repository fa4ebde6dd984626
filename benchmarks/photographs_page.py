"""The section on photographs: a network from ImageNet weights, fine-tuned to birds, and pruned."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from controls_page import after, against
from evidence import RESULTS, Evidence, accuracy, cost, spread

from secateur.files import read_json
from secateur.recipes.curves import draw_scores, path_of, table_by_macs
from secateur.recipes.experiments import CURVE, LEFT, SCORES
from secateur.recipes.reports import in_markdown as table

SET = "mobilenetv2-cub200"
ARMS = {
    "taylor": "Taylor, ours",
    "plain": "Taylor, no repair, no distillation",
    "random": "random, ours",
    "l1": "L1 norm, ours",
    "slim": "Slim, ours",
    "pcnn": "PCNN, ours",
}
TEXT = """\
MobileNet-v2 with torchvision's ImageNet weights, fine-tuned to the 200 species of CUB-200-2011: 5,994 photographs to
train and 5,794 to test, in the official split. They are read as folders of classes, so that the boxes around the birds
are not used; their shorter side was reduced to 176 pixels, and the network sees 160x160. All runs start from that one
network, and all seeds share it. Made by `secateur reproduce photographs`."""
TUNED = """\
By Tick-Tock, then fine-tuned. Ours repairs after every Tick, ranks by score per MAC to the power of a quarter, and
learns from the network that it started from. All settings were fixed before the first test on these photographs."""
PLAIN = "Those without repair and distillation do none of that."
WHOLE = """\
The whole network, trained as long, learns from the same one in the same way, for at least as many epochs as a pruned
one. A difference below twice its standard error counts as equal; an arm of one seed is taken to
spread as the whole network does."""
CURVES = """\
Scores with Tick-Tock alone, without repair and fine-tuning: {ticks} Ticks of {removes:.0%} of the filters that are
left, and {tocks} Tocks, down to {left:.0%} of them. Between two Ticks the accuracy is read off the line.

![Accuracy against MACs removed, and against filters removed](images/photographs.svg)"""


def photographs(sets: dict[str, dict[str, list[Evidence]]], figure: Path) -> tuple[str, list[Evidence]]:
    """The text, and the runs in it; the figure is drawn."""
    runs = sets.get(SET, {})
    rows, used = tuned(runs)
    more = [PLAIN] * any(name.startswith("plain") for name in runs) + [WHOLE] * ("whole" in runs)
    parts = [TEXT, " ".join([TUNED, *more]), table(heads(), rows)] if rows else []
    curves = {score: found for score in SCORES if (found := runs.get(f"{CURVE}{score}"))}
    if curves:
        paths = {score: [path_of(run.data["trajectory"]) for run in found] for score, found in curves.items()}
        draw_scores(paths, figure)
        first = next(iter(curves.values()))[0]
        settings = first.data["settings"]
        told = CURVES.format(
            ticks=len(first.events("Tick")),
            removes=settings["tick_removes"],
            tocks=max([0, *(event["number"] for event in first.events("Tock"))]),
            left=settings["keep_filters"],
        )
        parts += [*([] if parts else [TEXT]), told, table(*table_by_macs(paths))]
        used += [run for found in curves.values() for run in found]
    return "\n\n".join(parts), used


def heads() -> list[str]:
    told = ["network", "MACs", "parameters", "before fine-tuning", "accuracy", "n", "against the whole"]
    return [*told, "against the whole, trained as long", *speeds()]


def tuned(runs: dict[str, list[Evidence]]) -> tuple[list[list[str]], list[Evidence]]:
    """Rows of the whole network, of the same trained as long, and of each pruned one; and their runs."""
    arms = {name: runs[name] for percent in LEFT for arm in ARMS if (name := f"{arm}-{percent}") in runs}
    if not arms:
        return [], []
    start = next(iter(arms.values()))[0].metrics[0]
    rate = speeds().values()
    rows = [["the whole network", "-", "-", "-", f"{start:.2f}", "1", "-", "-", *(known["whole"] for known in rate)]]
    whole = runs.get("whole", [])
    if whole:
        told = [spread(after(whole)), str(len(whole)), from_start(whole, start), "-"]
        rows.append(["the whole network, trained as long", "-", "-", "-", *told, *("" for _ in rate)])
    for name, found in arms.items():
        arm, _, percent = name.rpartition("-")
        told = [*cost(found), *accuracy(found), from_start(found, start), against(after(found), after(whole))]
        rows.append([f"to {percent}%: {ARMS[arm]}", *told, *(known.get(f"{SET}/{name}-seed0", "") for known in rate)])
    return rows, [run for found in [whole, *arms.values()] for run in found]


def from_start(runs: list[Evidence], start: float) -> str:
    """The difference from the one network that all runs start from."""
    values = after(runs)
    return against(values, [start, start]) if len(values) > 1 else f"{mean(values) - start:+.2f}"


def speeds() -> dict[str, dict[str, str]]:
    """Images per second of the seeds 0, by where they were measured, and by how much the pruned ones are faster."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted((RESULTS / "speed").glob("*.json")):
        told = read_json(path)
        whole, *others = told["networks"]
        if any(each["name"].startswith(f"{SET}/") for each in others):
            rates = {each["name"]: each["throughput"] for each in others}
            column = f"images/s, {told['where']}, {told['runner']}, batch {whole['batch']}"
            found[column] = {"whole": f"{whole['throughput']:,.0f}"} | {
                name: f"{rate:,.0f} ({rate / whole['throughput'] - 1:+.0%})" for name, rate in rates.items()
            }
    return found
