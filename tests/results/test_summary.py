"""One run in numbers, beside its result."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from one_result import build

import secateur
from secateur.results import artifact
from secateur.results.summary import summarize


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


def test_what_was_asked_for_and_on_what_hardware(result: secateur.Result) -> None:
    told = summarize(result, {"order": {"recipe": "own"}, "input": [1, 1, 8, 8]})
    assert (told["format"], told["version"]) == ("secateur-summary", 1)
    assert secateur.TickTock.of(**told["settings"]) == result.settings
    assert told["kind"] == "prune"
    assert told["order"] == {"recipe": "own"}
    assert told["hardware"] == f"{os.cpu_count()}-core {platform.machine()}"
    assert told["versions"] == {"python": platform.python_version(), "torch": torch.__version__}


def test_a_summary_on_disk_is_the_same(result: secateur.Result, tmp_path: Path) -> None:
    secateur.save(result, tmp_path, order={"recipe": "own"})
    assert json.loads((tmp_path / "summary.json").read_text()) == summarize(result, {"order": {"recipe": "own"}})


def test_where_there_is_a_summary_the_result_is_whole(
    result: secateur.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An experiment takes a run that has one for done."""
    write, last = artifact.write_atomic, 0

    def killed(path: Path, content: Any) -> None:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        write(path, content)

    monkeypatch.setattr(artifact, "write_atomic", killed)
    for last in range(4):
        left, folder = last, tmp_path / str(last)
        with pytest.raises(KeyboardInterrupt):
            secateur.save(result, folder)
        assert not (folder / "summary.json").exists() or (folder / "plan.json").exists(), list(folder.iterdir())
