"""Files that are damaged at random are read or refused; `tests/fuzz/readers.py` does it thousands of times."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parent / "fuzz" / "readers.py"
spec = importlib.util.spec_from_file_location("readers", PATH)
assert spec is not None
assert spec.loader is not None
readers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(readers)


@pytest.mark.parametrize(
    "reader", ["weights", "cifar10", "cifar100", "fashion mnist", "matlab", "photographs", "config"]
)
def test_damaged_files_are_read_or_refused(reader: str, tmp_path: Path) -> None:
    found, findings = readers.execute(reader, 25, 1, tmp_path)
    assert findings == []
    assert found["refused"] > 0


@pytest.mark.slow
def test_every_reader() -> None:
    command = [sys.executable, str(PATH), "--count", "1000", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout


def test_a_reader_that_fails_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path) -> None:
        (folder / "file.txt").write_text("12")

    def read(folder: Path) -> None:
        int((folder / "file.txt").read_bytes())

    monkeypatch.setitem(readers.READERS, "careless", (write, read))
    found, findings = readers.execute("careless", 20, 0, tmp_path)
    assert found["refused"] == len(findings) > 0
