"""`secateur train`, `prune`, `continue` and `resume` as a user meets them."""

import json
import shutil
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doing
import miniature
import pytest
import tiny_job
import torch
from killing import Fork, finish, kill, outcome, wait_until

import secateur as library
from secateur import Engine, TickTock
from secateur.cli.options import RunOutput
from secateur.cli.runs import start
from secateur.errors import InvalidSetting
from secateur.recipes.jobs import Order
from secateur.recipes.work import RunConfig
from secateur.training.distributed import World

Call = Callable[..., tuple[int, str, str]]
PLAIN = "own_networks:plain@cifar10"
SCHEDULE = "--tick-removes 0.2 --tock-every 1 --tock-epochs 1 --finetune-epochs 2 --device cpu"
SHORT = ["tiny_job:build", "--keep-macs", "0.6", *SCHEDULE.split()]
NAMES = ["trained", "pruned", "tuned", "scratch", "narrow", "smaller"]


def is_one_line(err: str) -> bool:
    """Whether the mistake is one line, beside lines about the progress."""
    lines = [line for line in err.splitlines() if not line.startswith(("building", "analysing", "testing"))]
    return len(lines) == 1 and lines[0].startswith("secateur: ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chain")


@pytest.fixture
def chain(folder: Path, secateur: Call, cifar: Path) -> Path:
    """Runs that follow each other, made once; said.json holds what the commands said."""
    if (folder / "said.json").exists():
        return folder
    short = ["--keep-macs", 0.6, *SCHEDULE.split()]
    commands = {
        "trained": ["train", PLAIN, "--epochs", 2],
        "pruned": ["prune", PLAIN, "--weights", folder / "trained", *short],
        "tuned": ["train", PLAIN, "--weights", folder / "pruned", "--epochs", 2, "--distill", 0.5],
        "scratch": ["train", PLAIN, "--shape-of", folder / "pruned", "--epochs-scale", 0.01],
        "narrow": ["train", PLAIN, "--narrow-to", 0.6, "--width", 2, "--epochs", 1],
        "smaller": ["continue", folder / "pruned", "--keep-macs", 0.4],
    }
    said = {}
    for name, command in commands.items():
        common = [] if name == "smaller" else ["--data", cifar, "--batch-size", 10]
        given = [*command, *common, "--device", "cpu", "--quiet", "--json", "--out", folder / name]
        status, out, err = secateur(*given)
        assert (status, err) == (0, ""), err
        said[name] = json.loads(out)
    (folder / "said.json").write_text(json.dumps(said))
    return folder


def test_runs_say_what_is_in_their_summary(chain: Path) -> None:
    said = json.loads((chain / "said.json").read_text())
    for name in NAMES:
        after = doing.summary(chain / name)["after"]
        assert said[name] == {key: after[key] for key in ("macs", "params", "metrics")}


def test_runs_that_follow_each_other(chain: Path) -> None:
    told = {name: doing.summary(chain / name) for name in NAMES}
    shapes = {name: doing.shapes(doing.weights(chain / name / "result/model.safetensors")) for name in NAMES}
    assert shapes["pruned"] == shapes["tuned"] == shapes["scratch"] != shapes["trained"]
    assert doing.same(
        doing.weights(chain / "tuned/whole.safetensors"), doing.weights(chain / "trained/result/model.safetensors")
    )
    assert told["scratch"]["settings"]["epochs"] == 3  # twice 160, times 0.01
    whole = doing.count_macs(doing.whole_network(), torch.zeros(1, 3, 32, 32))
    assert told["narrow"]["after"]["macs"] / whole == pytest.approx(0.6, abs=0.05)
    assert told["smaller"]["after"]["macs"] <= 0.4 * told["smaller"]["before"]["macs"] < told["pruned"]["after"]["macs"]
    assert told["smaller"]["before"] == told["pruned"]["before"]


@pytest.mark.parametrize("name", ["pruned", "tuned"])
def test_evaluate_finds_what_the_run_has_found(chain: Path, secateur: Call, cifar: Path, name: str) -> None:
    given = ["evaluate", PLAIN, "--data", cifar, "--weights", chain / name, "--device", "cpu"]
    metrics = doing.summary(chain / name)["after"]["metrics"]
    assert json.loads(secateur(*given, "--json")[1]) == pytest.approx(metrics, rel=1e-6)
    lines = dict(line.split() for line in secateur(*given)[1].splitlines())
    assert lines == {key: f"{value:.4f}" for key, value in metrics.items()}


def test_a_run_prints_a_line_per_event_and_its_result(secateur: Call, tmp_path: Path) -> None:
    status, out, err = secateur("prune", *SHORT, "--out", tmp_path / "run")
    lines = err.splitlines()
    assert (status, lines[0]) == (0, "building tiny_job:build")
    events = [
        "to",
        "warning:",
        "Start",
        "Tick",
        "Tock",
        "Tick",
        "FineTune",
        "FineTune",
        "Finished",
    ]  # it is not trained
    assert [line.split()[0] for line in lines[1:]] == events
    assert f"saved in {tmp_path / 'run' / 'result'}" in out
    assert all(character.isprintable() or character == "\n" for character in out + err)
    names = {"card.md", "history.jsonl", "model.safetensors", "plan.json", "summary.json"}
    assert {path.name for path in (tmp_path / "run/result").iterdir()} == names


@pytest.mark.parametrize(("given", "whole"), [("1", False), ("1.0", True)])
def test_a_number_of_channels_is_not_a_share(secateur: Call, tmp_path: Path, given: str, whole: bool) -> None:
    arguments = [*SHORT, "--min-ratio", "0", "--at-least", "0", given, "--out", tmp_path, "--quiet"]
    assert secateur("prune", *arguments)[0] == 0
    (after,) = [after for name, _, after in doing.summary(tmp_path)["layers"] if name == "0"]
    assert (after == 8) == whole


def test_a_rehearsal_trains_a_short_baseline_with_scalars_of_its_own(
    secateur: Call, cifar: Path, tmp_path: Path, scalars: list[tuple[str, float, int]]
) -> None:
    given = ["--data", cifar, "--out", tmp_path, "--quiet", "--device", "cpu", "--tensorboard"]
    assert secateur("prune", PLAIN, *given, "--epochs-scale", 0.01)[0] == 0
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event.get("phase") for event in events].count("baseline") == 2
    macs = [(value, step) for name, value, step in scalars if name == "macs"]
    assert macs[:-1] == [(event["macs"], step) for step, event in enumerate(events)]
    losses = [value for name, value, _ in scalars if name == "training loss"]
    assert losses == [event["loss"] for event in events if "loss" in event]
    assert {"accuracy", "loss", "params", "filters", "seconds"} <= {name for name, _, _ in scalars}
    last = scalars[-1][2]
    scalars.clear()
    assert secateur("resume", tmp_path, "--tensorboard", "--quiet", "--device", "cpu")[0] == 0
    assert {step for _, _, step in scalars} == {last}


@pytest.fixture
def scalars(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int]]:
    """What is written for TensorBoard."""
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            pass

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None:
            pass

    module = types.ModuleType("torch.utils.tensorboard")
    vars(module)["SummaryWriter"] = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return written


def test_missing_tensorboard_is_noticed_before_a_run_is_made(
    secateur: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    status, out, err = secateur("prune", *SHORT, "--tensorboard", "--out", tmp_path / "run")
    assert (status, out, is_one_line(err)) == (2, "", True)
    assert 'pip install "secateur[log]"' in err
    assert not (tmp_path / "run").exists()


# Stopped, killed and resumed.


@pytest.fixture(scope="module")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 of ten images, so that an epoch is one step."""
    folder = tmp_path_factory.mktemp("few")
    miniature.write_cifar10(folder, num_per_file=2)
    return folder


def with_baseline(data: Path, folder: Path) -> list[str]:
    schedule = (
        "--epochs-scale 0.25 --keep-macs 0.5 --tick-removes 0.0125 --tock-every 8 --tock-epochs 8 --finetune-epochs 40 "
        "--device cpu --multiple-of 1"
    )
    return ["prune", PLAIN, "--data", str(data), "--width", "0.5", *schedule.split(), "--out", str(folder)]


def count_events(folder: Path) -> int:
    file = folder / "events.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_a_process_that_is_killed_in_its_baseline_and_in_pruning(
    secateur: Call, few_images: Path, tmp_path: Path
) -> None:
    assert secateur(*with_baseline(few_images, tmp_path / "undisturbed"), "--quiet")[0] == 0
    folder = tmp_path / "run"
    for command, least in ((with_baseline(few_images, folder), 10), (["resume", str(folder), "--device", "cpu"], 43)):
        process = Fork(folder, command)
        assert wait_until(process, lambda least=least: count_events(folder) > least), finish(process)
        kill(process)
        assert process.returncode == -signal.SIGKILL
        assert (folder / "baseline.safetensors").exists() == (command[0] == "resume"), "40 epochs"
    status, out, err = secateur("resume", folder, "--device", "cpu")
    assert status == 0, err
    assert "resumed after " in out + err
    assert outcome(folder) == outcome(tmp_path / "undisturbed")


def test_ctrl_c_in_the_baseline_says_how_to_resume(
    secateur: Call, few_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from secateur.cli.display import Display

    shown = Display.show

    def stop_at_ten(display: Display, event: Any) -> None:
        if getattr(event, "name", "") == "Baseline epoch 10":
            signal.raise_signal(signal.SIGINT)
        shown(display, event)

    with monkeypatch.context() as patch:
        patch.setattr(Display, "show", stop_at_ten)
        status, _, err = secateur(*with_baseline(few_images, tmp_path / "run"))
    assert status == 130
    last = err.splitlines()[-1]
    assert last == f"secateur: stopped and saved in {tmp_path / 'run'}. Resume it: secateur resume {tmp_path / 'run'}"
    assert secateur("resume", tmp_path / "run", "--quiet", "--device", "cpu")[0] == 0


def test_a_run_that_diverges_says_how_to_fine_tune_what_is_left(secateur: Call, tmp_path: Path) -> None:
    status, _, err = secateur("prune", *SHORT, "--tock-lr", "1e30", "--out", tmp_path / "run", "--quiet")
    saved = tmp_path / "run" / "diverged"
    assert (status, is_one_line(err)) == (2, True)
    command = f"secateur train tiny_job:build --weights {saved}"
    assert err.endswith(f"{command}\n")
    assert secateur(*command.split()[1:], "--epochs", 1, "--out", tmp_path / "tuned", "--device", "cpu")[0] == 0
    status, text, _ = secateur("bench", saved, "--build", "tiny_job:build", "--repetitions", 2, "--json")
    assert (status, json.loads(text)["networks"][0]["params"] > 0) == (0, True)


def test_a_run_that_was_started_from_python(secateur: Call, tmp_path: Path) -> None:
    job, run = tiny_job.build(), tmp_path / "run"
    settings = TickTock.one_shot(keep_macs=0.6, finetune_epochs=0)
    library.save(library.prune(job.model, job.example, job.task, settings=settings, folder=run), run / "result")
    for command in (["resume"], ["continue", "--keep-macs", "0.5", "--out", tmp_path / "smaller"]):
        status, _, err = secateur(*command, run)
        assert (status, is_one_line(err), f"folder='{run}'" in err) == (2, True, True)
    given = ["--weights", run, "--distill", "0.5", "--epochs", "1", "--device", "cpu", "--quiet"]
    assert secateur("train", "tiny_job:build", *given, "--out", tmp_path / "tuned")[0] == 0
    (run / "original.safetensors").unlink()
    status, _, err = secateur("train", "tiny_job:build", *given, "--out", tmp_path / "again")
    assert (status, is_one_line(err), "distill" in err) == (2, True, True)


# Mistakes.


@pytest.mark.parametrize("command", ["train", "prune", "continue"])
def test_a_folder_that_holds_a_run_is_left_alone(chain: Path, secateur: Call, cifar: Path, command: str) -> None:
    there = chain / "trained"
    before = {path: path.read_bytes() for path in there.iterdir() if path.is_file()}
    given = [chain / "pruned", "--keep-macs", 0.2] if command == "continue" else [PLAIN, "--data", cifar]
    status, out, err = secateur(command, *given, "--out", there)
    assert (status, out, is_one_line(err)) == (2, "", True)
    assert f"secateur resume {there}" in err
    assert {path: path.read_bytes() for path in there.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "resnet20@cifar11"], ["'cifar10'"]),
        (["train", "table1"], ["secateur reproduce table1"]),
        (["train", "resnet20@cifar10"], ["CIFAR-10", "--data FOLDER"]),
        (["train", "digits", "--epochs", "-1"], ["epochs", "-1"]),
        (["train", "digits", "--epochs-scale", "-1"], ["epochs_scale", "-1"]),
        (["train", "digits", "--milestones", "2"], ["milestones", "2.0"]),
        (["train", "digits", "--accumulate", "0"], ["accumulate", "0"]),
        (["train", "digits", "--device", "gpu"], ["'gpu'", "cpu"]),
        (["train", "digits", "--weights", "nowhere"], ["nowhere"]),
        (["train", "digits", "--shape-of", "nowhere"], ["nowhere"]),
        (["train", "digits", "--shape-of", "nowhere", "--narrow-to", "0.5"], ["--shape-of and --narrow-to"]),
        (["train", "digits", "--narrow-to", "0"], ["MACs", "0.0"]),
        (["train", "digits", "--distill", "1"], ["distill", "1.0"]),
        (["prune", "digist", "--keep-macs", "0.5"], ["'digits'"]),
        (
            ["prune", "tiny_job:build_network", "--keep-macs", "0.5"],
            ["tiny_job:build_network", "Conv2d", "secateur.Job"],
        ),
        (["prune", "tiny_job:built", "--keep-macs", "0.5"], ["'build'"]),
        (["prune", "no_such_module:build", "--keep-macs", "0.5"], ["no_such_module"]),
        (["prune", "tiny_job:with_a_dict"], ["tiny_job:with_a_dict.settings"]),
        (["prune", "tiny_job:with_a_score"], ["tiny_job:with_a_score.settings"]),
        (["prune", "tiny_job:build"], ["keep_macs", "keep_latency"]),
        (["prune", *SHORT, "--optimizer", "sgdd"], ["'sgd'"]),
        (["prune", *SHORT, "--score", "tailor"], ["'taylor'"]),
        (["prune", *SHORT, "--tick-removes", "0"], ["tick_removes", "0.0"]),
        (["prune", *SHORT, "--keep-params", "0.5"], ["macs and params"]),
        (["prune", *SHORT, "--keep-macs", "1.5"], ["keep_macs", "1.5"]),
        (["prune", *SHORT, "--clip-norm", "0"], ["clip_norm", "0.0"]),
        (["prune", *SHORT, "--ignore", "nothing.like.it"], ["nothing.like.it"]),
        (["prune", "digits", "--data", "somewhere"], ["somewhere"]),
    ],
)
def test_a_mistake_is_one_line(secateur: Call, arguments: list[str], words: list[str], tmp_path: Path) -> None:
    status, out, err = secateur(*arguments, "--out", tmp_path / "run")
    assert (status, out, is_one_line(err)) == (2, "", True), err
    assert [word for word in words if word not in err] == []
    assert not (tmp_path / "run").exists()


def test_mistakes_about_folders(secateur: Call, chain: Path, cifar: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    new, data = ["--out", tmp_path / "new", "--device", "cpu"], ["--data", cifar]
    for arguments, word in (
        (["prune", *SHORT, "--out", tmp_path / "file"], "--out FOLDER"),
        (["prune", *SHORT, "--out", tmp_path / "file" / "run"], str(tmp_path / "file")),
        (["prune", PLAIN, "--weights", chain / "pruned", *data, *new], "already pruned"),
        (["train", PLAIN, "--shape-of", chain / "trained", *data, *new], "a pruned network"),
        (["continue", chain / "pruned", *new], "--keep-macs"),
        (["continue", chain / "trained", "--keep-macs", "0.5", *new], "pruning run"),
        (["continue", chain / "pruned", "--keep-macs", "0.9", *new], "already smaller"),
        (["resume", tmp_path], "config.json"),
    ):
        status, out, err = secateur(*arguments)
        assert (status, out, is_one_line(err), word in err) == (2, "", True, True), err
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_cuda_where_there_is_none_is_one_line(secateur: Call, tmp_path: Path) -> None:
    status, _, err = secateur("prune", *SHORT[:-1], "cuda", "--out", tmp_path / "run")
    assert (status, is_one_line(err)) == (2, True)


@pytest.mark.parametrize(("rank", "said"), [(0, True), (1, False)])
def test_of_several_processes_one_tells_the_result(rank: int, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    result = types.SimpleNamespace(after=types.SimpleNamespace(macs=1, params=1), metrics={})
    monkeypatch.setattr("secateur.training.distributed.join", lambda: World(rank, 2))
    monkeypatch.setattr("secateur.cli.runs.follow", lambda *_: result)
    config = RunConfig(order=Order(recipe="digits"), settings=TickTock.of(keep_macs=0.5), engine=Engine())
    assert bool(start(config, Path("run"), RunOutput(json=True))) == said


@pytest.mark.parametrize(
    ("flags", "noted"),
    [(["--precision", "bf16"], True), (["--precision", "bf16", "--channels-last"], False), ([], False)],
)
def test_channels_last_is_advised_on_a_gpu(
    secateur: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], noted: bool
) -> None:
    def stop(*_: object) -> None:
        raise InvalidSetting("stop here")

    monkeypatch.setattr("secateur.cli.runs.find_device", lambda name: types.SimpleNamespace(type="cuda"))
    monkeypatch.setattr("secateur.recipes.work.perform", stop)
    _, _, err = secateur("prune", *SHORT, *flags, "--out", tmp_path)
    assert ("--channels-last" in err) == noted


def test_a_copy_of_a_run_is_resumed_where_it_is(secateur: Call, chain: Path, tmp_path: Path) -> None:
    shutil.copytree(chain / "pruned", tmp_path / "copy")
    status, out, _ = secateur("resume", tmp_path / "copy", "--device", "cpu")
    assert (status, str(tmp_path / "copy" / "result") in out) == (0, True)


@pytest.mark.parametrize("flags", ["--finetune-epochs 1", "--tick-lr 0.1", "--tock-every 2", "--retrain-epochs 3"])
def test_no_train_excludes_what_trains(flags: str, secateur: Call) -> None:
    status, _, err = secateur("prune", "tiny_job:build", "--keep-macs", "0.8", "--no-train", *flags.split())
    assert status == 2
    assert flags.split()[0] in err


def test_no_train_takes_a_share_of_the_data_instead_of_images(secateur: Call, tmp_path: Path) -> None:
    flags = ["--keep-macs", "0.8", "--no-train", "--tick-data", "0.5", "--device", "cpu", "--quiet"]
    assert secateur("prune", "tiny_job:build", *flags, "--out", str(tmp_path / "run"))[0] == 0
    settings = json.loads((tmp_path / "run" / "config.json").read_text())["settings"]
    assert (settings["tick_data"], settings["tick_images"], settings["finetune_epochs"]) == (0.5, None, 0)
