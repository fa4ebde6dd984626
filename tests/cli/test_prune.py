"""`secateur prune` and `secateur resume` as a user meets them."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from secateur import cli

HERE = Path(__file__).parent
SCHEDULE = "--keep-macs 0.6 --tick-removes 0.2 --ticks-per-tock 1 --tock-epochs 1 --finetune-epochs 2 --device cpu"
SHORT = ["tiny_job:build", *SCHEDULE.split()]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it."""
    command = [sys.executable, "-m", "secateur", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=env, timeout=120)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The command in this process: exit status, stdout and stderr."""
    status = 0
    try:
        cli.main(list(arguments))
    except SystemExit as stop:
        status = int(stop.code or 0)
    return status, *capsys.readouterr()


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run that has come to its end, and what the command said."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    return folder, run("prune", *SHORT, "--out", str(folder))


def test_a_job_can_be_analysed(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, err = call(capsys, "analyze", "tiny_job:build", "--json")
    assert status == 0, err
    assert json.loads(text)["groups"]
    status, _, err = call(capsys, "analyze", "tiny_job:nothing")
    assert (status, err) == (
        2,
        "secateur: tiny_job:nothing must return a torch.nn.Module or a secateur.Job, got NoneType\n",
    )


@pytest.mark.parametrize(("given", "whole"), [("1", False), ("1.0", True)])
def test_a_number_of_channels_is_not_a_share(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, given: str, whole: bool
) -> None:
    arguments = [*SHORT, "--min-ratio", "0", "--at-least", "0", given, "--out", str(tmp_path / "run"), "--quiet"]
    status, _, err = call(capsys, "prune", *arguments)
    assert status == 0, err
    layers = json.loads((tmp_path / "run/result/summary.json").read_text())["layers"]
    (after,) = [after for name, _, after in layers if name == "0"]
    assert (after == 8) == whole


def test_help_teaches_prune(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = call(capsys, "prune", "--help")
    assert status == 0
    words = " ".join(text.replace("│", " ").split())
    assert "secateur prune digits --keep-macs 0.4 --out runs/digits" in words
    assert "package.module:callable" in words
    assert "secateur.Job (model, example, task)" in words
    assert "One budget is needed" in words
    for flag in (
        "RECIPE",
        "--keep-macs",
        "--tick-removes",
        "--ema",
        "--precision",
        "--out",
        "--device",
        "--tensorboard",
    ):
        assert flag in text


def test_help_teaches_resume(capsys: pytest.CaptureFixture[str]) -> None:
    _, text, _ = call(capsys, "resume", "--help")
    assert "secateur resume runs/digits" in text
    assert "FOLDER" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digist", "--keep-macs", "0.5"], "there is no recipe 'digist'; did you mean 'digits'?"),
        (
            ["tiny_job:build_network", "--keep-macs", "0.5"],
            "tiny_job:build_network must return a secateur.Job, got Conv2d",
        ),
        (["tiny_job:built", "--keep-macs", "0.5"], "tiny_job"),
        (["no_such_module:build", "--keep-macs", "0.5"], "no_such_module"),
        ([*SHORT, "--optimizer", "sgdd"], "there is no optimizer 'sgdd'; did you mean 'sgd'"),
        ([*SHORT, "--score", "tailor"], "there is no score 'tailor'; did you mean 'taylor'"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, err = call(capsys, "prune", *arguments, "--out", str(tmp_path / "run"))
    lines = [line for line in err.splitlines() if not line.startswith("building")]
    assert (status, out, len(lines)) == (2, "", 1), err
    assert lines[0].startswith("secateur: ")
    assert message in lines[0]
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one budget is needed: keep_macs, keep_params, keep_filters or keep_latency; got none"),
        (["--keep-macs", "1.5"], "keep_macs is the share that is left, above 0 and at most 1, got 1.5"),
        (
            ["--keep-macs", "0.5", "--keep-params", "0.5"],
            "one budget is needed: keep_macs, keep_params, keep_filters or keep_latency; got keep_macs and",
        ),
        (["--keep-macs", "0.5", "--tick-removes", "0"], "tick_removes is a share, above 0 and at most 1, got 0.0"),
        (["--keep-macs", "0.5", "--clip-norm", "0"], "clip_norm must be above 0, got 0.0"),
    ],
)
def test_a_wrong_setting_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "prune", "tiny_job:build", *arguments)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"secateur: {message}")


def test_a_wrong_setting_ends_with_status_2_and_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "prune", "digits", "--keep-macs", "1.5")
    assert (status, out) == (2, "")
    assert "keep_macs is the share that is left" in " ".join(err.split())


def test_a_run_that_diverges_leaves_the_network_as_it_last_was(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [*SHORT, "--tock-lr", "1e30", "1e30", "--out", str(tmp_path / "run"), "--quiet"]
    status, _, err = call(capsys, "prune", *arguments)
    assert (status, err.count("\n")) == (2, 1)
    saved = tmp_path / "run" / "diverged"
    assert f"it is saved in {saved}: secateur finetune " in err
    assert err.endswith(f" {saved} goes on from there\n")
    status, text, err = call(capsys, "bench", str(tmp_path / "run/diverged"), "--build", "tiny_job:build", "--json")
    assert status == 0, err
    assert json.loads(text)["networks"][0]["params"] > 0


def test_what_the_system_refuses_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, _, err = call(capsys, "prune", *SHORT, "--out", str(tmp_path / "file"))
    assert (status, err) == (2, f"secateur: {tmp_path / 'file'} is a file: name a folder with --out\n")
    status, _, err = call(capsys, "prune", *SHORT, "--out", str(tmp_path / "file" / "run"))
    assert (status, err.splitlines()[-1].startswith("secateur: cannot open the run in ")) == (2, True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_cuda_where_there_is_none_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = call(capsys, "prune", *SHORT[:-1], "cuda", "--out", str(tmp_path / "run"))
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("secateur: there is no device 'cuda' here (")


def test_the_network_of_a_job_is_timed_with_its_own_example(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, err = call(capsys, "bench", "tiny_job:build", "--repetitions", "2", "--json")
    assert status == 0, err
    assert json.loads(text)["networks"][0]["macs"] == 8 * 2 * 9 * 36 + 6 * 8 * 9 * 16 + 96 * 2


def test_a_device_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = call(capsys, "prune", *SHORT[:-1], "gpu", "--out", str(tmp_path / "run"))
    assert (status, len(err.splitlines())) == (2, 1)


def test_a_run_leaves_its_result(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = finished
    assert done.returncode == 0, done.stderr
    assert f"saved in {folder / 'result'}" in " ".join(done.stdout.split())
    assert "accuracy" in done.stdout
    names = {"card.md", "history.jsonl", "model.safetensors", "plan.json", "summary.json"}
    assert {path.name for path in (folder / "result").iterdir()} == names


def test_further(
    finished: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, _ = finished
    arguments = ["further", str(folder), "--out", str(tmp_path / "run"), "--quiet", "--device", "cpu"]
    status, _, err = call(capsys, *arguments, "--keep-macs", "0.3")
    assert status == 0, err
    before, after = (json.loads((run / "result/summary.json").read_text()) for run in (folder, tmp_path / "run"))
    assert after["after"]["macs"] <= 0.3 * after["before"]["macs"] < before["after"]["macs"]
    assert after["before"] == before["before"]
    status, _, err = call(capsys, *arguments, "--keep-macs", "0.2")
    assert (status, err.count("\n")) == (2, 1)
    assert "holds a run already: secateur resume" in err
    status, _, err = call(capsys, "further", str(folder), "--out", str(tmp_path / "other"))
    assert (status, err.count("\n")) == (2, 1)
    assert "one budget is needed" in err


def test_plain_lines_where_there_is_no_terminal(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    _, done = finished
    lines = done.stderr.splitlines()
    assert lines[0] == "building tiny_job:build"
    assert [line.split()[0] for line in lines[1:3]] == ["Start", "Tick"]
    assert lines[-1].startswith("Finished")
    assert all(character.isprintable() or character == "\n" for character in done.stdout + done.stderr)


def test_an_existing_run_is_not_begun_anew(
    finished: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = finished
    before = (folder / "events.jsonl").read_bytes()
    status, out, err = call(capsys, "prune", *SHORT, "--out", str(folder))
    assert (status, out) == (2, "")
    assert err == f"secateur: {folder} holds a run already: secateur resume {folder}, or name another --out\n"
    assert (folder / "events.jsonl").read_bytes() == before


def test_quiet_says_nothing_and_json_is_all_of_stdout(tmp_path: Path) -> None:
    done = run("prune", *SHORT, "--out", str(tmp_path / "run"), "--quiet", "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert set(told) == {"macs", "params", "metrics"}
    assert set(told["metrics"]) == {"accuracy", "loss"}


def test_resume_of_what_is_no_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = call(capsys, "resume", str(tmp_path))
    assert (status, out) == (2, "")
    assert err == (
        f"secateur: {tmp_path} is not a run: it has no config.json; name the run's own folder, or "
        "give the command that begins it\n"
    )


def test_a_run_that_was_started_from_python(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import tiny_job

    from secateur import TickTock, analyze, save

    job = tiny_job.build()
    settings = TickTock.one_shot(keep_macs=0.6, finetune_epochs=0)
    run = tmp_path / "run"
    save(settings(job.model, analyze(job.model, job.example), job.task, folder=run), run / "result")
    for command in (["resume"], ["further", "--keep-macs", "0.5", "--out", str(tmp_path / "further")]):
        status, _, err = call(capsys, *command, str(run))
        assert status == 2
        assert err.startswith(f"secateur: {run} was started from Python: call the same again with folder='{run}', or ")
    given = [str(run), "--distill", "0.5", "--epochs", "1", "--device", "cpu", "--quiet"]
    assert call(capsys, "finetune", "tiny_job:build", *given, "--out", str(tmp_path / "tuned"))[0] == 0
    (run / "original.safetensors").unlink()
    status, _, err = call(capsys, "finetune", "tiny_job:build", *given, "--out", str(tmp_path / "again"))
    there = "there is no original.safetensors with"
    assert err == f"secateur: distill needs the unpruned network, and {there} {run}: name the run that pruned it\n"


def test_missing_tensorboard_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    status, out, err = call(capsys, "prune", *SHORT, "--tensorboard", "--quiet", "--out", str(tmp_path / "run"))
    assert (status, out) == (2, "")
    assert err == 'secateur: TensorBoard is not installed; run: pip install "secateur[log]"\n'


def test_missing_tensorboard_is_noticed_before_a_run_is_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    call(capsys, "prune", *SHORT, "--tensorboard", "--quiet", "--out", str(tmp_path / "run"))
    assert not (tmp_path / "run" / "config.json").exists()


class Writer:
    """Instead of TensorBoard's."""

    written: list[tuple[str, float, int]]

    def __init__(self, folder: str) -> None:
        pass

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))

    def flush(self) -> None:
        pass


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> type[Writer]:
    module = types.ModuleType("torch.utils.tensorboard")
    vars(module)["SummaryWriter"] = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Writer, "written", [], raising=False)
    return Writer


def test_every_number_is_handed_to_tensorboard(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, writer: type[Writer]
) -> None:
    folder = tmp_path / "run"
    assert call(capsys, "prune", *SHORT, "--tensorboard", "--quiet", "--out", str(folder))[0] == 0
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    macs = [(value, step) for name, value, step in writer.written if name == "macs"]
    assert macs[:-1] == [(event["macs"], step) for step, event in enumerate(events)]
    losses = [value for name, value, _ in writer.written if name == "training loss"]
    assert losses == [event["loss"] for event in events if "loss" in event]
    assert {"accuracy", "loss", "params", "filters", "seconds"} <= {name for name, _, _ in writer.written}


def test_tensorboard_goes_on_where_the_run_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, writer: type[Writer]
) -> None:
    folder = tmp_path / "run"
    call(capsys, "prune", *SHORT, "--tensorboard", "--quiet", "--out", str(folder))
    last = writer.written[-1][2]
    writer.written.clear()
    call(capsys, "resume", str(folder), "--tensorboard", "--quiet")
    assert {step for _, _, step in writer.written} == {last}


def test_scalars_that_tensorboard_can_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "run"
    assert run("prune", *SHORT, "--tensorboard", "--quiet", "--out", str(folder)).returncode == 0
    assert list((folder / "tensorboard").glob("events.*"))
