"""Files that earlier versions wrote are read: those under tests/fixtures, which are never written again."""

import json
import shutil
from pathlib import Path

import doing
import pytest
import tiny_job
import torch
from safetensors.torch import load_file

import secateur
from secateur.results.report.page import render
from secateur.results.report.read import read_runs

FIXTURES = sorted(path for path in (Path(__file__).parent.parent / "fixtures").iterdir() if path.is_dir())


@pytest.fixture(params=FIXTURES, ids=lambda path: path.name)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy: a run writes to its folder."""
    return Path(shutil.copytree(request.param, tmp_path / "old"))


def test_a_result_gives_the_same_outputs(old: Path) -> None:
    recorded = load_file(old / "outputs.safetensors")
    for folder in (old / "finished", old / "finished" / "result"):
        model = secateur.load(folder, build=lambda: tiny_job.build().model)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(recorded["images"]), recorded["outputs"])


def test_a_run_is_resumed(old: Path) -> None:
    def names() -> list[str]:
        lines = (old / "stopped" / "events.jsonl").read_text().splitlines()
        return [json.loads(line)["event"] for line in lines]

    before = names()
    result = doing.resume(old / "stopped")
    assert before == ["Start", "Tick", "Tock", "Tick"]
    assert names()[:4] == before
    assert names()[4:] == ["Tock", "Tick", "FineTune", "FineTune"]
    assert result.after.macs <= 0.5 * result.before.macs


def test_a_report_shows_them(old: Path) -> None:
    page = render(read_runs([old / "finished", old / "stopped"]))
    assert page.count("tiny_job:build") >= 1
    assert "accuracy" in page


def test_the_present_version_has_its_files() -> None:
    """A version that differs from all that are kept needs a folder of its own: tests/fixtures/make.py."""
    kept = [json.loads(path.read_text()) for path in FIXTURES[-1].rglob("*.json") if path.name != "state.json"]
    versions = {(each["format"], each["version"]) for each in kept}
    assert versions == {("secateur-run", 1), ("secateur-summary", 1), ("secateur-plan", 2)}
    model = tiny_job.build().model
    graph = secateur.analyze(model, tiny_job.build().example)
    plan = json.loads(secateur.Plan.random(graph, 0.3).to_json())
    assert (plan["format"], plan["version"]) in versions
