"""CUB-200-2011's lists."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from miniature_images import dataset_of, write_cub200
from pictures import alike, as_tested
from PIL import Image

from secateur.data.cub import cub200
from secateur.data.maps import compose


@pytest.mark.parametrize("below", ["", "CUB_200_2011"])
def test_the_official_split(tmp_path: Path, below: str) -> None:
    write_cub200(tmp_path)
    train, test = cub200(tmp_path / below)
    assert (train.batch_size, test.batch_size) == (64, 64)
    for loader, rest in ((train, 0), (test, 1)):
        # Every other image of a class is for training.
        assert {int(Path(path).stem[-4:]) % 2 for path in dataset_of(loader).paths} == {rest}
        assert [f"{target + 1:03d}.Bird_{target}" for target in dataset_of(loader).targets] == [
            Path(path).parent.name for path in dataset_of(loader).paths
        ]
        assert Counter(dataset_of(loader).targets) == {0: 4, 1: 4, 2: 4}
    assert next(iter(train))[0].shape == (12, 3, 224, 224)
    with Image.open(dataset_of(test).paths[0]) as image:
        assert alike(dataset_of(test)[0][0], as_tested(image), levels=1)


def test_boxes(tmp_path: Path) -> None:
    write_cub200(tmp_path, size=(40, 32))
    path = tmp_path / "CUB_200_2011/bounding_boxes.txt"
    lines = path.read_text().splitlines()
    # That of the first image for testing; image 1 is for training.
    path.write_text("\n".join([lines[0], "2 5.0 3.0 20.0 10.0", *lines[2:]]))
    _, test = cub200(tmp_path, boxes=True)
    with Image.open(dataset_of(test).paths[0]) as image:
        assert alike(dataset_of(test)[0][0], as_tested(image.crop((5, 3, 25, 13))), levels=1)
    with Image.open(dataset_of(test).paths[1]) as image:
        assert alike(dataset_of(test)[1][0], as_tested(image.crop((20, 0, 40, 32))), levels=1)
    train, _ = cub200(tmp_path, boxes=True)
    # Birds are of the colour of their class, what lies beside them is brown.
    colours = torch.stack([image.mean((1, 2)) for image, _ in dataset_of(train)])
    plain = compose()(Image.new("RGB", (1, 1), (220, 40, 40)))[:, 0, 0]
    assert torch.allclose(colours[:4], plain.expand(4, 3), atol=0.3)


ONE, TWO = "1 001.Bird_0/Bird_0_0000.jpg", "2 001.Bird_0/Bird_0_0001.jpg"
