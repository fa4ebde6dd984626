"""CamVid: frames of a drive through Cambridge, with a class for every pixel, as the tutorial of SegNet has them."""

from __future__ import annotations

from pathlib import Path

from torch.utils.data import DataLoader

from secateur.data.decode import read_map
from secateur.data.layout import Layout
from secateur.data.maps import VOID, Maps, compose, loaders
from secateur.extras import import_extra

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


def camvid(folder: str | Path, batch_size: int = 4) -> tuple[DataLoader, DataLoader]:
    """367 images for training, randomly flipped, and 233 for testing; labels 0 to 10, and 255 for void."""
    flip = import_extra("torchvision.transforms.v2", "vision").RandomHorizontalFlip()
    return loaders(_part(Path(folder), "train", flip), _part(Path(folder), "test"), batch_size)


def _part(folder: Path, name: str, *steps: object) -> Maps:
    images = CAMVID.images_in(folder / name)
    maps = CAMVID.named_files(folder / f"{name}annot", [Path(image).name for image in images], folder / name)
    values = {value: value for value in range(NUM_CLASSES)} | {NUM_CLASSES: VOID}
    return Maps(images, maps, values, compose(*steps), CAMVID, read_map)
