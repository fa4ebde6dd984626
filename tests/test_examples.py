"""Every example runs, the quick ones with fewer images, and does what it says."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from secateur.data import digits
from secateur.data.arrays import Arrays

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SLOW = {"accelerate_loop", "hugging_face", "lightning_loop", "transformers_loop"}
"""Their frameworks take long to import, and prune between epochs of a certain length."""
SMALLER = {"two_headed_detector": {"draw(256, ": "draw(32, ", "draw(64, ": "draw(16, "}}


def few(data: tuple[Arrays, ...]) -> tuple[Arrays, ...]:
    return tuple(replace(each, images=each.images[:256], labels=each.labels[:256]) for each in data)


@pytest.mark.filterwarnings("default")  # as where users run them
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if path.stem in SLOW else path for path in EXAMPLES],
    ids=[path.stem for path in EXAMPLES],
)
def test_example(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = path.read_text()
    for usual, smaller in SMALLER.get(path.stem, {}).items():
        assert usual in code
        code = code.replace(usual, smaller)
    script = tmp_path / path.name
    script.write_text(code)
    if path.stem not in SLOW:
        whole = digits.digits
        monkeypatch.setattr(digits, "digits", lambda **options: few(whole(**options)))
    before = torch.get_rng_state()
    runpy.run_path(str(script), run_name="__main__")
    torch.set_rng_state(before)
    *_, share = re.findall(r"([\d.]+)% of the MACs", capsys.readouterr().out)
    assert 40 < float(share) <= 50
