"""Several runs on one page, and runs of other kinds than a finished one."""

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from looking import figures_of, open_report
from told import train_event, write_events

from secateur.files import read_json_lines
from secateur.pruning.scores import SCORES
from secateur.results.report.page import render
from secateur.results.report.read import read_runs
from secateur.results.report.tables import make_cards
from secateur.results.report.words import precise
from secateur.results.structure import read_structure

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


def shown(page: str) -> list[str]:
    """The charts that there is something to see in."""
    return [name for name, figure in figures_of(page).items() if figure["data"]]


def test_as_many_runs_as_there_are_scores_have_colours_of_their_own(runs: dict[str, Path]) -> None:
    page = render(read_runs([runs["taylor"]] * (len(SCORES) + 1)))
    colours = [trace["line"]["color"] for trace in figures_of(page)["metric-0"]["data"]]
    assert len(set(colours)) == len(SCORES) + 1
    for colour in colours:
        dark_and_light = re.findall(rf"{colour}: (#\w+);", page)
        assert len(set(dark_and_light)) == 2
        assert f"background: var({colour})" in page


def test_two_runs_side_by_side(browser: Any, runs: dict[str, Path], tmp_path: Path) -> None:
    view = open_report(browser, tmp_path, runs["taylor"], runs["slim"])
    names = ["taylor", "slim"]
    assert view.page.locator("h1 > span").all_inner_texts() == names
    assert [trace["name"] for trace in view.chart("metric-0")] == names
    for trace, name in zip(view.chart("metric-0"), names, strict=True):
        events = read_json_lines(runs[name] / "events.jsonl")
        assert len(trace["y"]) == len(events)
    whole, *after = view.chart("channels-0")
    assert whole["name"] == "before"
    for trace, name in zip(after, names, strict=True):
        assert trace["y"] == [layer.after for layer in read_structure(runs[name]).layers]
    assert {"removals-0", "removals-1", "scores-0", "scores-1"} <= set(
        view.page.locator(".chart").evaluate_all("all => all.map(c => c.id)")
    )
    tops = [view.page.locator(f"#scores-{index} .main-svg").first.bounding_box()["y"] for index in (0, 1)]
    assert tops[0] == tops[1]
    rows = view.page.locator("#settings > .scroll tbody tr").all_inner_texts()
    differ = ["differs" in row for row in rows]
    assert differ == sorted(differ, reverse=True)
    assert any(row.startswith("score") and "taylor" in row and "slim" in row for row in rows[: sum(differ)])
    line = view.page.locator(".card").first.locator(".run").all_inner_texts()
    assert line == names
    view.page.set_viewport_size({"width": 360, "height": 740})
    view.until("document.querySelector('#scores-1 .main-svg').getBoundingClientRect().width <= 340")
    assert view.page.evaluate("document.documentElement.scrollWidth") == 360
    assert view.said == []
    assert len(view.requests) == 1


def test_a_result_alone(runs: dict[str, Path]) -> None:
    page = render(read_runs([runs["taylor"] / "result"]))
    assert shown(page) == [
        "tradeoff-0",
        "metric-0",
        "loss",
        "cost",
        "channels-0",
        "percent-0",
        "removals-0",
        "scores-0",
    ]
    assert "finished" in page
    whole = figures_of(render(read_runs([runs["taylor"]])))
    assert figures_of(page)["metric-0"]["data"][0]["y"] == whole["metric-0"]["data"][0]["y"]
    removed = figures_of(page)["removals-0"]["data"][0]
    cut = [layer for layer in read_structure(runs["taylor"]).layers if layer.after < layer.before]
    assert removed["y"] == [layer.name for layer in cut]
    assert list(map(sum, removed["customdata"])) == [layer.before - layer.after for layer in cut]
    assert list(map(sum, removed["z"])) == pytest.approx([100 * (1 - x.after / x.before) for x in cut], rel=1e-5)


def test_removals_of_several_runs_have_the_same_colours_and_rows(runs: dict[str, Path], tmp_path: Path) -> None:
    few = Path(shutil.copytree(runs["slim"], tmp_path / "few"))
    shutil.rmtree(few / "result")
    events = read_json_lines(few / "events.jsonl")
    name = read_structure(few).layers[1].name
    tick = next(event for event in events if event["event"] == "Tick")
    write_events(few, [events[0], {**tick, "removed": {name: 1}}])
    found = (runs["taylor"], few, runs["slim"] / "result")
    heat = [figures_of(render(read_runs(found)))[f"removals-{index}"]["data"][0] for index in range(3)]
    names = [layer.name for layer in read_structure(few).layers]
    assert [each["y"] for each in heat] == [names] * 3
    most = max(share for each in heat for row in each["z"] for share in row)
    assert [each["zmax"] for each in heat] == pytest.approx([most] * 3, rel=1e-5)
    assert heat[1]["z"] == [[0.0], [pytest.approx(100 / 16)]]
    alone = [figures_of(render(read_runs([run])))["removals-0"]["data"][0]["z"] for run in (runs["slim"], found[2])]
    assert alone[0] == alone[1]


def test_a_result_alone_counts_channels_of_several_filters(runs: dict[str, Path], tmp_path: Path) -> None:
    """As of grouped convolutions: the share of the layer is that of its filters."""
    result = Path(shutil.copytree(runs["slim"] / "result", tmp_path / "result"))
    summary = json.loads((result / "summary.json").read_text())
    summary["layers"] = [[name, 4 * before, 4 * after] for name, before, after in summary["layers"]]
    (result / "summary.json").write_text(json.dumps(summary))
    told = [figures_of(render(read_runs([x])))["removals-0"]["data"][0] for x in (runs["slim"] / "result", result)]
    assert told[0] == told[1]


def test_a_run_in_progress(copied: Path) -> None:
    shutil.rmtree(copied / "result")
    lines = (copied / "events.jsonl").read_text().splitlines(keepends=True)
    (copied / "events.jsonl").write_text("".join(lines[:3]) + '{"event": "Ti')
    page = render(read_runs([copied]))
    assert "no result yet: Tick 2, " in page
    assert len(figures_of(page)["metric-0"]["data"][0]["y"]) == 3
    (copied / "events.jsonl").write_text("".join(lines[:2]))
    page = render(read_runs([copied]))
    assert " in 1 Tick. The colour is" in page
    assert '<p class="note">1 Tick</p>' in page
    (copied / "events.jsonl").write_text("")
    assert shown(render(read_runs([copied]))) == []


def test_training_alone(runs: dict[str, Path]) -> None:
    page = render(read_runs([runs["training"]]))
    assert shown(page) == ["metric-0", "loss"]
    assert "Training epoch 2" in page
    assert "Fine-tuning" not in page
    assert "2 epochs of training" in page
    assert "of the MACs left" not in page


def test_training_before_pruning(copied: Path) -> None:
    """Epochs of the baseline and of retraining come before the start, from which on metrics are compared."""
    shutil.rmtree(copied / "result")
    pruning = read_json_lines(copied / "events.jsonl")
    training = [train_event(copied, phase, epoch) for phase in ("baseline", "retrain") for epoch in (1, 2)]
    training[0]["metrics"] = {"accuracy": 1.0}
    write_events(copied, [*training, *pruning])
    (run,) = read_runs([copied])
    assert [moment.name for moment in run.moments[:5]] == [
        "Baseline epoch 1",
        "Baseline epoch 2",
        "Retraining epoch 1",
        "Retraining epoch 2",
        "Start",
    ]
    assert run.metric("accuracy")[0] == pruning[0]["metrics"]["accuracy"]
    page = render([run])
    assert len(figures_of(page)["metric-0"]["data"][0]["y"]) == 4 + len(pruning)
    over = figures_of(page)["tradeoff-0"]["data"][0]
    assert over["customdata"] == [moment.name for moment in run.moments[4:]]  # without what came before the start
    bands = [band["name"] for band in figures_of(page)["metric-0"]["layout"]["shapes"]]
    assert bands[:2] == ["training", "Tick"]
    assert "4 epochs of training" in page


def test_training_beside_a_pruned_network(runs: dict[str, Path]) -> None:
    figures = figures_of(render(read_runs([runs["training"], runs["slim"]])))
    assert [trace["name"] for trace in figures["cost"]["data"]] == ["slim"]
    assert [trace["name"] for trace in figures["channels-0"]["data"]] == ["before", "slim"]
    assert [trace["name"] for trace in figures["tradeoff-0"]["data"]] == ["slim"]
    assert figures["removals-0"]["data"] == []
    assert figures["removals-1"]["data"] != []


def test_each_metric_over_the_macs_of_the_runs_that_have_it(runs: dict[str, Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(runs["slim"], tmp_path / "other"))
    shutil.rmtree(other / "result")
    events = read_json_lines(other / "events.jsonl")
    for event in events:
        event["metrics"] = {"miou": 40.0}
    events[1]["metrics"] = {}
    write_events(other, events)
    page = render(read_runs([runs["taylor"], runs["slim"], other]))
    first, second = (figures_of(page)[name]["data"] for name in ("tradeoff-0", "tradeoff-1"))
    assert [trace["name"] for trace in first] == ["taylor", "slim"]
    assert [trace["name"] for trace in second] == ["other"]
    assert len(second[0]["x"]) == len(events) - 1  # what was not evaluated is no point, and there is no result yet
    assert "Mean IoU over MACs" in page


def test_latency_and_pictures(copied: Path) -> None:
    path = copied / "result" / "summary.json"
    summary = json.loads(path.read_text())
    path.write_text(json.dumps({**summary, "latency": {"before": 0.004, "after": 0.002, "batch": 64, "device": "cpu"}}))
    assert 'id="pictures" data-part="all" aria-labelledby="heading-pictures" hidden' in render(read_runs([copied]))
    (copied / "result" / "pictures.png").write_bytes(PIXEL)
    page = render(read_runs([copied]))
    assert "2.00 times as fast, batch of 64, cpu" in page
    assert "4.00 ms" in page
    assert f'<img src="data:image/png;base64,{base64.b64encode(PIXEL).decode()}"' in page
    assert 'aria-labelledby="heading-pictures">' in page


@pytest.mark.parametrize(
    ("verification", "value", "note"),
    [
        ({"difference": 3.2e-16}, "agrees to 3e-16", "with the masked network; relative to the largest of 20 outputs"),
        ({"difference": 0.0}, "agrees exactly", "with the masked network"),
        ({"difference": 0.02, "exact": False}, "differs by 2e-02", "from the masked network, inexact by request"),
    ],
)
def test_the_check_of_the_cut(verification: dict[str, Any], value: str, note: str, copied: Path) -> None:
    set_verification(copied, {"outputs": 20, "modes": ["eval", "train"], "exact": True, **verification})
    (card,) = [card for card in make_cards(read_runs([copied])) if card.title == "Cut checked"]
    (line,) = card.lines
    assert line is not None
    assert line.after == value
    assert line.note.startswith(note)
    assert line.note.endswith("outputs (eval, train)")


@pytest.mark.parametrize("verification", [None, {}, {"difference": "0", "outputs": 20}, {"difference": 1e-9}])
def test_nothing_is_said_of_a_check_that_is_not_known(verification: Any, copied: Path) -> None:
    """As of results that were saved before it was written down."""
    set_verification(copied, verification)
    assert "Cut checked" not in [card.title for card in make_cards(read_runs([copied]))]


def set_verification(folder: Path, verification: Any) -> None:
    path = folder / "result" / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "verification": verification}))


def test_accuracy_before_that_nobody_knows_is_not_made_up(copied: Path) -> None:
    """The run began with a pruned network, whose accuracy is not that of the whole one."""
    path = copied / "result" / "summary.json"
    summary = json.loads(path.read_text())
    (before, after) = read_runs([copied])[0].metric("accuracy")
    assert before == summary["before"]["metrics"]["accuracy"]
    summary["before"]["metrics"] = {}
    path.write_text(json.dumps(summary))
    (run,) = read_runs([copied])
    assert run.metric("accuracy") == (None, after)
    (card,) = [card for card in make_cards([run]) if card.title == "Accuracy"]
    assert [(line.before, line.after) for line in card.lines if line is not None] == [("", precise(after))]


def test_runs_are_called_by_what_tells_them_apart(runs: dict[str, Path], tmp_path: Path) -> None:
    folders = [tmp_path / "one" / "run", tmp_path / "two" / "run"]
    for folder in folders:
        shutil.copytree(runs["slim"], folder)
    assert [run.name for run in read_runs(folders)] == ["one/run", "two/run"]
    assert [run.name for run in read_runs(folders[:1])] == ["run"]
    assert len({run.name for run in read_runs([folders[0], folders[0]])}) == 1
