"""A run that goes on from the end of another one's pruning comes to what one run to the smaller budget comes to."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from small import prepared, quick

from secateur import DamagedRun, InvalidSetting, InvalidTask, Result, TickTock
from secateur.runs.events import Tick
from secateur.runs.record import prune_further


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def timeless(result: Result) -> list[dict[str, Any]]:
    return [{**event.to_dict(), "seconds": 0} for event in result.history]


def where_ticks_end(settings: TickTock) -> list[float]:
    """The shares of filters that are left after each Tick, so that a budget can end a run there."""
    net, graph, task = prepared()
    result = settings(net, graph, task)
    return [event.filters / graph.num_filters for event in result.history if isinstance(event, Tick)]


@pytest.mark.parametrize(
    ("ticks", "changes"),
    [(1, {}), (2, {"ema": 0.5, "distill": 0.5}), (3, {"cut": "end", "tick_data": 0.7})],  # a Tock is due after 2
    ids=str,
)
def test_it_is_as_if_it_had_never_been_two_runs(tmp_path: Path, ticks: int, changes: dict[str, Any]) -> None:
    net, graph, task = prepared()
    whole = quick(keep_filters=0.5, **changes)
    first = whole.but(keep_filters=where_ticks_end(whole)[ticks - 1])
    expected = whole(net, graph, task, folder=tmp_path / "whole")
    first(net, graph, task, folder=tmp_path / "first")
    before = files(tmp_path / "first")
    prune_further(tmp_path / "first", tmp_path / "second", whole)
    found = whole(net, graph, task, folder=tmp_path / "second")
    assert timeless(found) == timeless(expected)
    theirs = expected.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in found.model.state_dict().items())
    assert files(tmp_path / "first") == before


@pytest.mark.parametrize("budget", ["keep_macs", "keep_params", "keep_filters"])
def test_a_budget_that_is_met_already_is_refused(budget: str, tmp_path: Path) -> None:
    net, graph, task = prepared()
    quick(finetune_epochs=0)(net, graph, task, folder=tmp_path / "first")
    with pytest.raises(InvalidSetting, match=r"has \d+\.\d% of the \w+ left already: ask for less, or finetune it"):
        prune_further(tmp_path / "first", tmp_path / "second", quick(**{budget: 0.9}))
    assert not (tmp_path / "second").exists()


def test_another_score_takes_over(tmp_path: Path) -> None:
    net, graph, task = prepared()
    quick(finetune_epochs=0)(net, graph, task, folder=tmp_path / "first")
    other = quick(keep_macs=0.4, score="apoz", finetune_epochs=0)
    prune_further(tmp_path / "first", tmp_path / "second", other)
    assert other(net, graph, task, folder=tmp_path / "second").after.macs <= 0.4 * graph.macs


def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    net, graph, task = prepared()
    settings = quick()
    first, second = tmp_path / "first", tmp_path / "second"
    steps = settings.steps(net, graph, task, folder=first)
    next(steps)
    smaller = settings.but(keep_macs=0.3)
    with pytest.raises(InvalidSetting, match="has not come to the end of its pruning yet"):
        prune_further(first, second, smaller)
    for _ in steps:
        pass
    with pytest.raises(InvalidSetting, match="has another optimizer"):
        prune_further(first, second, smaller.but(optimizer="adamw"))
    with pytest.raises(InvalidSetting, match="holds a run already"):
        prune_further(first, first, smaller)
    for name, damage, told in [
        ("config.json", b"settings", "lacks its settings"),
        ("events.jsonl", b"macs", "damaged"),
    ]:
        whole = (first / name).read_bytes()
        (first / name).write_bytes(whole.replace(damage, damage[::-1]))
        with pytest.raises(DamagedRun, match=told):
            prune_further(first, second, smaller)
        (first / name).write_bytes(whole)
    kept = first / "checkpoints" / "pruned" / "state.safetensors"
    kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(DamagedRun, match="pruned is damaged"):
        prune_further(first, second, smaller)
    assert not second.exists()


def test_what_cannot_be_trained_on_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    net, graph, task = prepared()
    with pytest.raises(InvalidTask, match=r"a Task is wanted, such as classification\(train, test\).*, got list"):
        quick()(net, graph, task.train, folder=tmp_path / "first")
    with pytest.raises(InvalidTask, match="examples per class can be drawn from a DataLoader"):
        quick(tick_per_class=2)(net, graph, task, folder=tmp_path / "first")
    assert not (tmp_path / "first").exists()


def test_a_run_that_is_never_begun_leaves_its_folder(tmp_path: Path) -> None:
    net, graph, task = prepared()
    quick().steps(net, graph, task, folder=tmp_path / "first")
    gc.collect()
    next(quick().steps(net, graph, task, folder=tmp_path / "first"))


def test_a_run_that_removes_nothing_has_nothing_to_go_on_from(tmp_path: Path) -> None:
    net, graph, task = prepared()
    (tmp_path / "first" / "result").mkdir(parents=True)
    TickTock(keep_macs=1.0, finetune_epochs=1)(net, graph, task, folder=tmp_path / "first")
    with pytest.raises(InvalidSetting, match="keeps no checkpoint of the end of its pruning: prune the whole network"):
        prune_further(tmp_path / "first", tmp_path / "second", quick())
