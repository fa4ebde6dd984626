"""Runs on disk: other processes, kills and full disks."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from saved import same

from secateur.errors import RunInUse
from secateur.training.checkpoint import RunFolder

# Other processes


NURSERY = """
import json, os, resource, sys, time
import torch
from secateur.errors import InvalidData
from secateur.training.checkpoint import RunFolder

def tell(*words):
    os.write(1, (json.dumps(words) + "\\n").encode())

def save(folder):
    run = RunFolder(folder)
    state = run.load() or {"step": 0}
    for step in range(state["step"] + 1, 10**6):
        run.append_event({"step": step})
        run.save({"step": step, "weights": [torch.full((100, n), float(step)) for n in range(60)]})
        tell("saved", step)

def hold(folder):
    run = RunFolder(folder)
    tell("held")
    time.sleep(60)

def worker(folder):
    run = RunFolder(folder)
    if not os.fork():
        tell("worker", os.getpid())
    time.sleep(60)

def full(folder):
    run = RunFolder(folder)
    run.append_event({"step": 1})
    run.save({"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    for action in (lambda: run.save({"big": torch.ones(100_000)}), lambda: run.append_event({"big": "x" * 20_000})):
        try:
            action()
        except InvalidData as error:
            tell(error.what, sorted(os.listdir(folder + "/checkpoints")))
    run.append_event({"step": 2})
    assert run.read_events() == [{"step": 1}, {"step": 2}]
    assert run.load() == {"step": 1}

torch.set_num_threads(1)
for line in sys.stdin:
    action, folder = json.loads(line)
    if pid := os.fork():
        tell("gone", os.waitpid(pid, 0)[1])
    else:
        try:
            tell("pid", os.getpid())
            globals()[action](folder)
            os._exit(0)
        finally:
            os._exit(1)
"""


class Nursery:
    """A process that has torch loaded and starts children, as many as we care to kill."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", NURSERY]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, action: str, folder: Path) -> int:
        assert self.process.stdin is not None
        print(json.dumps([action, str(folder)]), file=self.process.stdin, flush=True)
        word, pid = self.hear()
        assert word == "pid"
        return pid

    def hear(self) -> list:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def kill(self, pid: int) -> list[list]:
        """Kill a child; what it said since we last heard it."""
        os.kill(pid, signal.SIGKILL)
        heard = list(iter(self.hear, ["gone", signal.SIGKILL]))
        assert all(word == "saved" for word, _ in heard)
        return heard


@pytest.fixture(scope="module")
def nursery():
    made = Nursery()
    yield made
    made.process.communicate(timeout=10)
    assert made.process.returncode == 0


def test_killed_at_any_moment(tmp_path, nursery) -> None:
    dice, step = random.Random(0), 0
    for _ in range(12):
        pid = nursery.start("save", tmp_path)
        heard = [nursery.hear()]
        time.sleep(dice.uniform(0, 0.05))
        heard += nursery.kill(pid)
        assert [number for _, number in heard] == list(range(step + 1, step + 1 + len(heard)))
        told = heard[-1][1]
        with RunFolder(tmp_path) as run:
            state = run.load()
            assert state is not None
            step = state["step"]
            assert step in (told, told + 1)
            assert same(state["weights"], [torch.full((100, n), float(step)) for n in range(60)])
            assert run.read_events() == [{"step": number} for number in range(1, step + 1)]


def test_one_process_at_a_time(tmp_path, nursery) -> None:
    with RunFolder(tmp_path) as run:
        run.save({"step": 1})
        with pytest.raises(RunInUse, match=f"process {os.getpid()}"):
            RunFolder(tmp_path)
        assert run.load() == {"step": 1}
    pid = nursery.start("hold", tmp_path)
    assert nursery.hear() == ["held"]
    with pytest.raises(RunInUse, match=f"process {pid}"):
        RunFolder(tmp_path)
    nursery.kill(pid)
    RunFolder(tmp_path).close()


def test_workers_that_outlive_the_run_do_not_hold_it(tmp_path, nursery) -> None:
    pid = nursery.start("worker", tmp_path)
    _, worker = nursery.hear()
    try:
        nursery.kill(pid)
        os.kill(worker, 0)
        RunFolder(tmp_path).close()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, nursery) -> None:
    nursery.start("full", tmp_path)
    for action in ("checkpoint", "events.jsonl"):
        message, left = nursery.hear()
        assert action in message
        assert str(tmp_path) in message
        assert left == ["00000001"]
    assert nursery.hear() == ["gone", 0]
