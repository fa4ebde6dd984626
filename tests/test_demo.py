"""The demo does the whole job."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from secateur import cli
from secateur.data.digits import digits
from secateur.recipes import demo
from secateur.results.bench import latency


def test_the_whole_job_in_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [replace(data, images=data.images[:128], labels=data.labels[:128]) for data in digits()]
    monkeypatch.setattr(demo, "digits", lambda: few)
    monkeypatch.setattr(demo, "latency", partial(latency, repetitions=1))
    monkeypatch.setattr(demo, "BASELINE", demo.BASELINE.but(epochs=2))
    said: list[str] = []
    settings = demo.SETTINGS.but(tick_removes=0.3, tock_every=2, tock_epochs=1, finetune_epochs=1)
    done = demo.run_demo(tmp_path / "out", settings, said.append)
    assert [text.split()[0] for text in said[:5]] == ["to", "Start", "Train", "Train", "Finished"]
    assert any(text.startswith("Tick 1 ") for text in said)
    assert said[-1].startswith("Finished")
    assert done.result.after.macs <= 0.4 * done.result.before.macs
    assert done.verification.agrees
    assert json.loads(json.dumps(done.to_dict()))["MACs"]["before"] == done.result.before.macs
    lines = str(done).splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["MACs", "parameters", "accuracy", "CPU"]
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_mistakes_are_found_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(demo, "run_demo", lambda *_: pytest.fail("it has begun"))
    for arguments, word in ((["--keep-macs", "1.5"], "keep_macs"), (["--out", str(tmp_path / "file")], "file")):
        with pytest.raises(SystemExit) as stop:
            cli.main(["demo", *arguments])
        assert stop.value.code == 2
        assert word in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_demo_keeps_its_promise(tmp_path: Path, seed: int) -> None:
    arguments = [sys.executable, "-m", "secateur", "demo", "--json", "--seed", str(seed)]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, check=True)
    numbers = json.loads(done.stdout)
    assert numbers["MACs"]["after"] <= 0.4 * numbers["MACs"]["before"]
    assert numbers["accuracy (%)"]["after"] >= numbers["accuracy (%)"]["before"] - 1
    assert numbers["verified_to"] < 1e-9
