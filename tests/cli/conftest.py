"""Miniature data, and the command in this process."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import miniature
import pytest
from exporting import one_table  # noqa: F401

from secateur import cli
from secateur.pruning.measure import time_networks
from secateur.results.bench import latency

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 of 20 images to train on, and 4 to test on."""
    folder = tmp_path_factory.mktemp("cifar")
    miniature.write_cifar10(folder, num_per_file=4)
    return folder


@pytest.fixture
def secateur(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """The command in this process: exit status, stdout and stderr; networks are timed once instead of thirty times."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("secateur.recipes.reports.latency", partial(latency, repetitions=1))
    monkeypatch.setattr("secateur.recipes.timing.time_networks", partial(time_networks, repetitions=1))

    def call(*arguments: object) -> tuple[int, str, str]:
        status = 0
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return call
