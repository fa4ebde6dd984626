"""CamVid."""

from pathlib import Path

import numpy as np
import torch
from miniature_images import COLOURS, write_camvid
from PIL import Image

from secateur.data.camvid import camvid
from secateur.data.maps import compose


def test_frames_and_classes(tmp_path: Path) -> None:
    write_camvid(tmp_path)
    train, test = camvid(tmp_path)
    assert (train.batch_size, test.batch_size) == (4, 4)
    assert (train.shuffle, test.shuffle) == (True, False)
    assert (test.scale, test.flip, test.jitter) == ((1.0, 1.0), False, 0.0)
    for part, data in (("train", train), ("test", test)):
        for index in range(8):
            name = f"0001TP_{index:06d}.png"
            assert np.array_equal(data.images[index].movedim(0, -1), np.array(Image.open(tmp_path / part / name)))
            values = np.array(Image.open(tmp_path / f"{part}annot" / name))
            assert np.array_equal(data.labels[index], np.where(values == 11, 255, values))
    images, maps = (torch.cat(parts) for parts in zip(*test, strict=True))
    assert images.shape == (8, 3, 32, 64)
    assert maps.shape == (8, 32, 64)
    # The line between two classes is void.
    assert (maps[:, 16] == 255).all()
    assert int((maps == 255).sum()) == 8 * 64
    for label in set(maps.unique().tolist()) - {255}:
        colour = compose()(Image.new("RGB", (1, 1), COLOURS[label]))[:, 0, 0]
        assert torch.dist(images.movedim(1, -1)[maps == label].mean(0), colour) < 0.2


def test_frames_are_changed_in_training_only(tmp_path: Path) -> None:
    write_camvid(tmp_path, num_images=1)
    train, test = camvid(str(tmp_path))
    seen = [next(iter(train)) for _ in range(20)]
    # Enlarged, until a class is all there is, or shrunk, with void around; and mirrored.
    shares = [float((labels == 255).float().mean()) for _, labels in seen]
    assert min(shares) < 0.05
    assert max(shares) > 0.5
    assert {images.shape for images, _ in seen} == {(1, 3, 32, 64)}
    assert all(map(torch.equal, next(iter(test)), next(iter(test))))
    assert (train.scale, train.flip, train.jitter) == ((0.5, 2.0), True, 0.4)
