"""Runs that differ in their seed alone are also shown together."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from secateur.results.report.page import render
from secateur.results.report.read import read_runs
from secateur.results.report.seeds import make_seeds

ACCURACIES = (90.0, 91.0, 93.0)


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


@pytest.fixture
def seeds(runs: dict[str, Path], tmp_path: Path) -> list[Path]:
    """One run by three seeds, with accuracies of their own, each from weights that were trained with the same seed."""
    folders = []
    for seed, accuracy in enumerate(ACCURACIES):
        folder = Path(shutil.copytree(runs["taylor"], tmp_path / f"taylor-{seed}"))
        order = {"recipe": "x", "weights": f"runs/baseline-seed{seed}"}
        for path in (folder / "config.json", folder / "result" / "summary.json"):
            change(path, lambda data, seed=seed: data["settings"].update(seed=seed))
            change(path, lambda data, order=order: data.update(order=order))
        change(folder / "result" / "summary.json", lambda data, a=accuracy: data["after"]["metrics"].update(accuracy=a))
        folders.append(folder)
    return folders


def test_mean_and_deviation_beside_the_single_runs(seeds: list[Path], runs: dict[str, Path]) -> None:
    found = read_runs([*seeds, runs["slim"]])
    _, (names, n, accuracy, *_) = make_seeds(found)
    assert (names, n) == ("taylor-0, taylor-1, taylor-2", "3")
    assert accuracy == f"{mean(ACCURACIES):.4g} ± {stdev(ACCURACIES):.2g}"
    assert accuracy in render(found)


def test_one_seed_is_no_spread(seeds: list[Path]) -> None:
    assert make_seeds(read_runs(seeds[:1])) == []
    assert make_seeds(read_runs([seeds[0], seeds[0]])) == []


def test_a_run_that_is_not_done_does_not_count(seeds: list[Path]) -> None:
    shutil.rmtree(seeds[2] / "result")
    assert make_seeds(read_runs(seeds))[1][:2] == ["taylor-0, taylor-1", "2"]


@pytest.mark.parametrize(
    ("file", "edit"),
    [
        ("result/summary.json", lambda data: data["settings"].update(tick_lr=0.5)),
        ("result/summary.json", lambda data: data["order"].update(batch_size=7)),
        ("result/summary.json", lambda data: data["order"].update(weights="elsewhere.pth")),
        ("result/summary.json", lambda data: data.update(hardware="another machine")),
        ("config.json", lambda data: data["engine"].update(precision="bf16")),
        ("result/summary.json", lambda data: data.update(kind="train")),
    ],
    ids=["setting", "order", "weights", "hardware", "engine", "kind"],
)
def test_what_differs_in_more_stays_apart(seeds: list[Path], file: str, edit: Callable[[Any], object]) -> None:
    assert make_seeds(read_runs(seeds[:2]))[1][1] == "2"
    change(seeds[1] / file, edit)
    assert make_seeds(read_runs(seeds[:2])) == []
