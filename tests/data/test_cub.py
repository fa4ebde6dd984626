"""CUB-200-2011's lists."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from miniature_images import write_cub200
from PIL import Image
from torch.utils.data import DataLoader

from secateur.data.cub import CUB200, cub200
from secateur.data.images import Images, compose, for_testing
from secateur.errors import InvalidData


def data(loader: DataLoader) -> Images:
    assert isinstance(loader.dataset, Images)
    return loader.dataset


@pytest.mark.parametrize("below", ["", "CUB_200_2011"])
def test_the_official_split(tmp_path: Path, below: str) -> None:
    write_cub200(tmp_path)
    train, test = cub200(tmp_path / below)
    assert (train.batch_size, test.batch_size) == (64, 64)
    for loader, rest in ((train, 0), (test, 1)):
        # Every other image of a class is for training.
        assert {int(Path(path).stem[-4:]) % 2 for path in data(loader).paths} == {rest}
        assert [f"{target + 1:03d}.Bird_{target}" for target in data(loader).targets] == [
            Path(path).parent.name for path in data(loader).paths
        ]
        assert Counter(data(loader).targets) == {0: 4, 1: 4, 2: 4}
    assert next(iter(train))[0].shape == (12, 3, 224, 224)
    with Image.open(data(test).paths[0]) as image:
        assert torch.equal(data(test)[0][0], for_testing()(image))


def test_boxes(tmp_path: Path) -> None:
    write_cub200(tmp_path, size=(40, 32))
    path = tmp_path / "CUB_200_2011/bounding_boxes.txt"
    lines = path.read_text().splitlines()
    # That of the first image for testing; image 1 is for training.
    path.write_text("\n".join([lines[0], "2 5.0 3.0 20.0 10.0", *lines[2:]]))
    _, test = cub200(tmp_path, boxes=True)
    with Image.open(data(test).paths[0]) as image:
        assert torch.equal(data(test)[0][0], for_testing()(image.crop((5, 3, 25, 13))))
    with Image.open(data(test).paths[1]) as image:
        assert torch.equal(data(test)[1][0], for_testing()(image.crop((20, 0, 40, 32))))
    train, _ = cub200(tmp_path, boxes=True)
    # Birds are of the colour of their class, what lies beside them is brown.
    colours = torch.stack([image.mean((1, 2)) for image, _ in data(train)])
    plain = compose()(Image.new("RGB", (1, 1), (220, 40, 40)))[:, 0, 0]
    assert torch.allclose(colours[:4], plain.expand(4, 3), atol=0.3)


def test_boxes_are_read_only_when_they_are_used(tmp_path: Path) -> None:
    write_cub200(tmp_path)
    (tmp_path / "CUB_200_2011/bounding_boxes.txt").unlink()
    cub200(tmp_path)
    with pytest.raises(InvalidData, match=r"there is no .*bounding_boxes.txt;"):
        cub200(tmp_path, boxes=True)


ONE, TWO = "1 001.Bird_0/Bird_0_0000.jpg", "2 001.Bird_0/Bird_0_0001.jpg"


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("images.txt", f"{ONE}\n{ONE}", "images.txt is broken: it has two lines for one image;"),
        ("images.txt", "1", "images.txt is broken: line 1 is '1', wanted: image name;"),
        (
            "images.txt",
            "one 001.Bird_0/Bird_0_0000.jpg",
            "line 1 is 'one 001.Bird_0/Bird_0_0000.jpg', wanted: image name",
        ),
        ("images.txt", "1 001.Bird_0/../../x.jpg", "images.txt is broken: '001.Bird_0/../../x.jpg' leads out of the"),
        ("images.txt", "1 /etc/passwd", "images.txt is broken: '/etc/passwd' leads out of the folder;"),
        ("images.txt", r"1 ..\..\x.jpg", "images.txt is broken: .* leads out of the folder;"),
        ("images.txt", "1 001.Bird_0/x\0.jpg", "there is no .*images/001.Bird_0/x"),
        ("images.txt", "1 x\0y/x.jpg", "there is no .*images/x"),
        ("images.txt", "1 001.Bird_0/Bird_0_9999.jpg", "there is no .*images/001.Bird_0/Bird_0_9999.jpg;"),
        ("images.txt", "1 009.Bird_8/Bird_8_0000.jpg", "there is no .*images/009.Bird_8/Bird_8_0000.jpg;"),
        (
            "images.txt",
            f"99 {ONE[2:]}",
            "image_class_labels.txt is broken: image 1 is in it or in images.txt, but not in",
        ),
        ("image_class_labels.txt", "99 1", "image_class_labels.txt is broken: image 1 is in it or in images.txt"),
        ("image_class_labels.txt", "1 0", "image_class_labels.txt is broken: image 1 has 0, wanted 1 to 3;"),
        ("image_class_labels.txt", "1 4", "image_class_labels.txt is broken: image 1 has 4, wanted 1 to 3;"),
        ("train_test_split.txt", "1 2", "train_test_split.txt is broken: image 1 has 2, wanted 0 to 1;"),
        ("train_test_split.txt", "1 1\n99 1", "train_test_split.txt is broken: image 99 is in it or in images.txt"),
        (
            "bounding_boxes.txt",
            "1 0 0 0 5",
            r"bounding_boxes.txt is broken: the box of image 1 has no inside: \(0.0, 0.0",
        ),
        ("bounding_boxes.txt", "1 0 0 5 -5", "the box of image 1 has no inside"),
        ("bounding_boxes.txt", "1 0 0 5 nan", "the box of image 1 has no inside"),
        ("bounding_boxes.txt", "1 nan 0 5 5", "the box of image 1 has no inside"),
        ("bounding_boxes.txt", "1 0 inf 5 5", "the box of image 1 has no inside"),
        ("bounding_boxes.txt", "1 0 0 inf 5", "the box of image 1 has no inside"),
        ("bounding_boxes.txt", "1 0 0 5", "line 1 is '1 0 0 5', wanted: image left top width height;"),
    ],
)
def test_lists_that_do_not_fit_are_named(tmp_path: Path, file: str, line: str, message: str) -> None:
    write_cub200(tmp_path)
    path = tmp_path / "CUB_200_2011" / file
    _, *rest = path.read_text().splitlines()
    path.write_text("\n".join([line, *rest]))
    with pytest.raises(InvalidData, match=rf"^CUB-200-2011: .*{message}.*{re.escape(str(CUB200))}$"):
        cub200(tmp_path, boxes=True)


@pytest.mark.parametrize("file", ["images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt"])
def test_missing_and_empty_lists_are_named(tmp_path: Path, file: str) -> None:
    write_cub200(tmp_path)
    (tmp_path / "CUB_200_2011" / file).write_text("\n")
    with pytest.raises(InvalidData, match=rf"CUB_200_2011/{file} is broken: it is empty;"):
        cub200(tmp_path)
    (tmp_path / "CUB_200_2011" / file).unlink()
    with pytest.raises(InvalidData, match=rf"there is no .*CUB_200_2011/{file};"):
        cub200(tmp_path)


@pytest.mark.parametrize("mark", [0, 1])
def test_a_split_without_two_parts_is_named(tmp_path: Path, mark: int) -> None:
    write_cub200(tmp_path)
    (tmp_path / "CUB_200_2011/train_test_split.txt").write_text("".join(f"{i} {mark}\n" for i in range(1, 25)))
    with pytest.raises(InvalidData, match=rf"train_test_split.txt is broken: no image is marked with {1 - mark};"):
        cub200(tmp_path)
