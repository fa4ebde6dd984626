"""Let the tests of this folder share their helpers, miniature datasets, and a user's own networks."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "data"), str(HERE.parent / "recipes")]

import miniature  # noqa: E402  # pyright: ignore

from secateur import cli  # noqa: E402
from secateur.results.bench import latency  # noqa: E402

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
    for module in ("work", "reports"):
        monkeypatch.setattr(f"secateur.recipes.{module}.latency", partial(latency, repetitions=1))

    def call(*arguments: object) -> tuple[int, str, str]:
        status = 0
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return call
