"""CUB-200-2011: 11,788 photographs of birds of 200 species."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from secateur.data.layout import Layout
from secateur.data.photos import Photos
from secateur.data.views import Crops

CUB200 = Layout(
    "CUB-200-2011",
    """\
CUB_200_2011/
  classes.txt               lines of: 1 001.Black_footed_Albatross
  images.txt                lines of: 1 001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg
  image_class_labels.txt    lines of: 1 1 (image, class)
  train_test_split.txt      lines of: 1 0 (image, whether it is for training)
  images/
    001.Black_footed_Albatross/
      Black_Footed_Albatross_0046_18.jpg""",
    "CUB_200_2011.tgz",
)


def cub200(folder: str | Path, batch_size: int = 64) -> tuple[Photos, Photos]:
    """5,994 images for training and 5,794 for testing.

    Images are resized to 256x256 and cropped to 224x224: randomly, with random flips, or in the middle.
    """
    folder = CUB200.find(Path(folder), "CUB_200_2011/images.txt", "images.txt").parent
    classes = CUB200.read_table(folder / "classes.txt", number=int, name=str)
    names = {i: name for i, (name,) in _by_image(folder / "images.txt", name=str).items()}
    labels = _numbers(folder / "image_class_labels.txt", names, range(1, len(classes) + 1))
    chosen = _numbers(folder / "train_test_split.txt", names, range(2))
    paths = CUB200.named_files(folder / "images", list(names.values()), folder / "images.txt")

    def part(in_training: int) -> Photos:
        images = [(i, path) for i, path in zip(names, paths, strict=True) if chosen[i] == in_training]
        if not images:
            raise CUB200.damaged(folder / "train_test_split.txt", f"no image with {in_training}")
        return Photos(
            [path for _, path in images],
            [labels[i] - 1 for i, _ in images],
            CUB200,
            Crops(random=bool(in_training)),
            batch_size,
            shuffle=bool(in_training),
        )

    return part(1), part(0)


def _by_image(path: Path, **columns: Callable[[str], Any]) -> dict[int, tuple[Any, ...]]:
    """The rest of each line by the number of the image, its first column."""
    rows = CUB200.read_table(path, image=int, **columns)
    found = {row[0]: row[1:] for row in rows}
    if len(found) < len(rows):
        raise CUB200.damaged(path, "two lines for one image")
    return found


def _numbers(path: Path, names: dict[int, str], allowed: range) -> dict[int, int]:
    """The number of every image of images.txt; the list must have no others."""
    numbers = {image: number for image, (number,) in _by_image(path, number=int).items()}
    if numbers.keys() != names.keys():
        odd = min(numbers.keys() ^ names.keys())
        raise CUB200.damaged(path, f"image {odd} in it or in images.txt, but not in both")
    for image, number in numbers.items():
        if number not in allowed:
            raise CUB200.damaged(path, f"{number} for image {image}", f"{allowed[0]} to {allowed[-1]}")
    return numbers
