"""Runs as a user starts them, or faster, ended by signals at moments of our choice."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killable
import numpy
import torch
from forks import forks

from secateur import cli
from secateur import prune as prune_model
from secateur.training.checkpoint import unseal

HERE = Path(__file__).parent
SETTINGS = (
    "--keep-macs 0.5 --tick-removes 0.05 --tick-data 0.7 --tock-every 2 --tock-epochs 2 --finetune-epochs 8 "
    "--retrain-epochs 1 --ema 0.9 --distill 0.3 --repair 32 --checkpoint-steps 3 --no-tune"
)
"""A GPU computes the same bits again with them."""
PATIENCE = 60.0


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "secateur", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=HERE, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def prune(folder: Path) -> subprocess.Popen[str]:
    return start(*beginning(folder))


def beginning(folder: Path, device: str = "cpu") -> list[str]:
    return ["prune", "killable:build", *SETTINGS.split(), "--device", device, "--out", str(folder)]


class Fork(forks.Process):
    """A command in a process that has torch loaded already, and so trains within a second; used as a Popen is."""

    def __init__(
        self, folder: Path, arguments: list[str], do: Callable[[list[str]], object] = cli.main, cwd: Path = HERE
    ) -> None:
        super().__init__()
        self.folder, self.arguments, self.do, self.cwd = folder, arguments, do, cwd
        self.start()

    def run(self) -> None:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{self.folder}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.chdir(self.cwd)
        torch.set_num_threads(1)
        numpy.random.seed()  # as Python's random numbers are, after a fork
        self.do(self.arguments)

    def poll(self) -> int | None:
        return self.exitcode

    def send_signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.join(timeout)
        assert self.exitcode is not None
        return Path(f"{self.folder}.out").read_text(), Path(f"{self.folder}.err").read_text()

    @property
    def returncode(self) -> int | None:
        return self.exitcode


def in_python(folder: list[str]) -> None:
    """A run in that folder, from Python, which does not end by itself."""
    job = killable.build()
    prune_model(job.model, job.example, job.task, keep_macs=0.5, finetune_epochs=10_000, folder=folder[0])


Started = subprocess.Popen[str] | Fork


def begin(folder: Path, device: str = "cpu") -> Fork:
    return Fork(folder, beginning(folder, device))


def resume(folder: Path, *more: str) -> Fork:
    return Fork(folder, ["resume", str(folder), *more])


def finish(process: Started) -> tuple[int, str, str]:
    """Exit status, stdout and stderr."""
    out, err = process.communicate(timeout=2 * PATIENCE)
    return process.returncode, out, err


def wait_until(process: Started, holds: Callable[[], bool]) -> bool:
    """Whether it came to hold before the process ended."""
    limit = time.monotonic() + PATIENCE
    while process.poll() is None:
        if holds():
            return True
        assert time.monotonic() < limit
        time.sleep(0.005)
    return False


def has_begun(process: Started, folder: Path) -> bool:
    """Wait until the process has the run's folder, after which it trains."""
    held = folder / ".lock"
    return wait_until(process, lambda: held.exists() and held.read_text() == str(process.pid))


def has_saved(process: Started, folder: Path) -> bool:
    """Wait for the first checkpoint of this process."""
    before = checkpoints(folder)[-1:]
    return wait_until(process, lambda: checkpoints(folder)[-1:] != before)


def checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "checkpoints").glob("*") if path.name.isdecimal())


def place(folder: Path) -> str:
    """Where the run would be resumed."""
    there = checkpoints(folder)
    if not there:
        return "Start"
    state = unseal((there[-1] / "state.json").read_bytes())["state"]["dict"]
    step = state["position"]["dict"]["step"]
    return f"phase {state['index']}, stage {state['stage']}, epoch {state['epoch']}, step {step}"


def kill(process: Started) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE)


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves behind, but for how long things took."""
    result = folder / "result"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    history = [json.loads(line) for line in (result / "history.jsonl").read_text().splitlines()]
    for event in (*events, *history):
        del event["seconds"]
    return {
        "model": (result / "model.safetensors").read_bytes(),
        "plan": (result / "plan.json").read_text(),
        "events": events,
        "history": history,
    }


def check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["events"] == other["events"]
    assert one["history"] == other["history"]
    assert one["plan"] == other["plan"]
    assert one["model"] == other["model"]
