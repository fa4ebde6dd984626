"""About when a running run ends."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from told import train_event, write_events

from secateur.files import read_json_lines
from secateur.results.report.page import render, render_news
from secateur.results.report.read import is_running, read_runs
from secateur.results.report.remaining import expected_end


class Running:
    """A run that this process does, and what has happened in it: events of 60 seconds, unless they say otherwise."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder / "result")
        self.folder = folder
        self.start, *_ = self.events = read_json_lines(folder / "events.jsonl")[:1]
        (folder / ".lock").write_text(str(os.getpid()))

    def set(self, config: dict[str, Any] | None = None, **settings: Any) -> None:
        path = self.folder / "config.json"
        asked = json.loads(path.read_text())
        asked["settings"] |= settings
        path.write_text(json.dumps({**asked, **(config or {})}))

    def did(self, event: str, seconds: float = 60, **values: Any) -> None:
        self.events.append({**self.start, "event": event, "seconds": seconds, **values})

    def tick(self, number: int, left: float, **values: Any) -> None:
        self.did("Tick", number=number, macs=int(left * self.start["macs"]), **values)

    def tuned(self, epoch: int, epochs: int = 2, **values: Any) -> None:
        self.did("FineTune", epoch=epoch, epochs=epochs, **values)

    def to_go(self) -> str:
        write_events(self.folder, self.events)
        return expected_end(read_runs([self.folder])[0])


@pytest.fixture
def run(copied: Path) -> Running:
    """50% of the MACs are to stay; after every two Ticks a Tock of two epochs, and two epochs of fine-tuning."""
    return Running(copied)


def test_epochs_that_remain(run: Running) -> None:
    run.tick(1, 0.5)
    assert run.to_go() == ", about 2 min to go"  # two epochs, that may take as long as the Tick
    run.tuned(1, seconds=1800)
    assert run.to_go() == ", about 30 min to go"
    run.tuned(2, seconds=1800)
    assert run.to_go() == ", less than a minute to go"


def test_ticks_and_tocks_that_remain(run: Running) -> None:
    run.tick(1, 0.75)
    # 0.75 * 0.75 is more than 0.5, which needs a third Tick. After the second comes the only Tock.
    assert run.to_go() == ", about 6 min to go"
    run.tick(2, 0.625)
    run.did("Tock", 600, number=1, epoch=1, epochs=2)
    # An epoch of the Tock, a Tick, and two epochs of fine-tuning, which take as long as those of the Tock.
    assert run.to_go() == ", about 31 min to go"


def test_equal_steps_go_on_as_equal_steps(run: Running) -> None:
    run.set(keep_macs=0.4, tick_step=0.1, tock_every=0, finetune_epochs=0)
    run.tick(1, 0.9)
    assert run.to_go() == ", about 5 min to go"
    run.set(tick_step=1.0)
    assert run.to_go() == ", about 8 min to go"  # 0.9 to the power of 9 is less than 0.4


def test_by_what_the_budget_counts(run: Running) -> None:
    run.set(keep_macs=None, keep_latency=0.5, finetune_epochs=0)
    run.did("Tick", number=1, left={"microseconds": 0.5})  # with all of the MACs
    assert run.to_go() == ", less than a minute to go"
    run.events[-1]["left"] = {}
    assert run.to_go() == ""


def test_training_before_pruning(run: Running) -> None:
    start = run.events.pop()
    run.set(retrain_epochs=2)
    run.events.append({**train_event(run.folder, "baseline", 1), "seconds": 60, "epochs": 4})
    # Three epochs, two of retraining, five Ticks, two Tocks, and two epochs of fine-tuning.
    assert run.to_go() == ", about 16 min to go"
    run.events.append({**run.events[0], "epoch": 4})
    run.events.append(start)
    assert run.to_go() == ", about 13 min to go"
    run.events.append({**run.events[0], "phase": "retrain", "epoch": 2, "epochs": 2})
    assert run.to_go() == ", about 11 min to go"


def test_a_run_that_only_trains(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs["training"], tmp_path / "run"))
    (folder / ".lock").write_text(str(os.getpid()))
    write_events(folder, [{**train_event(folder, "train", 1), "seconds": 120}])
    assert expected_end(read_runs([folder])[0]) == ", about 2 min to go"


def test_as_many_epochs_as_the_steps_take(run: Running) -> None:
    run.set({"batches": 5}, finetune_min_steps=50)
    run.tick(1, 0.5)
    assert run.to_go() == ", about 10 min to go"
    run.set({"batches": None})  # as in runs from before it was written down
    assert run.to_go() == ""
    run.tuned(1, epochs=10)
    assert run.to_go() == ", about 9 min to go"


def test_ticks_of_some_images_do_not_tell_how_long_an_epoch_takes(run: Running) -> None:
    run.set(tick_images=16)
    run.tick(1, 0.5)
    assert run.to_go() == ""
    run.set(tick_images=None, tick_data=0.25)
    assert run.to_go() == ", about 8 min to go"


@pytest.mark.parametrize("seconds", [1e7, -1e7, 0.0, float("nan")])
def test_one_epoch_that_seems_long_changes_nothing(run: Running, seconds: float) -> None:
    """The computer slept in it, or its clock was set."""
    run.tick(1, 0.5)
    for epoch in range(1, 5):
        run.tuned(epoch, epochs=40, seconds=seconds if epoch == 2 else 60)
    assert run.to_go() == ", about 36 min to go"


def test_the_times_of_the_files_do_not_matter(run: Running) -> None:
    run.tick(1, 0.5)
    write_events(run.folder, run.events)
    for time in (0, 4e9):
        os.utime(run.folder / "events.jsonl", (time, time))
        assert expected_end(read_runs([run.folder])[0]) == ", about 2 min to go"


def test_only_a_live_page_says_so(run: Running) -> None:
    run.tick(1, 0.5)
    run.to_go()
    found = read_runs([run.folder])
    assert "50.0% of the MACs left, about 2 min to go</p>" in render(found, live=True)
    assert "50.0% of the MACs left, about 2 min to go</p>" in render_news(found)["body"]
    assert "to go" not in render(found)


def test_nothing_is_said_before_the_first_event(run: Running) -> None:
    run.events.clear()
    assert run.to_go() == ""


def gone() -> str:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return str(process.pid)


@pytest.mark.parametrize("holder", ["", "0", "-1", "x", "9" * 40, gone])
def test_nothing_is_said_of_a_run_that_was_stopped(run: Running, holder: Any) -> None:
    (run.folder / ".lock").write_text(holder() if callable(holder) else holder)
    run.tick(1, 0.5)
    assert run.to_go() == ""


def test_a_finished_run_and_a_result_alone_are_at_their_end(runs: dict[str, Path], copied: Path) -> None:
    (copied / ".lock").write_text(str(os.getpid()))
    assert is_running(copied)
    assert [expected_end(run) for run in read_runs([copied, copied / "result"])] == ["", ""]


ODD: Sequence[dict[str, Any]] = [
    {"keep_macs": None},
    {"keep_macs": "x"},
    {"tick_removes": 1e-300},
    {"finetune_epochs": 10**400},
    {"finetune_epochs": [1]},
    {"of_another_version": 1},
]


@pytest.mark.parametrize("settings", ODD, ids=str)
def test_settings_that_nobody_can_count_with(run: Running, settings: dict[str, Any]) -> None:
    run.set(**settings)
    assert run.to_go() == ""
