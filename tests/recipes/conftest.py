"""Let the tests of this folder share their helpers, and the miniature datasets of tests/data."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "data")]

import miniature  # noqa: E402  # pyright: ignore


@pytest.fixture(scope="session")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 of 40 images to train on, and 8 to test on."""
    folder = tmp_path_factory.mktemp("cifar")
    miniature.write_cifar10(folder, num_per_file=8)
    return folder
