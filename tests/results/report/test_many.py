"""Runs of very many events, some of which are drawn, and of very many layers."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from looking import figures_of

from secateur.errors import InvalidData
from secateur.results.report.page import render
from secateur.results.report.read import MOST_MOMENTS, read_run, thinned


def written(folder: Path, ticks: int) -> list[dict]:
    """Repeat the Ticks and Tocks of a run, until there are so many."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    start, end = events[0], events[-1]
    tick = next(event for event in events if event["event"] == "Tick")
    tock = {**tick, "event": "Tock", "epoch": 1, "epochs": 2, "removed": {}}
    group = next(iter(tick["removed"]))
    middle = [
        event
        for number in range(1, ticks + 1)
        for event in (
            {**tick, "number": number, "removed": {group: int(number % 1000 == 0)}},
            {**tock, "number": number},
        )
    ]
    made = [start, *middle, end]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in made))
    return made


def test_what_is_not_drawn_is_counted(copied: Path) -> None:
    events = written(copied, 3 * MOST_MOMENTS)
    run = read_run(copied, "run")
    assert MOST_MOMENTS / 2 < len(run.moments) <= MOST_MOMENTS + 4
    assert run.facts["events"] == f"{len(events):,}, of which one in 7 is drawn"
    removed, wanted = Counter[str](), Counter[str]()
    for moment in run.moments:
        removed.update(moment.removed)
    for event in events:
        wanted.update(event.get("removed", {}))
    assert +removed == +wanted
    assert sum(moment.seconds for moment in run.moments) == pytest.approx(sum(e["seconds"] for e in events))
    assert [run.moments[place].phase for place in (0, -1)] == [events[place]["event"] for place in (0, -1)]
    assert {moment.number for moment in run.moments if moment.phase == "Tick"} >= {7, 3 * MOST_MOMENTS}


def test_few_events_are_all_drawn(copied: Path) -> None:
    events = written(copied, 10)
    run = read_run(copied, "run")
    assert len(run.moments) == len(events)
    assert "events" not in run.facts


def test_many_phases_are_few_shapes(copied: Path) -> None:
    written(copied, 450)
    shapes = figures_of(render([read_run(copied, "run")]))["metric-0"]["layout"]["shapes"]
    assert [shape["name"] for shape in shapes] == ["Tick", "Tock", "fine-tuning"]
    assert [shape["path"].count("M") for shape in shapes] == [450, 450, 1]


@pytest.mark.parametrize("count", [300, 1000, 1001])
def test_very_many_layers_are_drawn_as_lines_without_gaps(count: int, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (name, width, members), *_ = config["layers"]
    config["layers"] = [[f"{name}.{number}", width, members] for number in range(count)]
    (copied / "config.json").write_text(json.dumps(config))
    shutil.rmtree(copied / "result")
    figures = figures_of(render([read_run(copied, "run")]))
    before, after = figures["channels-0"]["data"]
    assert before["type"] == after["type"] == ("bar" if count <= 1000 else "scatter")
    assert before["y"] == [width] * count
    assert after["y"] == [after["y"][0]] * count
    assert after["y"][0] < width
    assert figures["removals-0"]["data"][0]["ygap"] == 0


@pytest.mark.parametrize("change", [{"event": ["Tick"]}, {"removed": {"0": "x"}}, {"removed": [1]}])
def test_damage_among_what_is_not_drawn_is_refused(change: dict, copied: Path) -> None:
    events = written(copied, 100)
    events[101].update(change)
    with pytest.raises(InvalidData):
        thinned(events, len(events), copied / "events.jsonl", 5)
