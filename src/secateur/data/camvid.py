"""CamVid: frames of a drive through Cambridge, with a class for every pixel, as the tutorial of SegNet has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from secateur.data.decode import read_map
from secateur.data.layout import Layout
from secateur.data.maps import VOID, Maps, compose
from secateur.data.scenes import Scenes, read

CAMVID = Layout(
    "CamVid",
    """\
train/
  0001TP_006690.png     480x360 pixels
trainannot/
  0001TP_006690.png     a label map: 0 to 10, and 11 for void
test/
testannot/""",
    "the folder CamVid of the SegNet tutorial",
)

NUM_CLASSES = 11


def camvid(folder: str | Path, batch_size: int = 4) -> tuple[Scenes, Scenes]:
    """367 images for training, and 233 for testing, in memory; labels 0 to 10, and 255 for void.

    For training they are enlarged or shrunk by up to 2, mirrored, and changed in colour.
    """
    train, test = (read(_part(Path(folder), name), batch_size) for name in ("train", "test"))
    return replace(train, shuffle=True, scale=(0.5, 2.0), flip=True, jitter=0.4), test


def _part(folder: Path, name: str) -> Maps:
    images = CAMVID.images_in(folder / name)
    maps = CAMVID.named_files(folder / f"{name}annot", [Path(image).name for image in images], folder / name)
    values = {value: value for value in range(NUM_CLASSES)} | {NUM_CLASSES: VOID}
    return Maps(images, maps, values, compose(), CAMVID, read_map)
