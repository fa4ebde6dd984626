"""Runs on disk: other processes, kills and full disks."""

import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from saved import same

from secateur.errors import InvalidData, RunInUse
from secateur.training.checkpoint import RunFolder

# Only these processes are forked, which hold no locks that matter.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class Child:
    """A fork that does something with a folder, and tells us about it."""

    def __init__(self, do: Callable[[Path, Callable[..., None]], None], folder: Path) -> None:
        ours, its = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            status = 1
            with suppress(BaseException):
                os.close(ours)
                do(folder, lambda *words: os.write(its, (json.dumps(words) + "\n").encode()))
                status = 0
            os._exit(status)
        os.close(its)
        self.said = os.fdopen(ours)

    def hear(self) -> list[Any]:
        return json.loads(self.said.readline())

    def end(self, number: int = 0) -> tuple[int, list[list[Any]]]:
        """Send a signal; how the fork ended, and what it said since we last heard it."""
        if number:
            os.kill(self.pid, number)
        status = os.waitpid(self.pid, 0)[1]
        return os.waitstatus_to_exitcode(status), [json.loads(line) for line in self.said if line.endswith("\n")]


@contextmanager
def child(do: Callable[..., None], folder: Path) -> Iterator[Child]:
    made = Child(do, folder)
    try:
        yield made
    finally:
        made.said.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(made.pid, signal.SIGKILL)
            os.waitpid(made.pid, 0)


def weights(step: int) -> list[torch.Tensor]:
    return [torch.full((100, n), float(step)) for n in range(60)]


def save(folder: Path, tell: Callable[..., None]) -> None:
    run = RunFolder(folder)
    state = run.load() or {"step": 0}
    for step in range(state["step"] + 1, 10**6):
        run.append_event({"step": step})
        run.save({"step": step, "weights": weights(step)})
        tell(step)


def test_killed_at_any_moment(tmp_path: Path) -> None:
    dice, step = random.Random(0), 0
    for _ in range(12):
        with child(save, tmp_path) as process:
            heard = [process.hear()]
            time.sleep(dice.uniform(0, 0.05))
            status, more = process.end(signal.SIGKILL)
        assert status == -signal.SIGKILL
        heard += more
        assert [number for (number,) in heard] == list(range(step + 1, step + 1 + len(heard)))
        with RunFolder(tmp_path) as run:
            state = run.load()
            assert state is not None
            assert state["step"] - heard[-1][0] in (0, 1)
            step = state["step"]
            assert same(state["weights"], weights(step))
            assert run.read_events() == [{"step": number} for number in range(1, step + 1)]


def hold(folder: Path, tell: Callable[..., None]) -> None:
    run = RunFolder(folder)
    tell("held")
    time.sleep(60)
    run.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.save({"step": 1})
        with pytest.raises(RunInUse, match=f"process {os.getpid()}"):
            RunFolder(tmp_path)
        assert run.load() == {"step": 1}
    with child(hold, tmp_path) as process:
        assert process.hear() == ["held"]
        with pytest.raises(RunInUse, match=f"process {process.pid}"):
            RunFolder(tmp_path)
    RunFolder(tmp_path).close()


def with_worker(folder: Path, tell: Callable[..., None]) -> None:
    run = RunFolder(folder)
    if not os.fork():
        tell(os.getpid())
    time.sleep(60)
    run.close()


def test_workers_that_outlive_the_run_do_not_hold_it(tmp_path: Path) -> None:
    with child(with_worker, tmp_path) as process:
        (worker,) = process.hear()
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        try:
            os.kill(worker, 0)
            RunFolder(tmp_path).close()
        finally:
            os.kill(worker, signal.SIGKILL)


def fill_the_disk(folder: Path, tell: Callable[..., None]) -> None:
    run = RunFolder(folder)
    run.append_event({"step": 1})
    run.save({"step": 1})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    for action in (lambda: run.save({"big": torch.ones(100_000)}), lambda: run.append_event({"big": "x" * 20_000})):
        try:
            action()
        except InvalidData as error:
            tell(error.what, sorted(path.name for path in (folder / "checkpoints").iterdir()))
    run.append_event({"step": 2})
    assert run.read_events() == [{"step": 1}, {"step": 2}]
    assert run.load() == {"step": 1}


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    with child(fill_the_disk, tmp_path) as process:
        status, said = process.end()
    assert status == 0
    assert [left for _, left in said] == [["00000001"], ["00000001"]]
    assert all(str(tmp_path) in what for what, _ in said)
