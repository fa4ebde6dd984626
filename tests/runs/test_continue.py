"""A run that continues from the end of another one's pruning gives what one run to the smaller budget gives."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from small import SIZE, batches, briefly, finished, make_run, prepared, quick, same, states

import secateur
from secateur import InvalidData, InvalidSetting, Result, TickTock
from secateur.runs.events import Tick
from secateur.runs.record import continue_run


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def timeless(result: Result) -> list[dict[str, Any]]:
    return [{**event.to_dict(), "seconds": 0} for event in result.history]


def where_ticks_end(result: Result) -> list[float]:
    """The shares of filters that are left after each Tick, so that a budget can end a run there."""
    whole = result.plan.graph.num_filters
    return [event.filters / whole for event in result.history if isinstance(event, Tick)]


@pytest.mark.parametrize(
    ("ticks", "changes"),
    [
        (1, {"retrain_epochs": 1}),
        (2, {"ema": 0.5, "distill": 0.5}),  # a Tock is due
        (3, {"cut": "end", "tick_data": 0.7}),
    ],
    ids=str,
)
def test_two_runs_are_as_one(tmp_path: Path, ticks: int, changes: dict[str, Any]) -> None:
    net, graph, task = prepared()
    whole = quick(keep_filters=0.5, **changes)
    expected = finished(whole, net, graph, task)
    first = whole.but(keep_filters=where_ticks_end(expected)[ticks - 1])
    finished(first, net, graph, task, folder=tmp_path / "first")
    before = files(tmp_path / "first")
    found = secateur.prune(
        net,
        batches(1)[0][0],
        task,
        settings=whole,
        graph=graph,
        folder=tmp_path / "second",
        continue_from=tmp_path / "first",
    )
    assert timeless(found) == timeless(expected)
    assert same(states(found.model), states(expected.model))
    assert files(tmp_path / "first") == before


def test_another_score_and_another_kind_of_budget(tmp_path: Path) -> None:
    net, graph, task = prepared()
    finished(quick(finetune_epochs=0), net, graph, task, folder=tmp_path / "first")
    other = quick(keep_params=0.3, score="apoz", finetune_epochs=0)
    continue_run(tmp_path / "first", tmp_path / "second", other)
    run = make_run(other, net, graph, task, folder=tmp_path / "second")
    assert not bool(run.kept.all())
    *_, last = run.events()
    assert last.params <= 0.3 * graph.params


def test_a_second_call_resumes_the_new_run(tmp_path: Path) -> None:
    net, graph, task = prepared()
    finished(quick(finetune_epochs=0), net, graph, task, folder=tmp_path / "first")
    folders: dict[str, Any] = {"folder": tmp_path / "second", "continue_from": tmp_path / "first"}
    results = [
        secateur.prune(net, batches(1)[0][0], task, settings=quick(keep_macs=0.4), graph=graph, **folders)
        for _ in range(2)
    ]
    assert results[0].history == results[1].history
    with pytest.raises(InvalidSetting):
        secateur.prune(
            net, batches(1)[0][0], task, settings=quick(), graph=graph, continue_from=folders["continue_from"]
        )


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    finished(quick(finetune_epochs=0), *prepared(), folder=folder)
    return folder


@pytest.mark.parametrize(
    ("settings", "got"),
    [
        (quick(keep_macs=0.9), "% of the MACs"),
        (quick(keep_params=0.9), "% of the parameters"),
        (quick(keep_filters=0.9), "% of the filters"),
        (quick(keep_macs=0.3, optimizer="adamw"), "optimizer"),
        (quick(keep_macs=0.3, filter_scale="mean"), "filter_scale"),
    ],
)
def test_settings_that_do_not_fit_are_refused(first: Path, tmp_path: Path, settings: TickTock, got: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        continue_run(first, tmp_path / "second", settings)
    assert str(caught.value.got).endswith(got)
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("config.json", lambda data: data.replace(b"settings", b"sgnittes")),
        ("events.jsonl", lambda data: data.replace(b"macs", b"scam")),
        ("checkpoints/pruned/state.safetensors", lambda data: data[:-1]),
    ],
)
def test_damage_is_refused(first: Path, tmp_path: Path, name: str, damage: Any) -> None:
    whole = (first / name).read_bytes()
    (first / name).write_bytes(damage(whole))
    try:
        with pytest.raises(InvalidData):
            continue_run(first, tmp_path / "second", quick(keep_macs=0.3))
    finally:
        (first / name).write_bytes(whole)
    assert not (tmp_path / "second").exists()


def test_runs_that_cannot_be_continued(first: Path, tmp_path: Path) -> None:
    net, graph, task = prepared()
    smaller = quick(keep_macs=0.3)
    with pytest.raises(InvalidSetting):
        continue_run(first, first, smaller)  # holds a run already
    unfinished = make_run(quick(), net, graph, task, folder=tmp_path / "unfinished").events()
    next(unfinished)
    unfinished.close()
    finished(briefly(epochs=1), net, graph, task, folder=tmp_path / "trained")
    for name in ("unfinished", "trained"):
        with pytest.raises(InvalidSetting):
            continue_run(tmp_path / name, tmp_path / "second", smaller)
    assert not (tmp_path / "second").exists()
    assert torch.equal(make_run(quick(), net, graph, task, folder=tmp_path / "unfinished").kept, graph.all_kept())


def test_a_run_that_cannot_start_leaves_no_folder_behind(tmp_path: Path) -> None:
    net, graph, task = prepared()
    example = torch.rand(1, 2, SIZE, SIZE, dtype=torch.float64)
    secateur.prune(
        net, example, task, settings=quick(keep_macs=0.6, finetune_epochs=0), graph=graph, folder=tmp_path / "a"
    )
    given = {"settings": quick(keep_macs=0.5, finetune_epochs=0), "graph": graph, "folder": tmp_path / "b"}
    with pytest.raises(InvalidSetting) as caught:  # another precision than the run it continues from
        secateur.prune(
            net, example, task, engine=secateur.Engine(precision="bf16"), continue_from=tmp_path / "a", **given
        )
    assert "precision" in str(caught.value.got)
    assert not (tmp_path / "b").exists()
    result = secateur.prune(net, example, task, continue_from=tmp_path / "a", **given)
    assert result.after.macs <= 0.5 * result.before.macs
