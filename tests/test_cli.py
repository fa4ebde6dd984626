"""The command as a whole: its list, and what it prints for mistakes."""

import json
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import secateur
from secateur import cli
from secateur.cli.command import _run as run_command
from secateur.cli.command import commands
from secateur.cli.options import NewRunOutput, Output, RunOutput, parse_shape
from secateur.errors import DamagedCheckpoint, InvalidSetting


def run(*arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it."""
    return subprocess.run([sys.executable, "-m", "secateur", *arguments], capture_output=True, text=True, **kwargs)


def fail(capsys, *arguments: object) -> str:
    """What a command that fails prints on stderr, beside its progress."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    lines = [line for line in captured.err.splitlines() if not line.startswith("analysing")]  # said when it takes long
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_list_of_commands_answers_at_once_and_is_short(arguments):
    run(*arguments)  # may compile modules
    start = time.perf_counter()
    result = run(*arguments)
    assert time.perf_counter() - start < 1
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) < 50
    for name in commands():
        assert f"• {name} " in result.stdout
    assert "examples:" not in result.stdout


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert not stop.value.code
    assert capsys.readouterr().out == f"secateur {secateur.__version__}\n"


def test_help_teaches_with_examples(capsys):
    for name in commands():
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        assert f"  secateur {name}" in capsys.readouterr().out


def test_unknown_commands_suggest_known_ones(capsys):
    assert "'analyze'" in fail(capsys, "analyse", "resnet20")


def test_analyze_prints_the_graph_or_json_alone(capsys):
    cli.main(["analyze", "resnet20", "--no-probe"])
    assert "stage1" in capsys.readouterr().out
    cli.main(["analyze", "tiny_job:build", "--json", "--ignore", "0"])
    graph = json.loads(capsys.readouterr().out)
    assert isinstance(graph, dict)
    assert graph["groups"]


def test_networks_of_the_current_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text("from torch import nn\ndef build(): return nn.Conv2d(3, 4, 3)\n")
    result = run("analyze", "own:build", "--input", "1x3x8x8", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (tmp_path / "gray.py").write_text("from torch import nn\ndef build(): return nn.Conv2d(1, 4, 3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    line = fail(capsys, "analyze", "gray:build")
    assert "--input 1x1x28x28" in line
    assert "secateur.Job" in line


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["analyze", "resnet65"], "'resnet56'"),
        (["analyze", "resnet20", "--input", "3,32,32"], "1x3x224x224"),
        (["analyze", "tiny_job:nothing"], "NoneType"),
        (["export", "resnet20"], "--onnx FILE"),
        (["bench"], "secateur bench resnet56"),
        (["structure"], "secateur structure runs/pruned"),
    ],
)
def test_a_mistake_is_one_line(arguments, word, capsys):
    line = fail(capsys, *arguments)
    assert line.startswith("secateur: ")
    assert word in line


def open_nothing():
    Path("nowhere").read_text()


@pytest.mark.parametrize(
    ("run", "place"),
    [(open_nothing, r' at test_cli.py:[0-9]+: Path\("nowhere"\).read_text\(\)'), (Path("nowhere").read_bytes, "")],
    ids=["the user's code", "ours"],
)
def test_a_file_that_is_missing_is_told_with_the_line_of_the_users_code(run, place, capsys):
    with pytest.raises(SystemExit) as stop:
        run_command(SimpleNamespace(run=run, output=Output()))
    assert stop.value.code == 2
    assert re.fullmatch(rf"secateur: .*No such file or directory: 'nowhere'{place}\n", capsys.readouterr().err)
    with pytest.raises(FileNotFoundError):
        run_command(SimpleNamespace(run=run, output=Output(debug=True)))


def test_a_damaged_checkpoint_is_told_in_one_line():
    run_command(SimpleNamespace(run=lambda: ""))
    assert warnings.formatwarning("it is put aside", DamagedCheckpoint, "x.py", 1) == "secateur: it is put aside\n"
    assert "x.py:1: UserWarning: other" in warnings.formatwarning("other", UserWarning, "x.py", 1)


def test_what_to_do_after_ctrl_c(tmp_path, capsys):
    def run():
        raise KeyboardInterrupt

    (tmp_path / "config.json").touch()
    for command, wanted in (
        (SimpleNamespace(output=Output()), "Nothing was saved"),
        (SimpleNamespace(output=NewRunOutput(out=tmp_path / "new")), "Nothing was saved"),
        (SimpleNamespace(output=NewRunOutput(out=tmp_path)), f"Resume it: secateur resume {tmp_path}"),
        (SimpleNamespace(output=RunOutput(), folder=tmp_path), f"Resume it: secateur resume {tmp_path}"),
        (SimpleNamespace(output=RunOutput(), what_next=lambda: "Repeat"), "Repeat"),
    ):
        command.run = run
        with pytest.raises(SystemExit) as stop:
            run_command(command)
        assert stop.value.code == 130
        assert capsys.readouterr().err == f"secateur: interrupted. {wanted}\n"


@pytest.mark.parametrize(
    ("where", "arguments"),
    [
        ("secateur.cli.command.commands", ["bench"]),
        ("secateur.results.bench.bench", ["bench", "resnet20"]),
        ("secateur.results.network.open_network", ["export", "resnet20", "--pt2", "x.pt2"]),
        ("secateur.recipes.repair.repair_network", ["repair", "tiny_job:build", "--plan", "plan.json"]),
        ("secateur.recipes.demo.run_demo", ["demo", "--out", "demo"]),
    ],
)
def test_ctrl_c_is_one_line(where, arguments, capsys, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(where, interrupted)
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "secateur: interrupted. Nothing was saved"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_debug_shows_the_traceback():
    with pytest.raises(InvalidSetting):
        cli.main(["analyze", "resnet65", "--debug"])


@pytest.mark.parametrize("text", ["", "0x3", "1x-3", "1x3x", "1 x 3", "a", "9" * 20, "1x3x99999x99999"])
def test_shapes_are_checked(text):
    with pytest.raises(InvalidSetting) as caught:
        parse_shape(text)
    assert caught.value.got == repr(text)
