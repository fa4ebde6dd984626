"""Real runs kept as data: one JSON file per run under results/, from which `make results` draws every table and figure.

python benchmarks/evidence.py runs/resnet56-cifar10/*-seed0        finished runs, into results/resnet56-cifar10/
python benchmarks/evidence.py --set search runs/search/*           into results/search/
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from secateur.errors import InvalidSetting
from secateur.files import read_json, read_json_lines
from secateur.recipes.curves import main_of, spread, unrefined
from secateur.recipes.paper import find_recipe, is_recipe
from secateur.results.structure import Layer, Structure

RESULTS = Path(__file__).parent.parent / "results"
KEPT_OF_EVENTS = ("event", "phase", "number", "epoch", "share", "params", "filters", "metrics", "seconds")


@dataclass(frozen=True)
class Evidence:
    """One run."""

    name: str
    seed: int
    data: dict[str, Any]

    @property
    def metrics(self) -> tuple[float, float]:
        """The main number before and after."""
        return main_of(self.data["before"]["metrics"]), main_of(self.data["after"]["metrics"])

    def left(self, what: str, whole: Evidence | None = None) -> float:
        """The share of MACs or parameters that is left, of those that this run or `whole` began with."""
        return self.data["after"][what] / (whole or self).data["before"][what]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.data["trajectory"] if event["event"] == kind]

    @property
    def unrefined(self) -> float | None:
        """The main number when pruning had ended, before fine-tuning."""
        return unrefined(self.data["trajectory"])

    @property
    def seconds(self) -> float:
        """In all; the first runs counted retraining separately."""
        return self.data["seconds"] + self.data.get("again", {}).get("seconds", 0)

    @property
    def retrained(self) -> float:
        """The main number of the whole network when it was retrained."""
        events = [event for event in self.events("Train") if event["phase"] == "retrain"]
        return main_of(events[-1]["metrics"] if events else self.data["again"]["metrics"])

    @property
    def trains_only(self) -> bool:
        """Whether nothing was to be removed; in the first runs, training was pruning to all of the MACs."""
        return self.data["settings"].get("keep_macs", 1) == 1

    @property
    def structure(self) -> Structure:
        return Structure(self.name, [Layer(*row) for row in self.data["layers"]])


def keep(run: Path, group: str | None) -> Path:
    """Put what matters of a finished run under results/: everything but weights, and no path of the machine's."""
    summary = run / "result" / "summary.json"
    if not summary.is_file():
        raise InvalidSetting(f"{run} is not finished")
    data = read_json(summary)
    order = data["order"]
    if is_recipe(order["recipe"]):
        # What the recipe says by now, which may change.
        recipe = find_recipe(order["recipe"])
        order |= {name: getattr(recipe, name) for name in ("batch_size", "erase") if order[name] is None}
    for key in ("data", "weights", "teacher"):
        if order.get(key) is not None:
            order[key] = Path(order[key]).name
    events = read_json_lines(run / "result" / "history.jsonl")
    data["engine"] = read_json(run / "config.json")["engine"]
    data["trajectory"] = [{key: event[key] for key in KEPT_OF_EVENTS if key in event} for event in events]
    folder = RESULTS / (group or run.resolve().parent.name)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{run.name}.json"
    target.write_text(json.dumps(data, separators=(",", ":")) + "\n")
    return target


def read_all(folder: Path = RESULTS) -> dict[str, dict[str, list[Evidence]]]:
    """By set and by name of the run: one for every seed."""
    found: dict[str, dict[str, list[Evidence]]] = {}
    for path in sorted(folder.glob("*/*.json")):
        match = re.fullmatch(r"(.+)-seed(\d+)", path.stem)
        if match is None:
            continue
        name, seed = match[1], int(match[2])
        found.setdefault(path.parent.name, {}).setdefault(name, []).append(Evidence(name, seed, read_json(path)))
    return found


def accuracy(runs: list[Evidence]) -> list[str]:
    """Before fine-tuning, after it, and of how many seeds."""
    unrefined = [value for run in runs if (value := run.unrefined) is not None]
    fewer = f" (n = {len(unrefined)})" if len(unrefined) < len(runs) else ""
    before = spread(unrefined) + fewer if unrefined else "-"
    return [before, spread([run.metrics[1] for run in runs]), str(len(runs))]


def cost(runs: Sequence[Evidence], whole: Evidence | None = None) -> list[str]:
    """The relative changes of MACs and parameters, in the mean; against those that `whole` began with, or each run."""
    left = [[run.left(what, whole) for run in runs] for what in ("macs", "params")]
    return [f"{mean(shares) - 1:+.1%}" for shares in left]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--set", help="folder under results/; else the name of the folder that the run is in")
    options = parser.parse_args()
    for run in options.runs:
        print(keep(run, options.set))


if __name__ == "__main__":
    main()
