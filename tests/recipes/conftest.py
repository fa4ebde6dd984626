"""Let the tests of this folder share their helpers, the datasets of tests/data, and the forks of tests/ticktock."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "data"), str(HERE.parent / "ticktock")]

import miniature  # noqa: E402  # pyright: ignore
from doing import PRUNING, TRAINING, TUNING, Chain, do  # noqa: E402  # pyright: ignore

from secateur.recipes.jobs import Order  # noqa: E402


@pytest.fixture(scope="session")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 of 40 images to train on, and 8 to test on."""
    folder = tmp_path_factory.mktemp("cifar")
    miniature.write_cifar10(folder, num_per_file=8)
    return folder


@pytest.fixture(scope="session")
def chain(cifar: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    order = Order(recipe="own_networks:plain@cifar10", data=str(cifar), width=2.0)
    done = Chain(order, tmp_path_factory.mktemp("chain"))
    do(order, TRAINING, done["baseline"])
    do(done.after("baseline"), PRUNING, done["pruned"])
    do(done.after("pruned"), TUNING, done["tuned"])
    do(done.after("pruned", fresh=True), TRAINING, done["scratch"])
    return done
