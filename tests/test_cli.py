import json
import re
import subprocess
import sys
import time
import warnings
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
from docstring_parser import parse_from_object

from secateur import cli
from secateur.cli.analyze import parse_shape
from secateur.cli.command import _commands
from secateur.cli.command import _run as run_command
from secateur.cli.display import waiting
from secateur.errors import DamagedCheckpoint, InvalidExample, UnknownName


def run(*arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it."""
    return subprocess.run([sys.executable, "-m", "secateur", *arguments], capture_output=True, text=True, **kwargs)


def test_help_answers_in_under_a_second():
    start = time.perf_counter()
    result = run("--help")
    assert time.perf_counter() - start < 1
    assert result.returncode == 0
    assert "analyze" in result.stdout


def test_help_teaches_with_examples():
    text = run("analyze", "--help").stdout
    assert "secateur analyze torchvision:resnet50 --input 1x3x224x224" in text
    for flag in ("NAME", "--input", "--json", "--ignore", "--inexact", "--no-probe", "--debug"):
        assert flag in text


@pytest.mark.parametrize("command", _commands().values())
def test_text_about_a_flag_is_one_line(command):
    """The parser would show the line breaks of the source."""
    nested = [kind for kind in get_type_hints(command).values() if is_dataclass(kind)]
    kinds = [base for kind in (command, *nested) for base in kind.__mro__ if is_dataclass(base)]
    texts = [about.description for kind in kinds for about in parse_from_object(kind).params]
    assert texts
    assert not [text for text in texts if "\n" in text]


@pytest.mark.parametrize("command", ["prune", "finetune", "analyze"])
def test_a_flag_that_turns_something_off_says_what_happens_then(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    flags = re.findall(r"^[│ ]+(--no-[\w-]+)", text, re.MULTILINE)
    assert flags
    assert all(f"{flag}: " in text for flag in flags)


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_list_of_commands_can_be_read_at_a_glance(arguments):
    result = run(*arguments)
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) < 50
    for name in ("prune", "further", "resume", "report", "reproduce"):
        assert f"• {name} " in result.stdout
    assert "examples:" not in result.stdout


def test_the_shell_completes_commands_and_flags(tmp_path):
    (tmp_path / "completion").write_text(run("--tyro-print-completion", "bash").stdout)
    script = """
source completion
try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _tyro_secateur; echo "${COMPREPLY[@]}"; }
try secateur rep
try secateur prune --keep-m
"""
    result = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["report reproduce", "--keep-macs"]


def test_unknown_command_names_the_known_ones():
    result = run("analyse", "resnet20")
    assert result.returncode == 2
    assert "there is no command 'analyse'; did you mean 'analyze'?" in result.stderr


def test_analyze_prints_the_graph():
    result = run("analyze", "resnet20")
    assert result.returncode == 0, result.stderr
    assert "stage1" in result.stdout


def test_json_is_all_that_stdout_holds():
    result = run("analyze", "resnet20", "--json", "--no-probe", "--ignore", "stage1.*")
    assert result.returncode == 0, result.stderr
    assert isinstance(json.loads(result.stdout), dict)


def test_networks_of_the_current_folder(tmp_path):
    (tmp_path / "own.py").write_text("from torch import nn\ndef build(): return nn.Conv2d(3, 4, 3)\n")
    result = run("analyze", "own:build", "--input", "1x3x8x8", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (tmp_path / "own.py").write_text("from torch import nn\ndef build(): return nn.Conv2d(1, 4, 3)\n")
    result = run("analyze", "own:build", cwd=tmp_path)
    assert result.returncode == 2
    assert "on input 1x3x224x224: RuntimeError" in result.stderr
    remedy = "as --input 1x1x28x28; for several inputs let your callable return a secateur.Job\n"
    assert result.stderr.endswith(f"of the shape, type and device that it takes, {remedy}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet65"], "secateur: there is no built-in network 'resnet65'; did you mean 'resnet56' or"),
        (["resnet20", "--input", "3,32,32"], "secateur: --input must be positive sizes joined by x, as 1x3x224x224"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["analyze", *arguments])
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith("analysing")]  # said when it takes long
    assert len(lines) == 1
    assert lines[0].startswith(message)


def open_nothing():
    Path("nowhere").read_text()


@pytest.mark.parametrize(
    ("run", "place"),
    [(open_nothing, r' at test_cli.py:[0-9]+: Path\("nowhere"\).read_text\(\)'), (Path("nowhere").read_bytes, "")],
    ids=["the user's code", "ours"],
)
def test_a_file_that_is_missing_is_told_with_the_line_of_the_users_code(run, place, capsys):
    with pytest.raises(SystemExit) as stop:
        run_command(SimpleNamespace(run=run, debug=False))
    assert stop.value.code == 2
    assert re.fullmatch(rf"secateur: .*No such file or directory: 'nowhere'{place}\n", capsys.readouterr().err)
    with pytest.raises(FileNotFoundError):
        run_command(SimpleNamespace(run=run, debug=True))


def test_a_damaged_checkpoint_is_told_in_one_line():
    run_command(SimpleNamespace(run=lambda: ""))
    assert warnings.formatwarning("it is put aside", DamagedCheckpoint, "x.py", 1) == "secateur: it is put aside\n"
    assert "x.py:1: UserWarning: other" in warnings.formatwarning("other", UserWarning, "x.py", 1)


def test_the_demo_looks_at_its_folder_first(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("secateur.recipes.demo.run_demo", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--out", str(tmp_path / "file")])
    assert stop.value.code == 2


def test_what_starts_anew_does_not_go_on_after_ctrl_c(capsys):
    def run():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        run_command(SimpleNamespace(run=run, debug=False))
    assert capsys.readouterr().err == "secateur: interrupted; nothing was saved\n"


@pytest.mark.parametrize("begun", [False, True])
def test_what_goes_on_after_ctrl_c(begun, tmp_path, capsys):
    def run():
        raise KeyboardInterrupt

    if begun:
        (tmp_path / "config.json").touch()
    with pytest.raises(SystemExit) as stop:
        run_command(SimpleNamespace(run=run, debug=False, output=SimpleNamespace(out=tmp_path)))
    assert stop.value.code == 130
    how = f"secateur resume {tmp_path}" if begun else "the same command as before"
    assert capsys.readouterr().err == f"secateur: interrupted; go on with: {how}\n"


def test_debug_shows_the_traceback():
    with pytest.raises(UnknownName):
        cli.main(["analyze", "resnet65", "--debug"])


@pytest.mark.parametrize("text", ["", "0x3", "1x-3", "1x3x", "1 x 3", "a"])
def test_shapes_are_checked(text):
    with pytest.raises(InvalidExample, match="positive sizes joined by x"):
        parse_shape(text)


def test_progress_is_said_only_when_it_takes_long(capsys):
    with waiting("quick", delay=60) as say:
        say("one step")
    with waiting("slow", delay=0.01) as say:
        say("one step")
        time.sleep(0.2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "slow\n"
