"""Class names and preprocessing as part of a result, and what networks say of photographs."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import miniature_images
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import secateur
from secateur.data.folders import class_folders
from secateur.data.preprocessing import Preprocessing
from secateur.errors import InvalidData, InvalidSetting
from secateur.models.resnet_cifar import resnet14
from secateur.results.export import export_onnx
from secateur.results.load import about, find_whole, load_whole
from secateur.results.predict import predict

CLASSES = ["bird", "cat", "dog"]
SMALL = Preprocessing(resize=20, crop=16, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
NETWORK = {"name": "resnet14", "options": {"num_classes": 3, "width": 0.5}}


def network() -> nn.Module:
    return resnet14(num_classes=3, width=0.5)


@cache
def pruned(folder: Path | None = None) -> secateur.Result:
    """The result of a run without training."""
    torch.manual_seed(0)
    images = torch.randn(8, 3, 16, 16)
    task = secateur.classification([(images, torch.arange(8) % 3)])
    settings = secateur.TickTock.one_shot(keep_macs=0.7, finetune_epochs=0)
    return secateur.prune(network(), images[:1], task, settings=settings, folder=folder)


def saved(folder: Path, result: secateur.Result | None = None, **values: Any) -> secateur.Result:
    result = result or pruned()
    given = {"network": NETWORK, "classes": CLASSES, "preprocessing": SMALL.to_dict(), **values}
    secateur.save(result, folder / "result", **{name: value for name, value in given.items() if value is not None})
    return result


def photograph(path: Path, size: tuple[int, int] = (30, 20)) -> Path:
    miniature_images.save(path, miniature_images.picture(2, size, np.random.default_rng(0)))
    return path


def by_hand(path: Path, preprocessing: Preprocessing) -> torch.Tensor:
    """The same in Pillow's and numpy's words."""
    margin = round((preprocessing.resize - preprocessing.crop) / 2)
    box = (margin, margin, margin + preprocessing.crop, margin + preprocessing.crop)
    with Image.open(path) as image:
        resized = image.convert("RGB").resize((preprocessing.resize, preprocessing.resize), Image.Resampling.BILINEAR)
    pixels = np.asarray(resized.crop(box), np.float32) / 255
    return torch.from_numpy((pixels - preprocessing.mean) / preprocessing.std).permute(2, 0, 1).float()


def test_a_result_tells_its_classes_and_preprocessing(tmp_path: Path) -> None:
    saved(tmp_path)
    told = about(tmp_path)
    assert (told.classes, told.preprocessing) == (tuple(CLASSES), SMALL)
    card = (tmp_path / "result" / "card.md").read_text()
    assert "`bird`, `cat`, `dog`" in card
    assert "resized to 20x20" in card
    assert "cropped to the 16x16" in card
    assert "mean 0.5, 0.4, 0.3" in card


def test_a_result_may_tell_neither(tmp_path: Path) -> None:
    saved(tmp_path, classes=None, preprocessing=None)
    told = about(tmp_path)
    assert (told.classes, told.preprocessing, told.metadata) == (None, None, {})
    assert "about(folder)" not in (tmp_path / "result" / "card.md").read_text()
    with pytest.raises(InvalidSetting, match="preprocessing="):
        predict(tmp_path, [photograph(tmp_path / "1.jpg")])


@pytest.mark.parametrize(
    "change",
    [
        {"classes": "bird"},
        {"classes": [1, 2, 3]},
        {"preprocessing": [224]},
        {"preprocessing": {"resize": 0}},
        {"preprocessing": {"resize": 2**40, "crop": 224}},
        {"preprocessing": {"resize": 10, "crop": 20}},
        {"preprocessing": {"mean": [0.5]}},
        {"preprocessing": {"std": [0.0, 1.0, 1.0]}},
        {"preprocessing": {"std": [float("nan"), 1.0, 1.0]}},
        {"preprocessing": {"interpolation": "bicubic"}},
        {"preprocessing": {"command": "rm"}},
    ],
)
def test_a_summary_that_somebody_has_changed(tmp_path: Path, change: dict[str, Any]) -> None:
    saved(tmp_path)
    path = tmp_path / "result" / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InvalidData):
        about(tmp_path)


def test_what_becomes_of_a_photograph(tmp_path: Path) -> None:
    path = photograph(tmp_path / "1.png", (37, 53))
    ((image,),) = SMALL.batches([path])
    assert image.shape == (3, 16, 16)
    assert torch.allclose(image, by_hand(path, SMALL), atol=1.5 / 255 / min(SMALL.std))


def test_it_is_that_of_tests(tmp_path: Path) -> None:
    miniature_images.write_class_folders(tmp_path)
    _, test = class_folders(tmp_path, size=24)
    preprocessing = Preprocessing.of(test)
    assert (preprocessing.resize, preprocessing.crop) == (27, 24)
    images = torch.cat([images for images, _ in test])
    assert torch.equal(torch.cat(list(preprocessing.batches(test.paths, 5))), images)


def test_both_networks_are_asked(tmp_path: Path) -> None:
    result = saved(tmp_path, pruned(tmp_path))
    whole = load_whole(tmp_path)
    assert whole is not None
    paths = [photograph(tmp_path / "1.jpg"), photograph(tmp_path / "2.jpg", (20, 40))]
    found = predict(tmp_path, paths)
    (images,) = SMALL.batches(paths)
    for name, model in (("whole", whole), ("pruned", result.model)):
        with torch.no_grad():
            wanted = model.eval()(images).softmax(1)
        for each, row in zip(found, wanted, strict=True):
            given = each.probabilities[name]
            assert [given[name] for name in CLASSES] == pytest.approx(row.tolist(), abs=1e-6)
            assert list(given.values()) == sorted(given.values(), reverse=True)
    assert [each.image for each in found] == [str(path) for path in paths]
    assert found[0].probabilities["whole"] != found[0].probabilities["pruned"]
    (alone,) = predict(tmp_path / "result", paths[:1], network)
    for name, probabilities in found[0].probabilities.items():
        assert alone.probabilities[name] == pytest.approx(probabilities, abs=1e-6)


def test_the_best_of_any_network_are_shown(tmp_path: Path) -> None:
    saved(tmp_path)
    (found,) = predict(tmp_path, [photograph(tmp_path / "1.jpg")])
    highest = {name: max(each[name] for each in found.probabilities.values()) for name in CLASSES}
    assert found.best(2) == sorted(CLASSES, key=lambda name: -highest[name])[:2]


def test_files_that_are_no_images(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "notes.jpg").write_text("not an image")
    with pytest.raises(InvalidData, match=r"notes\.jpg"):
        predict(tmp_path, [tmp_path / "notes.jpg"])
    with pytest.raises(InvalidData, match=r"there is no file .*nothing\.jpg"):
        predict(tmp_path, [tmp_path / "nothing.jpg"])


def test_names_for_another_number_of_classes(tmp_path: Path) -> None:
    saved(tmp_path, classes=["bird", "cat"])
    with pytest.raises(InvalidData, match="2 classes"):
        predict(tmp_path, [photograph(tmp_path / "1.jpg")])


def test_onnx_files_hold_them(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    result = saved(tmp_path)
    export_onnx(result.model, torch.randn(1, 3, 16, 16), tmp_path / "it.onnx", about(tmp_path).metadata)
    found = {entry.key: json.loads(entry.value) for entry in onnx.load(tmp_path / "it.onnx").metadata_props}
    assert found == {"classes": CLASSES, "preprocessing": SMALL.to_dict()}


def test_scores_that_are_no_numbers(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "result" / "model.safetensors"
    state = load_file(path)
    state["fc.weight"] = torch.full_like(state["fc.weight"], 3e38)
    save_file(state, path)
    with pytest.raises(InvalidData, match="not finite"):
        predict(tmp_path, [photograph(tmp_path / "1.jpg")])


def test_weights_beside_a_result_are_not_those_of_its_run(tmp_path: Path) -> None:
    saved(tmp_path, pruned(tmp_path))
    assert find_whole(tmp_path / "result") is not None
    (tmp_path / "config.json").unlink()
    assert find_whole(tmp_path / "result") is None
