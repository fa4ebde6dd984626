"""Results on disk."""

import json
import os
import platform
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_result import build

import secateur
from secateur.errors import InvalidData, InvalidModel, InvalidSetting
from secateur.files import UNFINISHED
from secateur.results.artifact import card
from secateur.results.network import open_network
from secateur.results.summary import summarize

LATENCY = {"before": 0.002, "after": 0.001, "spread": 0.1, "batch": 1, "device": "CPU", "how": "torch, float32"}


@pytest.mark.parametrize("about", [{}, {"latency": LATENCY}], ids=["untimed", "timed"])
def test_what_is_saved_can_be_loaded_as_the_card_says(
    result: secateur.Result, tmp_path: Path, about: dict[str, Any]
) -> None:
    folder = secateur.save(result, tmp_path / "new" / "result", **about)
    files = {"card.md", "history.jsonl", "model.safetensors", "plan.json", "summary.json"}
    assert {path.name for path in folder.iterdir()} == files
    code = re.search(r"```python\n(.*?)```", (folder / "card.md").read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"build": build, "folder": folder}
    exec(code[1], names)
    loaded = names["model"].state_dict()
    for name, saved in result.model.state_dict().items():
        assert torch.equal(saved, loaded[name]), name


def test_a_result_knows_its_input(result: secateur.Result, tmp_path: Path) -> None:
    """So that it is timed and exported on images of that size, and not of any other."""
    secateur.save(result, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    shape = [int(size) for size in result.plan.graph.input.split("x")]
    assert summary["input"] == shape
    assert list(open_network(str(tmp_path), "one_result:build")[1].shape) == shape
    del summary["input"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(InvalidModel):
        open_network(str(tmp_path), "one_result:build")


def test_card_and_history(result: secateur.Result, tmp_path: Path) -> None:
    secateur.save(result, tmp_path)
    card = (tmp_path / "card.md").read_text()
    assert f"| MACs | {result.before.macs:,} | {result.after.macs:,} |" in card
    assert "| accuracy |" in card
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["Start", "Tick", "FineTune"]
    assert lines[1]["removed"]


def test_the_card_says_whether_anything_was_pruned(result: secateur.Result) -> None:
    training = replace(result, settings=secateur.Training.of(epochs=1))
    graph = result.plan.graph
    whole = replace(training, plan=secateur.Plan(graph, graph.all_kept()))
    for told, done in ((result, "pruned"), (training, "pruned"), (whole, "trained")):
        assert card(told, {}).splitlines()[0] == f"# Sequential, {done} by Secateur"


def test_numbers_are_those_of_the_networks(result: secateur.Result) -> None:
    told = summarize(result, {})
    whole, cut = build(), result.model
    first, second = cut[0].out_channels, cut[3].out_channels  # pyright: ignore
    # A 3x3 convolution on 8x8, another on 6x6, and the linear layer.
    assert told["before"]["macs"] == 36 * 9 * 8 + 16 * 9 * 8 * 6 + 96 * 3
    assert told["after"]["macs"] == 36 * 9 * first + 16 * 9 * first * second + 16 * second * 3
    for when, model in (("before", whole), ("after", cut)):
        assert told[when]["params"] == sum(parameter.numel() for parameter in model.parameters())
    assert told["before"]["metrics"] == result.history[0].metrics
    assert told["after"]["metrics"] == result.metrics
    assert told["layers"] == [["0", 8, first], ["3", 6, second]]
    assert told["seconds"] == sum(event.seconds for event in result.history)


def test_the_summary_has_settings_and_hardware(result: secateur.Result, tmp_path: Path) -> None:
    told = summarize(result, {"order": {"recipe": "own"}})
    secateur.save(result, tmp_path, order={"recipe": "own"})
    assert json.loads((tmp_path / "summary.json").read_text()) == told
    assert (told["format"], told["version"]) == ("secateur-summary", 1)
    assert secateur.TickTock.of(**told["settings"]) == result.settings
    assert told["kind"] == "prune"
    assert told["order"] == {"recipe": "own"}
    assert told["hardware"] == f"{os.cpu_count()}-core {platform.machine()}"
    assert told["versions"] == {"python": platform.python_version(), "torch": torch.__version__}


def test_what_was_verified_is_in_the_summary_and_on_the_card(result: secateur.Result, tmp_path: Path) -> None:
    told = summarize(result, {})["verification"]
    found = secateur.verify(build(), result.plan, result.plan.graph.calls["eval"][0])
    assert told == found.to_dict()
    assert told["difference"] < 1e-12
    assert (told["precision"], told["modes"], told["exact"]) == ("float64", ["eval", "train"], True)
    secateur.save(result, tmp_path / "checked")
    assert f"checked: {result.verification}." in (tmp_path / "checked" / "card.md").read_text()
    unknown = replace(result, verification=None)
    assert "verification" not in summarize(unknown, {})
    secateur.save(unknown, tmp_path / "unknown")
    assert "checked" not in (tmp_path / "unknown" / "card.md").read_text()


def test_files_of_two_results_are_never_mixed(
    result: secateur.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An experiment takes a run that has a summary for done, and a folder with a plan can be loaded."""
    real, left = os.replace, 0

    def stopped(path: Any, *given: Any, **options: Any) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        real(path, *given, **options)

    def read(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    named, lengths = {"network": {"name": "another", "options": {}}}, list[int]()
    new = read(secateur.save(result, tmp_path / "new", **named))
    old = read(secateur.save(result, tmp_path / "old"))
    for left in range(100):
        folder = tmp_path / str(left)
        secateur.save(result, folder)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(os, "replace", stopped)
            secateur.save(result, folder, **named)
        found = read(folder)
        lengths.append(len(found))
        assert any(found.items() <= whole.items() for whole in (old, new))
        assert list(found) == [] or "model.safetensors" in found
        assert "summary.json" not in found or found in (old, new)
        if found == new:
            break
    assert found == new
    assert set(lengths) >= {1, 2, 3, 4, 5}


def test_what_a_killed_process_has_left_unfinished_does_no_harm(result: secateur.Result, tmp_path: Path) -> None:
    (tmp_path / UNFINISHED).mkdir()
    (tmp_path / UNFINISHED / "plan.json").write_text("half")
    with pytest.raises(InvalidData):
        secateur.load(tmp_path, build)
    secateur.save(result, tmp_path)
    assert not (tmp_path / UNFINISHED).exists()


@pytest.mark.parametrize(
    "about", [{"network": "resnet20"}, {"network": {"options": {}}}, {"classes": {0: "a"}}, {"classes": "ab"}], ids=str
)
def test_what_could_not_be_read_again_is_not_saved(
    about: dict[str, Any], result: secateur.Result, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSetting):
        secateur.save(result, tmp_path / "result", **about)
    assert not (tmp_path / "result").exists()


def test_a_model_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="export"):
        secateur.save(build(), tmp_path / "result")  # pyright: ignore[reportArgumentType]


def test_nothing_replaces_the_format(result: secateur.Result) -> None:
    assert summarize(result, {"version": "1.2", "format": "x"})["format"] == summarize(result, {})["format"]
    assert summarize(result, {"version": "1.2"})["version"] == 1
