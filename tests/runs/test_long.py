"""Runs of many Ticks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "fuzz" / "long_run.py"


@pytest.mark.slow
def test_nothing_grows_in_many_ticks() -> None:
    # Without oneDNN's cache, which fills up in the first hundred Ticks.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
    command = [sys.executable, str(SCRIPT), "--ticks", "60", "--untimed"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "every event is there once" in done.stdout
