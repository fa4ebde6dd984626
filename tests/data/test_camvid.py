"""CamVid."""

from pathlib import Path

import numpy as np
import torch
from miniature_images import COLOURS, dataset_of, save, write_camvid
from PIL import Image

from secateur.data.camvid import camvid
from secateur.data.maps import compose


def test_frames_and_classes(tmp_path: Path) -> None:
    write_camvid(tmp_path)
    train, test = camvid(tmp_path)
    assert (train.batch_size, test.batch_size) == (4, 4)
    assert {Path(path).parent.name for path in dataset_of(train).paths + dataset_of(train).maps} == {
        "train",
        "trainannot",
    }
    assert {Path(path).parent.name for path in dataset_of(test).paths + dataset_of(test).maps} == {"test", "testannot"}
    images, maps = (torch.cat(parts) for parts in zip(*test, strict=True))
    assert images.shape == (8, 3, 32, 64)
    assert maps.shape == (8, 32, 64)
    # The line between two classes is void.
    assert (maps[:, 16] == 255).all()
    assert int((maps == 255).sum()) == 8 * 64
    for label in set(maps.unique().tolist()) - {255}:
        colour = compose()(Image.new("RGB", (1, 1), COLOURS[label]))[:, 0, 0]
        assert torch.dist(images.movedim(1, -1)[maps == label].mean(0), colour) < 0.2


def test_frames_are_mirrored_in_training_only(tmp_path: Path) -> None:
    write_camvid(tmp_path, num_images=1)
    values = np.repeat(np.arange(64, dtype=np.uint8)[None] // 6, 32, 0)
    for part in ("train", "test"):
        save(tmp_path / f"{part}annot/0001TP_000000.png", values)
        save(tmp_path / f"{part}/0001TP_000000.png", np.repeat(values[:, :, None] * 20, 3, 2))
    train, test = camvid(str(tmp_path))
    firsts = set()
    for _ in range(20):
        image, labels = dataset_of(train)[0]
        shade = ((image[0] * 0.229 + 0.485) * 255 / 20).round().long()
        assert torch.equal(shade, labels)
        firsts.add(int(labels[0, 0]))
        assert np.array_equal(dataset_of(test)[0][1].numpy(), values)
    assert firsts == {0, 10}
