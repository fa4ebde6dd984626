"""Two processes take the decisions that one would, end with its weights, and end together when one is in trouble."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from many import CASES, EVEN, NAN_AT, at_call, by_parts, make_run, outcome
from small import Net, batches, prepared, quick
from torch import Tensor, nn

import secateur
from secateur import Diverged, Engine, Finished, Pruner, analyze
from secateur.runs.run import Run
from secateur.training.checkpoint import RunFolder
from secateur.training.distributed import World, sync_batchnorm_, unsync_batchnorm_
from secateur.training.loop import Trainer, Work

LIMIT = 120
"""Seconds after which two processes are held to hang; they need about 20."""
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
"""In double precision two processes differ from one in the order of their sums only; found: 2e-16 at most."""


def start(folder: Path, *cases: str, **environment: str) -> subprocess.Popen:
    script = str(Path(__file__).with_name("many.py"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*launch, script, str(folder), *cases],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(job: subprocess.Popen) -> tuple[int, str]:
    """The exit status and what was said; two processes that wait for each other fail the test."""
    try:
        said = job.communicate(timeout=LIMIT)[1]
    except subprocess.TimeoutExpired:
        job.terminate()  # torchrun ends its processes too
        raise AssertionError(f"two processes hang:\n{job.communicate()[1]}") from None
    return job.returncode, said


def results(folder: Path, case: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{case}-{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have done every case, once for all workers of the tests."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "done"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            status, said = finish(start(folder, *CASES))
            (folder / "said").write_text("" if status == 0 else said)
    assert not (folder / "said").read_text()
    return folder


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def check_same_decisions(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert torch.equal(found["kept"], wanted["kept"])
    for key in ("names", "removed", "metrics"):
        assert found[key] == wanted[key]


@pytest.mark.parametrize("case", ["even", "uneven", "part", "masked", "loader", "list", "apoz", "norms", "averaged"])
def test_two_processes_do_what_one_does(done: Path, case: str) -> None:
    normed = CASES[case][0] is Net
    alone = outcome(make_run(case, change=by_parts if normed else lambda task: task))
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


@pytest.mark.parametrize("case", list(CASES))
def test_both_end_with_the_same_to_the_last_bit(done: Path, case: str) -> None:
    # Running statistics too, which DistributedDataParallel alone leaves different after the last batch.
    one, other = results(done, case)
    check_same_decisions(one, other)
    assert one["losses"] == other["losses"]
    assert one["error"] == other["error"]
    assert same(one["state"], other["state"])


def test_only_the_first_process_writes(done: Path) -> None:
    one, other = results(done, "written")
    assert any(write.startswith("os.mkdir") and "checkpoints" in write for write in one["writes"])
    assert other["writes"] == []
    events = (done / "written" / "events.jsonl").read_text().splitlines()
    assert [json.loads(event)["event"] for event in events] == [name.split()[0] for name in one["names"][:-1]]


def test_a_run_that_was_killed_goes_on_to_the_last_bit_and_so_it_does_when_one_process_dies(
    done: Path, tmp_path: Path
) -> None:
    job = start(tmp_path, "written", SLEEP_AT="11")  # in the first epoch of the first Tock
    asleep = [tmp_path / f"asleep-{rank}" for rank in range(2)]
    until = time.monotonic() + LIMIT
    while not all(path.exists() and path.read_text() for path in asleep) and time.monotonic() < until:
        time.sleep(0.05)
    for path in asleep:
        os.kill(int(path.read_text()), signal.SIGKILL)
    status, _ = finish(job)
    assert status != 0
    status, said = finish(start(tmp_path, "written", DIE_AT="8"))  # in the third Tick
    assert status != 0
    assert "exitcode  : 1" in said
    assert not list(tmp_path.glob("*.pt"))
    status, said = finish(start(tmp_path, "written"))
    assert status == 0, said
    for own, wanted in zip(results(tmp_path, "written"), results(done, "written"), strict=True):
        assert 0 < own["seen"] < wanted["seen"]
        check_same_decisions(own, wanted)
        assert own["losses"] == pytest.approx(wanted["losses"], rel=1e-12)
        assert same(own["state"], wanted["state"])


def test_a_loss_that_is_not_finite_in_one_process_ends_both(done: Path) -> None:
    alone = outcome(make_run("nan", change=at_call(NAN_AT, lambda value: value * float("nan"))))
    assert f"not finite in Tick 1, step {NAN_AT}" in alone["error"]
    for case in ("nan", "written_nan"):
        for own in results(done, case):
            assert own["error"] == alone["error"]
            assert same(own["state"], alone["state"])


def test_no_checkpoint_is_made_of_a_network_that_is_broken(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done / "written_nan", tmp_path / "copy")
    with RunFolder(tmp_path / "copy") as folder:
        state = folder.load()
    assert state is not None
    assert state["position"]["step"] == 3  # of four until the loss is NaN, with a checkpoint every three
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_a_signal_to_one_process_stops_both_at_the_same_step(done: Path, tmp_path: Path) -> None:
    for own in results(done, "stopped"):
        assert "stopped and saved" in own["error"]
        assert own["names"] == ["Start", "Tick 1", "Tick 2"]
    shutil.copytree(done / "stopped", tmp_path / "copy")
    resumed = outcome(make_run("stopped", tmp_path / "copy"))
    assert 0 < resumed["seen"] < EVEN * len(resumed["losses"])
    assert "FineTune epoch 2" in resumed["names"]


def test_what_is_compiled_is_the_present_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    net = nn.Linear(2, 1)
    trainer = Trainer(net, Engine(compile=True))
    work = Work("Tock", lambda model, batch: model(batch).mean(), torch.optim.SGD(net.parameters(), 0.1), lambda _: 0.1)
    wrappers = [nn.Sequential(net), nn.Sequential(net)]
    for wrapper in wrappers:
        for trainer.wrapped in (wrapper, wrapper):
            trainer.epoch([torch.ones(3, 2)], work)
    assert [id(model) for model in compiled] == [id(wrapper) for wrapper in wrappers]


@pytest.fixture
def syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were GPUs; a SyncBatchNorm without other processes computes as any batch norm."""
    monkeypatch.setattr(World, "can_sync", lambda world, model: True)


@pytest.mark.usefixtures("syncing")
def test_synced_batch_norms_come_back_as_what_they_were() -> None:
    net, graph, task = prepared()
    plain = quick()(net, graph, task)
    run = Run(quick(), net, graph, task, engine=Engine(sync_batchnorm=True))
    norms = [module for module in run.model.modules() if isinstance(module, nn.SyncBatchNorm)]
    assert [type(norm).__name__ for norm in norms] == ["GatedSyncBatchNorm"] * 3
    *_, last = run.events()
    assert isinstance(last, Finished)
    model = last.result.model
    assert [type(module) for module in model.modules()] == [type(module) for module in net.modules()]
    assert [set(vars(module)) for module in model.modules()] == [set(vars(module)) for module in net.modules()]
    assert same(model.state_dict(), plain.model.state_dict())
    assert type(net.norm) is nn.BatchNorm2d


@pytest.mark.usefixtures("syncing")
def test_so_they_do_when_training_diverges() -> None:
    net, graph, task = prepared()
    broken = at_call(3, lambda value: value * float("nan"))(task)
    with pytest.raises(Diverged) as caught:
        quick()(net, graph, broken, engine=Engine(sync_batchnorm=True))
    assert isinstance(caught.value.result, secateur.Result)
    assert type(caught.value.result.model.norm) is nn.BatchNorm2d


def test_where_norms_cannot_be_synced_it_is_said() -> None:
    said: list[str] = []
    run = Run(quick(), *prepared(), engine=Engine(sync_batchnorm=True), say=said.append)
    assert said == ["sync_batchnorm has no effect: it is for several processes with a GPU each"]
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
