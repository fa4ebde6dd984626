"""Pages of an experiment: the paper's tables with our numbers beside, and its figures.

Each function takes the finished runs and gives a page in Markdown; figures are drawn beside it. Runs that are not
finished are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from secateur.data.catalog import find_dataset
from secateur.errors import MissingExtra
from secateur.files import numbers, read_json_lines
from secateur.models.lookup import find_model
from secateur.recipes.curves import (
    draw_rankings,
    draw_scores,
    main_of,
    path_of,
    table_by_macs,
    table_of_rankings,
    unrefined,
)
from secateur.recipes.experiments import CURVE
from secateur.recipes.jobs import Order
from secateur.recipes.paper import find_recipe
from secateur.recipes.starts import open_network
from secateur.results.bench import latency
from secateur.results.figures import draw_structures
from secateur.results.load import load
from secateur.results.pictures import draw_predictions
from secateur.results.structure import Layer, Structure, read_structure
from secateur.training.checkpoint import read_config
from secateur.words import counted

BATCH = 64
"""Images of a batch for throughput."""
PAPER = {
    "GBN-40": "-60.1% MACs, -53.5% parameters, +0.33",
    "GBN-30": "-70.3% MACs, -66.7% parameters, -0.03",
    "GBN-60": "-40.54% MACs, -31.83% parameters, +0.31 (top 5 +0.16)",
    "GBN-50": "-55.06% MACs, -53.40% parameters, -0.67 (top 5 -0.26)",
    "one-shot-60": "-79.3%, 71.8 / 73.1",
    "one-shot-40": "-92.0%, 62.1 / 68.0",
    "one-shot-20": "-97.5%, 57.7 / 59.9",
    "tick-only-60": "-68.5%, 73.0 / 73.7",
    "tick-only-40": "-86.2%, 71.4 / 72.9",
    "tick-only-20": "-95.0%, 68.4 / 69.6",
    "tick-tock-60": "-69.0%, 74.6 / 73.7",
    "tick-tock-40": "-85.5%, 73.2 / 73.0",
    "tick-tock-20": "-94.7%, 71.2 / 69.9",
    "quarter": "-1.30, 1.1 M parameters",
    "quarter-scratch": "71.02",
    "shrunk": "-1.98, 3.7 M parameters",
    "pruned": "-27% MACs, -73% parameters, mIoU 62.84 -> 62.86",
}
"""What the paper reports for each run."""
SHORTCUT = re.compile("shortcut|downsample")
PAPER_SPEED = {"baseline": "864", "GBN-60": "1127 (+30%)", "GBN-50": "1237 (+43%)"}


@dataclass(frozen=True)
class Done:
    """The runs of an experiment."""

    order: Order
    runs: dict[str, dict[str, Any]]
    """Summaries by step."""
    folders: dict[str, Path]
    scale: float
    figure: Path
    """Where a figure goes."""

    def pruned(self) -> dict[str, dict[str, Any]]:
        """All but the baseline."""
        return {name: run for name, run in self.runs.items() if name != "baseline"}


def nothing_yet(done: Done) -> str:
    """Before the first network is pruned."""
    return page(done, ["network"], [])


def compared(done: Done) -> str:
    """Tables 1 and 2: what pruning does to cost and accuracy."""
    rows = [
        [name, change_of(run, "macs"), change_of(run, "params"), *changes(run), PAPER.get(name, "")]
        for name, run in done.pruned().items()
    ]
    return page(done, ["network", "MACs", "parameters", *metric_names(done.pruned()), "the paper"], rows)


def controlled(done: Done) -> str:
    """Controls: the same budget reached in other ways, and the epochs that each took."""
    rows = []
    for name, run in done.pruned().items():
        trained = [e for e in read_json_lines(done.folders[name] / "result" / "history.jsonl") if "epoch" in e]
        row = [name, change_of(run, "macs"), change_of(run, "params"), f"{main(run):.2f}", str(len(trained))]
        rows.append(row)
    return page(done, ["run", "MACs", "parameters", "accuracy", "epochs"], rows)


def untrained(done: Done) -> str:
    """Few images without labels: each budget in three ways."""
    runs, ways = done.pruned(), ("cut", "repaired", "distilled")
    rows = []
    for percent in dict.fromkeys(name.rpartition("-")[2] for name in runs):
        found = {way: runs[name] for way in ways if (name := f"{way}-{percent}") in runs}
        costs = [change_of(list(found.values())[-1], what) for what in ("macs", "params")]
        rows.append([f"{percent}%", *costs, *(", ".join(changes(found[way])) if way in found else "-" for way in ways)])
    heads = ["budget of MACs", "MACs", "parameters", *(f"{way}: {', '.join(metric_names(runs))}" for way in ways)]
    text = page(done, heads, rows)
    counts = [run["images"] for run in runs.values() if "images" in run]
    if counts:
        text += f"Images: {counts[0]['train']} without labels to prune with, {counts[0]['test']} others to test.\n"
    return text


def schedules(done: Done) -> str:
    """Table 3."""
    rows = []
    for name, run in done.runs.items():
        if name == "baseline" or name.endswith("-scratch"):
            continue
        control = done.runs.get(f"{name}-scratch")
        scratch = f"{main(control):.2f}" if control else "-"
        rows.append(
            [name, change_of(run, "macs"), change_of(run, "params"), f"{main(run):.2f}", scratch, PAPER.get(name, "")]
        )
    heads = [
        "schedule",
        "MACs",
        "parameters",
        "fine-tuned",
        "from scratch",
        "the paper: parameters, fine-tuned / scratch",
    ]
    return page(done, heads, rows)


def rankings(done: Done) -> str:
    """Figure GFIR: accuracy before fine-tuning against filters removed."""
    paths = {name: path_of(read_json_lines(done.folders[name] / "result" / "history.jsonl")) for name in done.pruned()}
    draw_rankings(paths, "filters", done.figure)
    return page(done, *table_of_rankings(paths), drawn=True)


def photographed(done: Done) -> str:
    """Photographs: networks that were fine-tuned, beside the whole one; then scores without fine-tuning."""
    events = {name: read_json_lines(done.folders[name] / "result" / "history.jsonl") for name in done.pruned()}
    rows = []
    for name, run in done.pruned().items():
        if name.startswith(CURVE):
            continue
        trained = sum(event["event"] in ("Tock", "FineTune", "Train") for event in events[name])
        rows.append([name, *costs_of(run, events[name]), *changes(run), str(trained)])
    metrics = metric_names(done.pruned())
    heads = ["run", "MACs", "parameters", "before fine-tuning", *metrics, "epochs"]
    paths = {name.removeprefix(CURVE): [path_of(events[name])] for name in events if name.startswith(CURVE)}
    if not paths:
        return page(done, heads, rows)
    draw_scores(paths, done.figure)
    return page(done, heads, rows, drawn=True) + f"\n{in_markdown(*table_by_macs(paths))}\n"


def architectures(done: Done) -> str:
    """Figure NAS: networks of the same cost, and the widths of their layers."""
    whole = next((run["before"] for name, run in done.runs.items() if name == "quarter"), None)
    rows = []
    for name, run in done.pruned().items():
        change = f"{main(run) - main_of(whole['metrics']):+.2f}" if whole is not None else "-"
        after = run["after"]
        rows.append(
            [name, f"{after['macs']:,}", f"{after['params']:,}", f"{main(run):.2f}", change, PAPER.get(name, "")]
        )
    draw_architectures(
        {name: read_structure(done.folders[name] / "result") for name in ("quarter", "shrunk") if name in done.runs},
        done.figure,
    )
    return page(done, ["network", "MACs", "parameters", "accuracy", "change", "the paper"], rows, drawn=True)


def draw_architectures(structures: dict[str, Structure], figure: Path) -> None:
    """The pruned network and the narrower one, or whichever there is."""
    if len(structures) == 2:
        pruned, narrow = structures["quarter"], structures["shrunk"]
        # The narrower network was never wide: it is drawn against the same whole one.
        layers = [Layer(w.name, w.before, n.after) for w, n in zip(pruned.layers, narrow.layers, strict=True)]
        structures = {"quarter": replace(pruned, title="pruned"), "shrunk": Structure("shrunk", layers)}
    draw_structures(list(structures.values()), figure)


def structures(done: Done) -> str:
    """Appendix E: channels of every layer."""
    return drawn_structures(done, percent=False)


def percentages(done: Done) -> str:
    """Appendix D: what was removed of every layer."""
    return drawn_structures(done, percent=True)


def drawn_structures(done: Done, percent: bool) -> str:
    found = [replace(read_structure(done.folders[name] / "result"), title=name) for name in done.pruned()]
    if percent:
        # The paper leaves them out.
        kept = [[x for x in each.layers if not SHORTCUT.search(x.name)] for each in found]
        found = [replace(each, layers=layers) for each, layers in zip(found, kept, strict=True)]
    draw_structures(found, done.figure, percent=percent)
    layers = found[0].layers
    rows = [
        [layer.name, str(layer.before), *(str(each.layers[index].after) for each in found)]
        for index, layer in enumerate(layers)
    ]
    return page(done, ["layer", "before", *(each.title for each in found)], rows, drawn=True)


def throughput(done: Done) -> str:
    """Images per second, taken by turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = find_recipe(done.order.recipe)
    networks: dict[str, torch.nn.Module] = {}
    for name, run in done.pruned().items():
        # The name is the user's own, from the command line, and not the file's.
        build = partial(find_model, recipe.network, **run["network"]["options"])
        networks.setdefault("baseline", build().to(device))
        networks[name] = load(done.folders[name], build=build).to(device)
    size = recipe.input_size or find_dataset(recipe.data).input_size
    seconds = latency(networks, torch.randn(BATCH, *size, device=device))
    rows = []
    for name, value in seconds.items():
        faster = f"{seconds['baseline'] / value - 1:+.0%}"
        rows.append([name, f"{BATCH / value:.0f}", faster, PAPER_SPEED.get(name, "")])
    heads = ["network", "images/s", "faster by", "the paper (Titan X Pascal)"]
    return page(done, heads, rows)


def pictures(done: Done) -> str:
    """Appendix C: mean IoU, and images with their labels and what the networks predict."""
    runs = done.pruned()
    rows = []
    for name, run in runs.items():
        events = read_json_lines(done.folders[name] / "result" / "history.jsonl")
        epochs = sum("epoch" in event for event in events)
        rows.append([name, *costs_of(run, events), *changes(run), str(epochs), PAPER.get(name, "")])
    heads = ["network", "MACs", "parameters", "before fine-tuning", *metric_names(runs), "epochs"]
    text = page(done, [*heads, "the paper: FCN-32s, VOC"], rows)
    try:
        draw_networks(done)
    except MissingExtra as error:
        return f"{text}\nNo pictures are drawn: {error}\n"
    return f"{text}\n![What the networks predict]({done.figure.name})\n"


def costs_of(run: dict[str, Any], events: Sequence[dict[str, Any]]) -> list[str]:
    """The changes of MACs and parameters, and the main metric before fine-tuning."""
    before = unrefined(events)
    return [change_of(run, "macs"), change_of(run, "params"), f"{before:.2f}" if before is not None else "-"]


def draw_networks(done: Done) -> None:
    """The whole network's predictions, and those of the pruned ones that are finished."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = find_recipe(done.order.recipe)
    _, test = find_dataset(recipe.data).load(done.order.data, 1)
    networks = {
        name: open_network(replace(done.order, weights=str(done.folders[name])), device).model
        for name in ("baseline", "pruned", "half")
        if name in done.folders
    }
    draw_predictions(networks, test, done.figure)


def main(run: dict[str, Any]) -> float:
    """The main metric after the run."""
    return main_of(run["after"]["metrics"])


def change_of(run: dict[str, Any], what: str) -> str:
    """The relative change of a cost."""
    return f"{run['after'][what] / run['before'][what] - 1:+.1%}"


def metric_names(runs: dict[str, dict[str, Any]]) -> list[str]:
    return list(next(iter(runs.values()))["after"]["metrics"]) if runs else []


def changes(run: dict[str, Any]) -> list[str]:
    before, after = (numbers(run[end]["metrics"]) for end in ("before", "after"))
    return [f"{before[name]:.2f} -> {value:.2f} ({value - before[name]:+.2f})" for name, value in after.items()]


def unlike_the_recipe(order: Order) -> list[str]:
    """What differs from the recipe."""
    recipe = find_recipe(order.recipe)
    texts = {
        f"width {order.width:g}": order.width != 1,
        f"batches of {order.batch_size}": order.batch_size not in (None, recipe.batch_size),
        f"squares of {order.erase} pixels erased": order.erase not in (None, recipe.erase),
        f"tested on {counted(order.hold_out, 'image')} held out of the training data": order.hold_out,
    }
    return [text for text, differs in texts.items() if differs]


def precisions(done: Done) -> list[str]:
    """The number formats of the runs; finished runs may have another than the present command asks for."""
    folders = [done.folders[name] for name in done.runs if name in done.folders]
    runs = [folder for folder in folders if (folder / "config.json").is_file()]
    return sorted({read_config(run)["engine"]["precision"] for run in runs})


def page(done: Done, heads: list[str], rows: list[list[str]], drawn: bool = False) -> str:
    """A table, and how it was measured."""
    runs = list(done.runs.values())
    facts = [f"recipe {done.order.recipe}", *unlike_the_recipe(done.order)]
    if runs:
        seeds = sorted({run["settings"]["seed"] for run in runs})
        facts += [
            " and ".join(sorted({run["hardware"] for run in runs})),
            " and ".join(precisions(done)),
            f"torch {runs[0]['versions']['torch']}",
            f"seed {', '.join(map(str, seeds))}, n = 1",
            f"{sum(run['seconds'] for run in runs):.0f} s of training in all",
        ]
    else:
        facts.append("no run is finished")
    note = f"\nA rehearsal: everything is {done.scale:g} times as long as it should be.\n" if done.scale != 1 else ""
    image = f"\n![Figure]({done.figure.name})\n" if drawn else ""
    measured = f"Measured: {', '.join(filter(None, facts))}. MACs are multiply-adds."
    return "\n".join([in_markdown(heads, rows), "", measured, note, image]).rstrip() + "\n"


def in_markdown(heads: list[str], rows: Iterable[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows])
