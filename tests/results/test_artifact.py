"""Results on disk."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from one_result import build

import secateur
from secateur.errors import InvalidModel
from secateur.results.network import open_network


def test_what_is_saved_can_be_loaded_as_the_card_says(result: secateur.Result, tmp_path: Path) -> None:
    folder = secateur.save(result, tmp_path / "new" / "result")
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


def test_a_result_that_is_replaced_in_part_has_no_summary(
    result: secateur.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_text("old")
    secateur.save(result, tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["format"] == "secateur-plan"

    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("secateur.results.artifact.card", interrupted)
    with pytest.raises(KeyboardInterrupt):
        secateur.save(result, tmp_path)
    assert not (tmp_path / "summary.json").exists()
