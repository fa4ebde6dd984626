"""A user's own photographs, from the command line: train, prune, predict and export."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import miniature_images
import pytest
import torch

from secateur.cli.train import Train
from secateur.models.lookup import find_model
from secateur.recipes.recipe import from_scratch, transfer

Call = Callable[..., tuple[int, str, str]]
NETWORK = "torchvision:shufflenet_v2_x0_5@class_folders"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    miniature_images.write_class_folders(tmp_path / "made", num_classes=3, per_class=5)
    shutil.move(tmp_path / "made" / "train", tmp_path / "photos")
    torch.save(find_model("torchvision:shufflenet_v2_x0_5", num_classes=10).state_dict(), tmp_path / "imagenet.pth")
    return tmp_path / "photos"


def test_from_a_file_of_other_classes_to_predictions(secateur: Call, photos: Path, tmp_path: Path) -> None:
    source = ["--data", photos, "--image-size", 32, "--batch-size", 4]
    weights = ["--weights", tmp_path / "imagenet.pth"]
    status, _, told = secateur("train", NETWORK, *source, *weights, "--epochs", 2, "--out", tmp_path / "trained")
    assert status == 0, told
    assert "fc is made anew, with random weights: 3 classes, where the file has 10 classes" in told
    assert "12 images to train on, 3 to test on" in told
    assert "to do: 2 epochs of training. An epoch trains in about" in told
    flags = ["--keep-macs", "0.8", "--repair", "8", "--finetune-epochs", "1"]
    trained = ["--weights", tmp_path / "trained"]
    status, _, told = secateur("prune", NETWORK, *source, *trained, *flags, "--out", tmp_path / "pruned")
    assert status == 0, told
    assert "made anew" not in told
    image = next((photos / "class_1").iterdir())
    status, text, _ = secateur("predict", tmp_path / "pruned", image, "--top", 2)
    assert status == 0
    lines = text.splitlines()
    assert lines[0] == str(image)
    assert lines[1].split() == ["whole", "pruned"]
    assert len(lines) == 4
    status, text, _ = secateur("predict", tmp_path / "trained", image, image, "--json")
    assert status == 0
    (first, second) = json.loads(text)
    assert first == second
    assert sum(first["network"].values()) == pytest.approx(1)
    assert set(first["network"]) == {"class_0", "class_1", "class_2"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["nowhere", "1.jpg"], "nowhere"), (["nowhere"], "no image"), (["nowhere", "1.jpg", "--top", 0], "--top")],
)
def test_mistakes_of_predict(secateur: Call, arguments: list[object], words: str) -> None:
    status, _, told = secateur("predict", *arguments)
    assert status == 2
    assert words in told


def test_given_weights_are_trained_for_25_epochs(photos: Path, tmp_path: Path) -> None:
    file = tmp_path / "imagenet.pth"
    assert Train(recipe=NETWORK, weights=file).schedule() == transfer()
    assert Train(recipe="own_networks:job", weights=file, new_head="10").schedule() == transfer()
    assert Train(recipe=NETWORK).schedule() == from_scratch()
    assert Train(recipe="vgg16m-cub200", weights=file).schedule() == Train(recipe="vgg16m-cub200").schedule()
