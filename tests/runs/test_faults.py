"""A disk that fails at any call of a run: a line says so, nothing is damaged, and the run is resumed to the bit."""

import errno
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from faults import Faults
from killing import check_same, outcome

import secateur
from secateur import cli
from secateur.pruning.measure import time_networks
from secateur.runs import record

PRUNE = (
    "prune tiny_job:build --keep-macs 0.6 --tick-removes 0.2 --tock-every 1 --tock-epochs 1 --finetune-epochs 1 "
    "--repair 32 --retrain-epochs 1 --checkpoint-steps 2 --device cpu --quiet"
)
"""Trains, prunes, repairs, fine-tunes and saves."""
HARMLESS = ("mkdir", "truncate .lock", "truncate run/.lock")
"""Making a folder that is there already, and clearing a lock that is given up: the run need not end for that."""
FAULTS = {"full": (errno.ENOSPC, True), "full once": (errno.ENOSPC, False), "broken": (errno.EIO, False)}


class Command:
    """The command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str]:
        """Exit status, and what is on stderr."""
        status = 0
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, self.capsys.readouterr().err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Saves whenever a checkpoint is due, and times networks once."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("secateur.recipes.timing.time_networks", partial(time_networks, repetitions=1))
    monkeypatch.setattr(record, "PATIENCE", 0)
    return Command(capsys)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a run on a disk that does not fail, and what it asked of the disk."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch, Faults(folder).active() as counted:
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(record, "PATIENCE", 0)
        cli.main([*PRUNE.split(), "--out", str(folder)])
    return folder, counted.calls


def check_said(err: str, folder: Path, code: int) -> None:
    """One line, which names the folder and the reason."""
    (line,) = err.splitlines()
    assert line.startswith("secateur: ")
    assert str(folder) in line
    assert ("the disk is full" in line) == (code == errno.ENOSPC)
    assert os.strerror(code) in line
    assert "damaged" not in line
    assert "/." not in line  # no temporary file


def hidden(folder: Path) -> list[Path]:
    """What should not be left of files that were not finished."""
    return [path for path in folder.rglob(".*") if path.name != ".lock"]


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 12))])
def test_a_run_whose_disk_fails_at_any_call(
    kind: str, part: int, whole: tuple[Path, list[str]], command: Command, tmp_path: Path
) -> None:
    code, lasting = FAULTS[kind]
    out, wanted, calls = tmp_path / "run", outcome(whole[0]), len(whole[1])
    assert calls > 300
    # One in the quick tests, at another place for each kind; all of them in the slow ones.
    one = calls * list(FAULTS).index(kind) // 3 + 70
    for number in [one] if part == 0 else range(part - 1, calls, 11):
        with Faults(out, number, code, lasting).active() as faults:
            status, err = command(*PRUNE.split(), "--out", out)
        print(f"{number} of {calls}: {faults.calls[number]}: {status} {err}")
        if status or not faults.calls[number].startswith(HARMLESS):
            assert status == 2
            check_said(err, out, code)
        assert not hidden(out)
        if (out / "result" / "summary.json").exists():
            secateur.load(out, build="tiny_job:build")
        begun = (out / "config.json").exists()
        again = ["resume", out, "--device", "cpu", "--quiet"] if begun else [*PRUNE.split(), "--out", out]
        assert command(*again) == (0, "")
        check_same(outcome(out), wanted)
        assert not hidden(out)
        shutil.rmtree(out)


MORE = {
    "continue": "continue SOURCE --keep-macs 0.3 --out OUT/run --device cpu --quiet",
    "repair": "repair SOURCE --images 32 --out OUT/run --device cpu --quiet",
    "tune": "train tiny_job:build --weights SOURCE --epochs 1 --out OUT/run --device cpu --quiet",
    "safetensors": "export SOURCE --build tiny_job:build --state-dict OUT/weights.safetensors",
    "pth": "export SOURCE --build tiny_job:build --state-dict OUT/weights.pth",
    "torchscript": "export SOURCE --build tiny_job:build --torchscript OUT/network.ts",
    "report": "report SOURCE --out OUT/report.html",
    "figure": "structure SOURCE --figure OUT/figure.pdf",
}
"""Commands that write into a folder."""


@pytest.mark.parametrize(
    "name", [name if name == "pth" else pytest.param(name, marks=pytest.mark.slow) for name in MORE]
)
def test_other_commands_whose_disk_fails_at_any_call(
    name: str, whole: tuple[Path, list[str]], command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = MORE[name].replace("SOURCE", str(whole[0])).replace("OUT", str(out)).split()
    with Faults(out).active() as counted:
        assert command(*arguments)[0] == 0
    for code, lasting in FAULTS.values():
        for number in range(len(counted.calls)):
            shutil.rmtree(out)
            with Faults(out, number, code, lasting).active() as faults:
                status, err = command(*arguments)
            if status or not faults.calls[number].startswith(HARMLESS):
                assert status == 2, (faults.calls[number], err)
                check_said(err, out, code)
            assert not hidden(out)
            for summary in out.rglob("summary.json"):
                secateur.load(summary.parent, build="tiny_job:build")
            if status:
                begun = (out / "run" / "config.json").exists()
                again = ["resume", out / "run", "--device", "cpu", "--quiet"] if begun else arguments
                assert command(*again)[0] == 0, faults.calls[number]
            assert not hidden(out)
            out.mkdir(exist_ok=True)
