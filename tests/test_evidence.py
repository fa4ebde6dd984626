"""What is kept of real runs, and the page that is drawn from it."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import controls_page
import doing
import evidence
import photographs_page
import pytest
import results_page
import trunks_page

from secateur.errors import InvalidSetting
from secateur.recipes.jobs import Order

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same step with two seeds."""
    folder = tmp_path_factory.mktemp("runs") / "resnet56-cifar10"
    found = [folder / f"GBN-40-seed{seed}" for seed in (0, 1)]
    for seed, run in enumerate(found):
        doing.do(Order(recipe="tiny_job:build"), doing.PRUNING.but(seed=seed), run)
    return found


def test_a_kept_run_has_everything_but_paths(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    path = evidence.keep(runs[0], None)
    assert path == tmp_path / "resnet56-cifar10" / "GBN-40-seed0.json"
    kept, summary = json.loads(path.read_text()), doing.summary(runs[0])
    for name in ("settings", "before", "after", "seconds", "hardware", "versions", "layers", "network"):
        assert kept[name] == summary[name]
    assert kept["engine"]["precision"] == "fp32"
    assert [event["event"] for event in kept["trajectory"]][:2] == ["Start", "Tick"]
    assert kept["trajectory"][-1]["metrics"] == summary["after"]["metrics"]
    assert str(runs[0].parent.parent) not in path.read_text()


def test_the_page_has_the_mean_over_seeds(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    for run in runs:
        evidence.keep(run, None)
    after = [next(iter(doing.summary(run)["after"]["metrics"].values())) for run in runs]
    text = results_page.draw(evidence.read_all(tmp_path))
    (row,) = [line for line in text.splitlines() if line.startswith("| GBN-40, the paper's |")]
    assert f"| {mean(after):.2f} ± {stdev(after):.2f} | 2 |" in row
    assert "## Table 1: ResNet-56 on CIFAR-10" in text
    assert "Table 3" not in text


def test_retraining_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    run = tmp_path / "runs" / "GBN-40-seed0"
    doing.do(Order(recipe="tiny_job:build"), doing.PRUNING.but(retrain_epochs=1), run)
    kept = evidence.Evidence("GBN-40", 0, json.loads(evidence.keep(run, None).read_text()))
    (retrained,) = [event for event in kept.data["trajectory"] if event.get("phase") == "retrain"]
    assert kept.retrained == retrained["metrics"]["accuracy"]
    assert kept.seconds == doing.summary(run)["seconds"]


def test_a_search_tells_what_differs(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "results")
    other = tmp_path / "other-seed0"
    doing.do(Order(recipe="tiny_job:build"), doing.PRUNING.but(tick_lr=0.5, seed=3), other)
    trained = tmp_path / "trained-seed0"
    doing.do(Order(recipe="tiny_job:build"), doing.TRAINING, trained)
    for run in (runs[0], other, trained):
        evidence.keep(run, "search")
    text = results_page.draw(evidence.read_all(tmp_path / "results"))
    (row,) = [line for line in text.splitlines() if line.startswith("| other |")]
    (known,) = [line for line in text.splitlines() if line.startswith("| GBN-40 |")]
    (trains,) = [line for line in text.splitlines() if line.startswith("| trained |")]
    assert "tick_lr 0.5" in row
    assert "epochs 2, shape steps" in trains.replace("lr 0.1, ", "")
    assert "tick_lr" not in known
    assert "seed" not in row.replace("random weights", "")


def test_what_is_published_is_what_the_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_page, "DOCS", tmp_path)  # for figures
    (tmp_path / "images").mkdir()
    sets = evidence.read_all()
    assert (HERE.parent / "docs" / "results.md").read_text() == results_page.draw(sets), "run make results"
    readme = results_page.README.read_text()
    assert "| GBN-40, the paper's |" in readme
    assert readme == results_page.with_table(readme, sets), "run make results"


def test_photographs_are_compared_with_the_whole_network(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photographs_page, "RESULTS", tmp_path)
    data = json.loads((runs[0] / "result" / "summary.json").read_text())

    def arm(name: str, *accuracies: float) -> list[evidence.Evidence]:
        def path(value: float) -> list[dict[str, Any]]:
            moments = [("Start", 100, 1.0, 70.0), ("Tick", 60, 0.5, value - 9), ("Tick", 40, 0.3, value - 19)]
            return [
                {"event": event, "number": 1, "filters": filters, "share": share, "metrics": {"accuracy": metric}}
                for event, filters, share, metric in moments
            ]

        def run(value: float) -> dict[str, Any]:
            before, after = (
                {**data[end], "metrics": {"accuracy": x}} for end, x in (("before", 70.0), ("after", value))
            )
            settings = {**data["settings"], "keep_filters": 0.3}
            return {**data, "before": before, "after": after, "trajectory": path(value), "settings": settings}

        return [evidence.Evidence(name, seed, run(value)) for seed, value in enumerate(accuracies)]

    arms = [arm("taylor-50", 69.9, 70.0, 70.4), arm("random-30", 60.0), arm("whole", 71.0, 71.1, 71.2)]
    curves = [arm("curve-taylor", 69.0, 71.0), arm("curve-random", 39.0)]
    figure = tmp_path / "figure.svg"
    sets = {"mobilenetv2-cub200": {runs[0].name: runs for runs in [*arms, *curves]}}
    text, used = photographs_page.photographs(sets, figure)
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in text.splitlines()}
    assert rows["the whole network"][3:] == ["70.00", "1", "-", "-"]
    assert rows["the whole network, trained as long"][3:] == ["71.10 ± 0.10", "3", "+1.10", "-"]
    assert rows["to 50%: Taylor, ours"][2:] == ["51.10 ± 0.26", "70.10 ± 0.26", "3", "equal", "-1.00"]
    assert rows["to 30%: random, ours"][2:] == ["41.00", "60.00", "1", "-10.00", "-11.10"]
    # The accuracy at a share of the MACs; curves end at 30%.
    assert rows["taylor"] == [
        "68.20 ± 0.28",
        "66.40 ± 0.57",
        "64.60 ± 0.85",
        "62.80 ± 1.13",
        "61.00 ± 1.41",
        "51.00 ± 1.41",
        "2",
    ]
    assert rows["random"][-2:] == ["20.00", "1"]
    assert len(used) == 10
    assert figure.is_file()
    # With what there is.
    only = {"mobilenetv2-cub200": {"curve-random": curves[1]}}
    assert "Taylor" not in photographs_page.photographs(only, figure)[0]
    speed = {
        "where": "a GPU",
        "runner": "captured",
        "networks": [{"name": "mobilenet_v2", "batch": 64, "throughput": 1000}],
    }
    speed["networks"].append({"name": "mobilenetv2-cub200/taylor-50-seed0", "batch": 64, "throughput": 1600})  # pyright: ignore
    (tmp_path / "speed").mkdir()
    (tmp_path / "speed" / "birds.json").write_text(json.dumps(speed))
    text, _ = photographs_page.photographs({"mobilenetv2-cub200": {"taylor-50": arms[0]}}, figure)
    assert "| images/s, a GPU, captured, batch 64 |" in text
    assert "| 1,000 |" in text
    assert "| 1,600 (+60%) |" in text
    assert photographs_page.photographs({}, figure) == ("", [])


def test_a_run_that_is_not_finished_is_no_evidence(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting):
        evidence.keep(tmp_path, None)


def test_controls_are_compared_with_the_reference(runs: list[Path]) -> None:
    data = json.loads((runs[0] / "result" / "summary.json").read_text())

    def arm(name: str, *accuracies: float) -> list[evidence.Evidence]:
        def ending(value: float) -> dict[str, Any]:
            network = {"name": "resnet56", "options": {"num_classes": 10}}
            return {**data, "network": network, "after": {**data["after"], "metrics": {"accuracy": value}}}

        return [evidence.Evidence(name, seed, ending(value)) for seed, value in enumerate(accuracies)]

    arms = {
        "reference-30": arm("reference-30", 93.0, 93.1, 93.2),
        "random-30": arm("random-30", 90.0, 90.2, 90.4),
        "slim-30": arm("slim-30", 92.9, 93.1, 93.4),
        "l1-30": arm("l1-30", 80.0, 80.2, 10.0),
        "scratch-30": arm("scratch-30", 92.0),
        "narrow-30": arm("narrow-30", 92.9),
        "whole": arm("whole", 94.0, 94.2, 94.4),
    }
    text, used = controls_page.controls({"controls-resnet56": arms})
    rows = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[3:] for line in text.splitlines() if "|" in line
    }
    assert rows["the reference"] == ["93.10 ± 0.10", "3", "-"]
    assert rows["score: random"] == ["90.20 ± 0.20", "3", "-2.90"]
    assert rows["score: Slim"] == ["93.13 ± 0.25", "3", "equal"]
    assert rows["score: L1 norm"] == ["80.10 ± 0.14", "2 of 3", "-13.00"]
    assert rows["the reference's shape, random weights"] == ["92.00", "1", "-1.10"]
    assert rows["evenly narrower, random weights"] == ["92.90", "1", "equal"]
    layer = min(data["layers"], key=lambda row: row[2] / row[1])
    assert f"`l1-30` with seed 2: {layer[0]} kept {layer[2]} of {layer[1]} channels." in text
    assert "The same after 50 epochs more: 94.20 ± 0.20." in text
    assert len(used) == 17
    assert controls_page.controls({}) == ("", [])


def test_trunks_are_the_mean_of_all_seeds() -> None:
    def row(free: bool, narrow: int, accuracy: float) -> dict[str, Any]:
        widths = {"conv1": narrow, "stage2.0.conv2": 32}
        return {"rank": "score_per_mac", "macs": 0.398, "free": free, "trunks": widths, "repaired": accuracy}

    files = [{"rows": [row(True, 6, 80.0), row(False, 16, 85.0)]}, {"rows": [row(True, 9, 82.0), row(False, 16, 85.4)]}]
    (found,) = trunks_page.rows_of(files)
    assert found == ["score per MAC", "40%", "8/32", "81.00 ± 1.41", "85.20 ± 0.28", "2"]
