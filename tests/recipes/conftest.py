"""Miniature data, and a chain of runs on it."""

from pathlib import Path

import miniature
import pytest
from doing import PRUNING, TRAINING, TUNING, Chain, do

from secateur.recipes.jobs import Order


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
