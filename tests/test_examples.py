"""Every example runs, and does what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.strip().splitlines()
    share = re.search(r"([\d.]+)% of the MACs", last)
    assert share is not None, last
    assert 40 < float(share[1]) <= 50
