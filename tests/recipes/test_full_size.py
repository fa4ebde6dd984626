"""Every recipe of the paper as it is, networks whole, on a few images in the true format of its data.

Minutes long, and some gigabytes on disk while it runs.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import doing
import miniature  # pyright: ignore
import miniature_images  # pyright: ignore
import pytest
import torch
from torchvision.models import vgg16, vgg16_bn

from secateur import cli, load
from secateur.results.structure import read_structure

pytestmark = pytest.mark.slow

FEW: dict[str, Callable[[Path], Any]] = {
    "resnet56-cifar10": lambda folder: miniature.write_cifar10(folder, num_per_file=4),
    "vgg16m-cifar100": lambda folder: miniature.write_cifar100(folder, num_per_file=100),
    "resnet50-imagenet": lambda folder: miniature_images.write_imagenet(folder, num_classes=2, per_class=2),
    "vgg16m-cub200": lambda folder: miniature_images.write_cub200(folder, num_classes=2, per_class=4),
    "fcn32s-voc": lambda folder: miniature_images.write_voc2011_sbd(folder, num_images=1),
}
BATCHES = {"resnet56-cifar10": 10, "vgg16m-cifar100": 50, "resnet50-imagenet": 4, "vgg16m-cub200": 4, "fcn32s-voc": 1}
LEFT = {"resnet56-cifar10": 0.4, "vgg16m-cifar100": 0.4, "resnet50-imagenet": 0.6, "vgg16m-cub200": 0.4}
LEFT["fcn32s-voc"] = 0.73
PARAMETERS = {"resnet56-cifar10": 855_770, "vgg16m-cifar100": 14_770_212, "fcn32s-voc": 134_346_581}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Emptied at the end: pytest would keep it."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture
def start(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A command of a rehearsal, with the data and all; gives what it printed."""

    def call(command: str, recipe: str, *more: object) -> str:
        data = folder / "data"
        if not data.exists():
            FEW[recipe](data)
        given = ["--data", data, "--batch-size", BATCHES[recipe], "--device", "cpu", "--json", *more]
        cli.main([command, recipe, *map(str, given)])
        return capsys.readouterr().out

    return call


def check(run: Path, recipe: str, printed: str) -> None:
    """The pruned network is as small as asked for, and costs what is said."""
    told = doing.summary(run)
    assert json.loads(printed) == {key: told["after"][key] for key in ("macs", "params", "metrics")}
    share = told["after"]["macs"] / told["before"]["macs"]
    assert 0.9 * LEFT[recipe] < share <= LEFT[recipe]
    model = load(run)
    assert doing.count_macs(model, torch.zeros(told["input"])) == told["after"]["macs"]
    assert doing.count_params(model) == told["after"]["params"]
    if recipe in PARAMETERS:
        assert told["before"]["params"] == PARAMETERS[recipe]
    layers = read_structure(run).layers
    assert [[layer.name, layer.before, layer.after] for layer in layers] == told["layers"]
    floor = 9 if recipe == "vgg16m-cifar100" else 1
    assert all(layer.after >= floor for layer in layers)
    assert any(layer.after < layer.before for layer in layers)


def train_and_prune(recipe: str, start: Callable[..., str], folder: Path, *flags: object) -> None:
    rehearsal = ["--epochs-scale", 0.001]
    start("train", recipe, *rehearsal, *flags, "--out", folder / "trained")
    printed = start("prune", recipe, *rehearsal, "--weights", folder / "trained", "--out", folder / "run")
    check(folder / "run", recipe, printed)


@pytest.mark.parametrize("recipe", ["resnet56-cifar10", "vgg16m-cifar100", "resnet50-imagenet"])
def test_from_random_weights(recipe: str, start: Callable[..., str], folder: Path) -> None:
    train_and_prune(recipe, start, folder)
    metrics = json.loads(start("evaluate", recipe, "--weights", folder / "run"))
    assert metrics == pytest.approx(doing.summary(folder / "run")["after"]["metrics"], rel=1e-5)
    assert ("top5" in metrics) == (recipe == "resnet50-imagenet")


def test_vgg_from_the_weights_of_torchvision(start: Callable[..., str], folder: Path) -> None:
    theirs = vgg16_bn(init_weights=False).state_dict()
    torch.save(theirs, folder / "vgg16_bn.pth")
    train_and_prune("vgg16m-cub200", start, folder, "--weights", folder / "vgg16_bn.pth")
    ours = doing.weights(folder / "trained" / "original.safetensors")
    assert torch.equal(ours["features.0.weight"], theirs["features.0.weight"])
    assert torch.equal(ours["features.41.weight"], theirs["features.41.weight"])
    assert ours["fc.weight"].shape == (2, 512)


def test_fcn_from_the_weights_of_torchvision(start: Callable[..., str], folder: Path) -> None:
    theirs = vgg16(init_weights=False).state_dict()
    torch.save(theirs, folder / "vgg16.pth")
    train_and_prune("fcn32s-voc", start, folder, "--weights", folder / "vgg16.pth")
    ours = doing.weights(folder / "trained" / "original.safetensors")
    assert torch.equal(ours["features.28.weight"], theirs["features.28.weight"])
    assert torch.equal(ours["fc6.weight"].flatten(1), theirs["classifier.0.weight"])
    assert torch.equal(ours["fc7.weight"].flatten(1), theirs["classifier.3.weight"])
    assert not ours["score.weight"].any()
