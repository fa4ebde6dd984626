"""Every example runs, and does what it says."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SLOW = {"accelerate_loop", "hugging_face", "lightning_loop", "transformers_loop"}
"""Their frameworks take long to import."""


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
    before = torch.get_rng_state()
    runpy.run_path(str(path), run_name="__main__")
    torch.set_rng_state(before)
    *_, share = re.findall(r"([\d.]+)% of the MACs", capsys.readouterr().out)
    assert 40 < float(share) <= 50
