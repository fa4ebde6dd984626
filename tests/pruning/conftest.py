"""Let the tests of this folder share their helpers, and those of the channel analysis; each starts from one seed."""

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "channels")]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
