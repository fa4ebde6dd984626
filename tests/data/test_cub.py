"""CUB-200-2011's lists."""

from collections import Counter
from pathlib import Path

import pytest
from miniature_images import dataset_of, write_cub200
from pictures import alike, as_tested
from PIL import Image

from secateur.data.cub import cub200


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
