"""A recipe that is trained first and then pruned, killed in both, ends in the same bits."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import miniature  # pyright: ignore
import pytest
from killing import Fork, finish, kill, wait_until  # pyright: ignore

from secateur import cli
from secateur.cli.display import Display

HERE = Path(__file__).parent
SCHEDULE = "--keep-macs 0.3 --tick-removes 0.01 --ticks-per-tock 2 --tock-epochs 2 --finetune-epochs 20 --device cpu"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 of ten images to train on, so that the baseline takes 160 steps."""
    folder = tmp_path_factory.mktemp("cifar")
    miniature.write_cifar10(folder, num_per_file=2)
    return folder


def command(data: Path, folder: Path) -> list[str]:
    recipe = ["own_networks:plain@cifar10", "--data", str(data), "--width", "0.5"]
    return ["prune", *recipe, *SCHEDULE.split(), "--out", str(folder)]


def kill_when(holds: Callable[[], bool], data: Path, folder: Path) -> None:
    """Start the command, or go on with it, and kill it as soon as it holds."""
    process = Fork(folder, command(data, folder), cwd=HERE)
    assert wait_until(process, holds), finish(process)
    kill(process)
    assert process.returncode == -signal.SIGKILL


def events(folder: Path) -> int:
    file = folder / "events.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def check_same(folder: Path, other: Path) -> None:
    for name in ("model.safetensors", "plan.json"):
        assert (folder / "result" / name).read_bytes() == (other / "result" / name).read_bytes()


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    cli.main([*command(data, folder), "--quiet"])
    return folder


def test_killed_in_the_baseline_and_in_pruning(
    undisturbed: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    kill_when(lambda: events(folder / "baseline") > 40, data, folder)
    assert not (folder / "config.json").exists()
    done = events(folder / "baseline")

    # The same command goes on with the baseline, then prunes.
    kill_when(lambda: events(folder) > 4, data, folder)
    check_same(folder / "baseline", undisturbed / "baseline")
    assert events(folder / "baseline") == events(undisturbed / "baseline") > done

    with pytest.raises(SystemExit) as stop:
        cli.main(command(data, folder))
    assert stop.value.code == 2
    message = f"secateur: {folder} holds a run already: secateur resume {folder}, or name another --out\n"
    assert capsys.readouterr().err == message

    # All that is needed from here on is in the run's own folder.
    shutil.rmtree(folder / "baseline")
    cli.main(["resume", str(folder), "--device", "cpu"])
    check_same(folder, undisturbed)


def test_stopped_in_the_baseline(
    undisturbed: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, shown = tmp_path / "run", Display.event

    def stop_at_ten(display: Display, event: Any) -> None:
        if event.name == "FineTune epoch 10":
            signal.raise_signal(signal.SIGINT)
        shown(display, event)

    monkeypatch.setattr(Display, "event", stop_at_ten)
    with pytest.raises(SystemExit) as stop:
        cli.main(command(data, folder))
    monkeypatch.undo()
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 130
    assert f"no weights are given: training for 160 epochs first, in {folder / 'baseline'}" in lines
    assert lines[-1] == "secateur: stopped and saved; go on with: the same command as before"
    assert not (folder / "baseline" / "result").exists()
    cli.main(command(data, folder))
    check_same(folder, undisturbed)
