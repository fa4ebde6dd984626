"""Miniature runs, and a browser to look at their reports."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from told import write_training
from torch import nn

import secateur
from secateur.data.arrays import Arrays

SETTINGS = secateur.TickTock.of(
    keep_macs=0.5, tick_removes=0.15, tock_every=2, tock_epochs=2, finetune_epochs=2, min_ratio=0.2
)


def make_run(folder: Path, settings: secateur.TickTock) -> secateur.Result:
    """A real run of a second."""
    torch.manual_seed(0)
    images = torch.rand(96, 2, 8, 8)
    labels = (images.mean((1, 2, 3)) > 0.5).long()
    model = nn.Sequential(
        nn.Conv2d(2, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    task = secateur.classification(Arrays(images, labels, 32, shuffle=True), Arrays(images, labels, 96))
    result = secateur.prune(model, images[:1], task, settings=settings, folder=folder)
    secateur.save(result, folder / "result")
    return result


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`taylor` and `slim`: finished. `training`: a run that only trains."""
    settings = {"taylor": SETTINGS, "slim": SETTINGS.but(score="slim", tick_removes=0.3, tock_every=0)}
    folders = {name: tmp_path_factory.mktemp("runs") / name for name in (*settings, "training")}
    for name in settings:
        make_run(folders[name], settings[name])
    write_training(folders["training"], folders["taylor"])
    return folders


@pytest.fixture
def copied(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A run that a test may change."""
    return Path(shutil.copytree(runs["taylor"], tmp_path / "run"))


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Debian's Chromium, without a window."""
    program = shutil.which("chromium")
    if program is None:
        missing = "there is no chromium: install the package chromium (apt-get install chromium)"
        if os.environ.get("SECATEUR_REQUIRE_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        without = ["--no-sandbox", "--disable-gpu", "--disable-software-rasterizer"]
        opened = playwright.chromium.launch(executable_path=program, args=without)
        yield opened
        opened.close()
