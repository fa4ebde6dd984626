"""The wheel, installed outside the checkout, is all that is needed."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import secateur

ROOT = Path(__file__).parent.parent
USE = """
import torch, secateur
from torch import nn
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
data = [(torch.randn(16, 1, 8, 8), torch.arange(16) % 4)]
result = secateur.prune(model, data[0][0][:1], secateur.classification(data), keep_macs=0.5, finetune_epochs=1)
secateur.save(result, "out")
secateur.load("out", build=lambda: model)
print(secateur.__file__)
"""


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    """With the packages that are here, since the test installs nothing else."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, ROOT], check=True)
    [wheel] = tmp_path.glob("*.whl")
    assert secateur.__version__ in wheel.name
    files = zipfile.ZipFile(wheel).namelist()
    source = ROOT / "src"
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    packed = {name for name in files if ".dist-info/" not in name}
    assert packed == {name for name in wanted if ".egg-info" not in name}
    assert any(name.endswith("licenses/LICENSE") for name in files)
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "-q", "install", "--no-deps", "--no-index", wheel], check=True)
    # The other packages are those of this environment, behind what is installed in the new one.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(str(Path(sys.prefix).glob("lib/python*/site-packages").__next__()) + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        ).stdout.strip()

    assert run(python, "-W", "error", "-c", USE).startswith(str(site))
    assert run(home / "bin" / "secateur", "--version").endswith(secateur.__version__)
    assert "digits" in run(home / "bin" / "secateur", "recipes")
    run(home / "bin" / "secateur", "prune", "digits", "--epochs-scale", "0.01", "--out", "run", "--quiet")
    run(home / "bin" / "secateur", "report", "run", "-o", "report.html")
    assert (tmp_path / "report.html").stat().st_size > 10_000
