"""Oxford-IIIT Pets: 7,349 photographs of cats and dogs of 37 breeds, each with a map of where the animal is."""

from __future__ import annotations

from pathlib import Path

from torch.utils.data import DataLoader

from secateur.data.decode import read_map
from secateur.data.layout import Layout
from secateur.data.maps import Maps, compose, loaders
from secateur.data.photos import Photos, photos
from secateur.data.views import Crops
from secateur.extras import import_extra

PETS = Layout(
    "Oxford-IIIT Pets",
    """\
images/
  Abyssinian_100.jpg
annotations/
  trainval.txt          lines of: Abyssinian_100 1 1 1 (name, class, species, breed)
  test.txt
  trimaps/              for segmentation only
    Abyssinian_100.png""",
    "images.tar.gz and annotations.tar.gz",
)

NUM_BREEDS = 37


def pets(folder: str | Path, batch_size: int = 64) -> tuple[Photos, Photos]:
    """The breeds: 3,680 images for training and 3,669 for testing.

    Images are resized to 256x256 and cropped to 224x224: randomly, with random flips, or in the middle.
    """
    train, test = (_listed(Path(folder), names_file, "images", ".jpg") for names_file in ("trainval.txt", "test.txt"))
    return photos(train, test, PETS, Crops(), batch_size)


def pets_segmentation(folder: str | Path, batch_size: int = 16, size: int = 128) -> tuple[DataLoader, DataLoader]:
    """The same images with maps: 0 the animal, 1 background, 2 the border between; randomly flipped for training."""
    flip = import_extra("torchvision.transforms.v2", "vision").RandomHorizontalFlip()

    def part(names_file: str, *steps: object) -> Maps:
        images, _ = _listed(Path(folder), names_file, "images", ".jpg")
        trimaps, _ = _listed(Path(folder), names_file, "annotations/trimaps", ".png")
        return Maps(images, trimaps, {1: 0, 2: 1, 3: 2}, compose(*steps), PETS, read_map, size)

    return loaders(part("trainval.txt", flip), part("test.txt"), batch_size)


def _listed(folder: Path, names_file: str, below: str, ending: str) -> tuple[list[str], list[int]]:
    """The files that a list names, and the breed of each, from 0."""
    source = folder / "annotations" / names_file
    rows = PETS.read_table(source, name=str, number=int, species=int, breed=int)
    for name, number, *_ in rows:
        if not 1 <= number <= NUM_BREEDS:
            raise PETS.damaged(source, f"class {number} for {name}", f"1 to {NUM_BREEDS}")
    files = PETS.named_files(folder / below, [f"{name}{ending}" for name, *_ in rows], source)
    return files, [number - 1 for _, number, *_ in rows]
