"""The budget of a run, as a line across what is left of the network."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from looking import figures_of

from secateur.files import read_json_lines
from secateur.results.report.page import make_sections, render
from secateur.results.report.read import read_runs


def copy_with(source: Path, target: Path, **budget: float) -> Path:
    """A run with another budget."""
    shutil.copytree(source, target)
    for path in (target / "config.json", target / "result" / "summary.json"):
        data = json.loads(path.read_text())
        data["settings"] |= {"keep_macs": None, **budget}
        path.write_text(json.dumps(data))
    return target


def budgets_in(name: str, *runs: Path) -> list[tuple[str, float, str]]:
    """The name, place and colour of each budget in a chart."""
    shapes = figures_of(render(read_runs(runs)))[name]["layout"]["shapes"]
    lines = [shape for shape in shapes if shape["type"] == "line" and shape.get("name")]
    assert all(line["y0"] == line["y1"] and line["line"]["dash"] == "dot" for line in lines)
    return [(line["name"], line["y0"], line["line"]["color"]) for line in lines]


def captions(*runs: Path) -> dict[str, str]:
    return {chart.id: chart.caption for section in make_sections(read_runs(runs)) for chart in section.charts}


def test_it_is_a_line_and_in_the_caption(runs: dict[str, Path]) -> None:
    assert budgets_in("cost", runs["taylor"]) == [("budget: 50% of the MACs", 50, "--series-1")]
    assert captions(runs["taylor"])["cost"].endswith("; budget: 50% of the MACs.")


@pytest.mark.parametrize(("key", "word", "place"), [("params", "parameters", 2), ("filters", "filters", 3)])
def test_it_has_the_colour_of_what_it_counts(
    key: str, word: str, place: int, runs: dict[str, Path], tmp_path: Path
) -> None:
    run = copy_with(runs["taylor"], tmp_path / "run", **{f"keep_{key}": 0.125})
    assert budgets_in("cost", run) == [(f"budget: 12.5% of the {word}", 12.5, f"--series-{place}")]


def test_of_time_with_a_line_of_the_time_that_is_left(runs: dict[str, Path], tmp_path: Path) -> None:
    run = copy_with(runs["taylor"], tmp_path / "run", keep_latency=0.7)
    events = read_json_lines(run / "events.jsonl")
    times = [1 - 0.01 * place for place in range(len(events))]
    for event, time in zip(events, times, strict=True):
        event["left"] = {"microseconds": time}
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert budgets_in("cost", run) == [("budget: 70% of the time", 70, "--series-4")]
    *_, line = figures_of(render(read_runs([run])))["cost"]["data"]
    assert (line["name"], line["y"]) == ("time", pytest.approx([100 * time for time in times]))


def test_of_several_runs_each_is_drawn_once(runs: dict[str, Path], tmp_path: Path) -> None:
    smaller = copy_with(runs["slim"], tmp_path / "smaller", keep_macs=0.25)
    assert budgets_in("cost", runs["taylor"], runs["slim"], smaller) == [
        ("budget: 50% of the MACs", 50, "--quiet"),
        ("budget: 25% of the MACs", 25, "--series-3"),
    ]


def test_runs_are_compared_by_what_their_budgets_count(runs: dict[str, Path], tmp_path: Path) -> None:
    light = copy_with(runs["slim"], tmp_path / "light", keep_params=0.6)
    found = (runs["training"], runs["taylor"], light)
    assert budgets_in("cost", *found) == [("budget: 50% of the MACs", 50, "--series-2")]
    assert budgets_in("cost-params", *found) == [("budget: 60% of the parameters", 60, "--series-3")]
    events = read_json_lines(light / "events.jsonl")
    line = figures_of(render(read_runs(found)))["cost-params"]["data"][1]
    assert line["y"] == pytest.approx([100 * event["params"] / events[0]["params"] for event in events], rel=1e-5)
    assert "budget: 60% of the parameters." in captions(*found)["cost-params"]


def test_training_has_none(runs: dict[str, Path], tmp_path: Path) -> None:
    assert "budget" not in str(captions(runs["training"]))
    assert budgets_in("cost", runs["training"], runs["slim"]) == [("budget: 50% of the MACs", 50, "--series-2")]


@pytest.mark.parametrize("share", [0, -1, 7, "0.5", None, True, [0.5]])
def test_what_is_no_share_is_none(share: Any, runs: dict[str, Path], tmp_path: Path) -> None:
    run = copy_with(runs["slim"], tmp_path / "run", keep_macs=share)
    assert budgets_in("cost", run) == []
