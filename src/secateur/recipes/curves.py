"""What is left on the way down: accuracy before fine-tuning against what was removed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from secateur.files import numbers
from secateur.recipes.experiments import LEFT
from secateur.results.figures import draw_curves


class Removed(NamedTuple):
    """A moment of pruning: percent of the filters and MACs removed, and the main metric."""

    filters: float
    macs: float
    value: float


def path_of(events: Sequence[dict[str, Any]]) -> list[Removed]:
    """One point for every number of filters: the last one, after the Tock if there was one."""
    whole = events[0]["filters"]
    last = {event["filters"]: event for event in events if event["metrics"]}.values()
    return [Removed(100 * (1 - e["filters"] / whole), 100 * (1 - e["share"]), main_of(e["metrics"])) for e in last]


def unrefined(events: Sequence[dict[str, Any]]) -> float | None:
    """The main metric when pruning had ended, before fine-tuning; None where nothing was pruned or tested."""
    pruning = [event for event in events if event["event"] in ("Tick", "Tock")]
    return main_of(pruning[-1]["metrics"]) if pruning and pruning[-1]["metrics"] else None


def main_of(metrics: dict[str, float]) -> float:
    return next(iter(numbers(metrics).values()), float("nan"))


def draw_rankings(paths: dict[str, list[Removed]], against: str, figure: Path) -> None:
    """Curves by score, against filters or MACs removed, without the L1 term on the left and with it on the right."""
    curves = {name: [(getattr(each, against), each.value) for each in path] for name, path in paths.items()}
    # PCNN has no factors that the L1 term could shrink: it is the same on both sides.
    sparse = {
        name.removesuffix("-sparse"): curves[name] for name in curves if name.endswith("-sparse") or name == "pcnn"
    }
    plain = {name: curves[name] for name in curves if not name.endswith("-sparse")}
    what = {"filters": "filters", "macs": "MACs"}[against]
    panels = {"without the L1 term": plain, "with it": sparse}
    draw_curves(panels, figure, f"% of the {what} removed", "accuracy before fine-tuning (%)")


def table_of_rankings(paths: dict[str, list[Removed]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: the main metric when so many filters are removed, and the MACs left then."""
    shares = (20, 40, 60, 80)

    def cell(path: list[Removed], share: int) -> str:
        there = at(path, share)
        # Ticks of a rehearsal are large, and may skip a share.
        short = f"only {there.filters:.0f}% removed, " if share - there.filters > 2 else ""
        return f"{there.value:.2f} ({short}{100 - there.macs:.0f}% MACs left)"

    rows = [[name, *(cell(path, share) for share in shares)] for name, path in paths.items()]
    return ["score", *(f"{share}% of the filters removed" for share in shares)], rows


def at(path: Sequence[Removed], share: float) -> Removed:
    """The last moment before more than this percentage of the filters was removed."""
    return [each for each in path if each.filters <= share + 1e-9][-1]


def value_at(path: Sequence[Removed], against: str, share: float) -> float | None:
    """The main metric where this percentage is removed, on the line between two moments; None beyond the last."""
    for before, after in pairwise(path):
        low, high = getattr(before, against), getattr(after, against)
        if low <= share <= high:
            part = (share - low) / (high - low) if high > low else 1.0
            return before.value + part * (after.value - before.value)
    return None


def values_at(paths: Sequence[Sequence[Removed]], against: str, share: float) -> list[float]:
    """The same for every seed; none where one of them did not come so far."""
    values = [value_at(path, against, share) for path in paths]
    return [value for value in values if value is not None] if None not in values else []


def draw_scores(paths: dict[str, list[list[Removed]]], figure: Path) -> None:
    """The mean over seeds by score: against MACs removed on the left, and filters on the right."""
    panels = {"MACs": "macs", "filters": "filters"}
    curves = {
        title: {
            score: [(float(share), mean(found)) for share in range(101) if (found := values_at(seeds, against, share))]
            for score, seeds in paths.items()
        }
        for title, against in panels.items()
    }
    draw_curves(curves, figure, "% removed", "accuracy before fine-tuning (%)")


def table_by_macs(paths: dict[str, list[list[Removed]]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: the main metric where so many of the MACs are left, before fine-tuning."""
    left = (90, 80, 70, 60, *LEFT)

    def cell(seeds: list[list[Removed]], share: int) -> str:
        values = values_at(seeds, "macs", 100 - share)
        return spread(values) if values else "-"

    rows = [[score, *(cell(seeds, share) for share in left), str(len(seeds))] for score, seeds in paths.items()]
    return ["score, before fine-tuning", *(f"{share}% of the MACs" for share in left), "n"], rows


def spread(values: Sequence[float]) -> str:
    """The mean, and the standard deviation if there are several."""
    around = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{mean(values):.2f}{around}"
