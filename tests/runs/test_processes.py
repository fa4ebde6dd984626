"""Runs in several processes, and in processes that are killed."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import many
import pytest
import torch
from forks import Fork
from many import CASES, CONTINUED, EVEN, NAN_AT, at_call, by_parts, outcome, run_of
from once import made_once
from small import Net, batches, finished, make_run, prepared, quick, same
from torch import Tensor, nn

from secateur import Diverged, Engine, Pruner, analyze
from secateur.runs import record
from secateur.runs.prune import finish
from secateur.training.checkpoint import RunFolder
from secateur.training.distributed import World, sync_batchnorm_, unsync_batchnorm_
from secateur.training.loop import Trainer, Work

LIMIT = 120
"""Seconds after which processes are held to hang; they need about 20."""
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
"""In double precision two processes differ from one in the order of their sums only; found: 2e-16 at most."""


def results(folder: Path, case: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{case}-{rank}.pt") for rank in range(2)]


def free_port() -> str:
    with socket.socket() as made:
        made.bind(("localhost", 0))
        return str(made.getsockname()[1])


def in_two(folder: Path, *cases: str, **environment: str) -> list[int | None]:
    """Two processes do these cases; with which status they end."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "GLOO_SOCKET_IFNAME": "lo"}
    pair = [Fork(many.main, folder, cases, RANK=str(rank), **world, **environment) for rank in range(2)]
    for process in pair:
        process.join(LIMIT)
    return [process.exitcode for process in pair]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have done every case; first one of them died in a part of a run."""

    def make(folder: Path) -> None:
        folder.mkdir()
        assert in_two(folder, "written", DIE_AT="18") == [1, 1]  # the other ends too
        assert not list(folder.glob("*.pt"))
        assert in_two(folder, *CASES, CONTINUED) == [0, 0]

    return made_once(tmp_path_factory, "done", make)


def check_same_decisions(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert torch.equal(found["kept"], wanted["kept"])
    for key in ("names", "removed", "metrics"):
        assert found[key] == wanted[key]


@pytest.mark.parametrize("case", ["part", "masked", "apoz", "averaged"])
def test_two_processes_do_what_one_does(done: Path, case: str) -> None:
    normed = CASES[case][0] is Net
    alone = outcome(run_of(case, change=by_parts if normed else lambda task: task))
    both = results(done, case)
    assert len(alone["removed"]) >= 3
    assert {"Tock 1, epoch 2", "FineTune epoch 2"} <= set(alone["names"])
    for own in both:
        check_same_decisions(own, alone)
        for found, wanted in zip(own["scores"], alone["scores"], strict=True):
            torch.testing.assert_close(found, wanted, **CLOSE)
        assert own["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        assert list(own["state"]) == list(alone["state"])
        for name, wanted in alone["state"].items():
            torch.testing.assert_close(own["state"][name], wanted, msg=name, **CLOSE)
    assert sum(own["seen"] for own in both) == alone["seen"]
    assert both[0]["seen"] <= both[1]["seen"] < 0.6 * alone["seen"]


@pytest.mark.slow
def test_torchrun(done: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*launch, many.__file__, tmp_path, "averaged"], env=environment, check=True, timeout=LIMIT)
    for found, wanted in zip(results(tmp_path, "averaged"), results(done, "averaged"), strict=True):
        check_same_decisions(found, wanted)
        assert same(found["state"], wanted["state"])


@pytest.mark.parametrize("case", list(CASES))
def test_both_end_with_the_same_to_the_last_bit(done: Path, case: str) -> None:
    # Running statistics too, although each has seen its own parts of the batches.
    one, other = results(done, case)
    check_same_decisions(one, other)
    assert one["losses"] == other["losses"]
    assert one["error"] == other["error"]
    assert same(one["state"], other["state"])


def test_a_run_that_lost_a_process_is_resumed_to_the_last_bit_and_only_the_first_writes(done: Path) -> None:
    resumed, whole = results(done, "written"), results(done, "whole")
    for own, wanted in zip(resumed, whole, strict=True):
        assert 0 < own["seen"] < wanted["seen"]
        check_same_decisions(own, wanted)
        assert own["losses"] == pytest.approx(wanted["losses"], rel=1e-12)
        assert same(own["state"], wanted["state"])
    assert any(write.startswith("os.mkdir") and "checkpoints" in write for write in resumed[0]["writes"])
    assert resumed[1]["writes"] == []
    events = (done / "written" / "events.jsonl").read_text().splitlines()
    assert len(events) == len(whole[0]["names"]) - 1


def test_both_continue_from_another_run(done: Path) -> None:
    one, other = results(done, CONTINUED)
    assert torch.equal(one["kept"], other["kept"])
    assert same(one["state"], other["state"])
    assert not one["kept"].all()


def test_a_loss_that_is_not_finite_in_one_process_ends_both(done: Path, tmp_path: Path) -> None:
    alone = outcome(run_of("nan", change=at_call(NAN_AT, lambda value: value * float("nan"))))
    assert alone["error"] == "Diverged"
    for own in results(done, "nan"):
        assert own["error"] == "Diverged"
        assert same(own["state"], alone["state"])
    # There is no checkpoint of the broken network.
    shutil.copytree(done / "nan", tmp_path / "copy")
    with RunFolder(tmp_path / "copy") as folder:
        state = folder.load()
    assert state is not None
    assert state["position"]["step"] == 3  # of four until the loss is NaN, with a checkpoint every three
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_a_signal_to_one_process_stops_both_at_the_same_step(done: Path, tmp_path: Path) -> None:
    for own in results(done, "stopped"):
        assert own["error"] == "Interrupted"
        assert own["names"] == ["Start", "Tick 1", "Tick 2"]
    shutil.copytree(done / "stopped", tmp_path / "copy")
    resumed = outcome(run_of("stopped", tmp_path / "copy"))
    assert 0 < resumed["seen"] < EVEN * len(resumed["losses"])
    assert "FineTune epoch 2" in resumed["names"]


# A single process that is killed.


def do(folder: Path) -> None:
    """A run that saves whenever it can; the result is in the folder."""
    record.PATIENCE = 0
    result = finish(run_of("written", folder))
    torch.save(result.model.state_dict(), folder / "result.pt")


def killed(folder: Path, most: int, seed: int) -> int:
    """Start a run again and again and kill it, at most so often, until it ends; how often."""
    dice, kills = random.Random(seed), 0
    while not (folder / "result.pt").exists():
        process = Fork(do, folder)
        newest = newest_checkpoint(folder) + dice.randrange(1, 8)
        limit = time.monotonic() + LIMIT
        while process.is_alive() and (kills == most or newest_checkpoint(folder) < newest):
            assert time.monotonic() < limit
            time.sleep(0.002)
        time.sleep(dice.uniform(0, 0.02))
        if process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join(LIMIT)
        assert process.exitcode in (0, -signal.SIGKILL)
    return kills


def newest_checkpoint(folder: Path) -> int:
    numbers = [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal()]
    return max(numbers, default=0)


@pytest.mark.parametrize("most", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(most: int, tmp_path: Path) -> None:
    whole = finish(run_of("written"))
    assert killed(tmp_path, most, seed=0) == most or most > 5
    assert same(torch.load(tmp_path / "result.pt"), whole.model.state_dict())
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [{**event, "seconds": 0} for event in events] == [{**e.to_dict(), "seconds": 0} for e in whole.history]


# Parts that many processes need, in one.


def test_a_network_is_compiled_once_until_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: compiled.append(model) or model)
    net = nn.Linear(2, 1)
    trainer = Trainer(net, Engine(compile="always"))
    work = Work("Tock", lambda model, batch: model(batch).mean(), torch.optim.SGD(net.parameters(), 0.1), lambda _: 0.1)
    for count in (1, 2):
        for _ in range(2):
            trainer.epoch([torch.ones(3, 2)], work)
        assert compiled == [net] * count
        trainer.forget()


@pytest.mark.parametrize(
    ("score", "size", "resumable"), [("apoz", 1, True), ("apoz", 2, False), ("taylor", 2, True), ("l1", 2, True)]
)
def test_what_each_process_has_observed_by_itself_is_not_resumed(score: str, size: int, resumable: bool) -> None:
    run = make_run(quick(score=score), *prepared())
    run.world = World(size=size)
    phase = run.pruning
    assert phase is not None
    phase.start(run)
    assert phase.resumable() is resumable


def test_no_captured_step_outlives_a_run() -> None:
    run = make_run(quick(), *prepared())
    names: set[str] = set()
    run.on_step = lambda *_: names.update(run.trainer._graphs)
    finish(run)
    assert names == {"Tick", "Tock", "finetune"}
    assert run.trainer._graphs == {}


@pytest.mark.parametrize("diverges", [False, True])
def test_synced_batch_norms_come_back_as_what_they_were(diverges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if there were GPUs; a SyncBatchNorm without other processes computes as any batch norm.
    monkeypatch.setattr(World, "can_sync", lambda world, model: True)
    net, graph, task = prepared()
    plain = finished(quick(), net, graph, task)
    given = at_call(3, lambda value: value * float("nan"))(task) if diverges else task
    run = make_run(quick(), net, graph, given, engine=Engine(sync_batchnorm=True))
    norms = [module for module in run.model.modules() if isinstance(module, nn.SyncBatchNorm)]
    assert [type(norm).__name__ for norm in norms] == ["GatedSyncBatchNorm"] * 3
    if diverges:
        with pytest.raises(Diverged) as caught:
            finish(run)
        model: Any = caught.value.result.model
    else:
        model = finish(run).model
        assert same(model.state_dict(), plain.model.state_dict())
    assert [type(module) for module in model.modules()] == [type(module) for module in net.modules()]
    assert [set(vars(module)) for module in model.modules()] == [set(vars(module)) for module in net.modules()]
    assert type(net.norm) is nn.BatchNorm2d


def test_where_norms_cannot_be_synced_it_is_said() -> None:
    said: list[str] = []
    run = make_run(quick(), *prepared(), engine=Engine(sync_batchnorm=True), progress=said.append)
    assert len(said) == 1
    assert "sync_batchnorm" in said[0]
    assert not any(isinstance(module, nn.SyncBatchNorm) for module in run.model.modules())


class OwnNorm(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_synced_norms_with_gates_cut_and_merged() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), OwnNorm(8), nn.Conv2d(8, 4, 1)]
    net = nn.Sequential(*layers).double().eval()
    images = batches(1)[0][0]
    before, keys = net(images), list(net.state_dict())
    graph = analyze(net, images)
    own = sync_batchnorm_(net)
    assert [type(layer) for layer in net][1::2] == [nn.SyncBatchNorm, OwnNorm]
    assert own == {net[1]: nn.BatchNorm2d}
    assert list(net.state_dict()) == keys
    torch.testing.assert_close(net(images), before)
    pruner = Pruner(net, graph=graph, score="l1")
    torch.testing.assert_close(net(images), before)
    pruner.prune(0.5)
    cut = net(images)
    pruner.finish()
    unsync_batchnorm_(own)
    assert [type(layer) for layer in net] == [type(layer) for layer in layers]
    assert type(net[1]) is nn.BatchNorm2d
    assert list(net.state_dict()) == keys
    assert net[1].num_features == net[0].out_channels < 8
    torch.testing.assert_close(net(images), cut)
