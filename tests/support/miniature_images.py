"""Small datasets of image files, in the formats of the real ones. Each class has a colour that networks can learn.

Every function writes below `folder`; sizes are width and height.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat
from scipy.sparse import csc_matrix
from torch import Tensor
from torch.utils.data import DataLoader

from secateur.data.maps import Maps
from secateur.data.photos import Photos

Size = tuple[int, int]

COLOURS = [(220, 40, 40), (40, 200, 60), (50, 70, 220), (220, 200, 40), (200, 60, 210), (40, 200, 210), (130, 90, 40)]
DEVKIT = "ILSVRC2012_devkit_t12/data"


def dataset_of(batches: Photos | DataLoader) -> Any:
    """The images that batches are made of, with paths and targets, and each by its index."""
    if isinstance(batches, Photos):
        return OneByOne(batches)
    assert isinstance(batches.dataset, Maps)
    return batches.dataset


class OneByOne:
    """Photographs as a dataset; random views are drawn from torch's global random numbers."""

    def __init__(self, photos: Photos) -> None:
        self.photos, self.paths, self.targets = photos, photos.paths, photos.targets

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        lists = {name: getattr(self.photos, name) for name in ("paths", "targets")}
        one = replace(self.photos, **{name: items and [items[index]] for name, items in lists.items()})
        ((images, labels),) = one
        return images[0], int(labels)


def write_class_folders(
    folder: Path,
    num_classes: int = 3,
    per_class: int = 8,
    size: Size = (40, 32),
    seed: int = 0,
    parts: tuple[str, str] = ("train", "val"),
) -> None:
    """Half as many images for testing as for training, or one."""
    random = np.random.default_rng(seed)
    for part, count in zip(parts, (per_class, max(1, per_class // 2)), strict=True):
        for label in range(num_classes):
            for index in range(count):
                save(folder / part / f"class_{label}" / f"{index}.jpg", picture(label, size, random))


def write_imagenet(
    folder: Path,
    num_classes: int = 3,
    per_class: int = 8,
    size: Size = (40, 32),
    seed: int = 0,
    devkit: bool = False,
) -> None:
    """Validation in a folder per class; with `devkit` in one folder, beside the development kit."""
    random = np.random.default_rng(seed)
    names = [f"n{1440764 + 17 * label:08d}" for label in range(num_classes)]
    for label, name in enumerate(names):
        for index in range(per_class):
            save(folder / "train" / name / f"{name}_{index}.JPEG", picture(label, size, random))
    truth = random.permutation(np.repeat(np.arange(num_classes), max(1, per_class // 2)))
    for number, label in enumerate(truth, start=1):
        place = folder / "val" if devkit else folder / "val" / names[label]
        save(place / f"ILSVRC2012_val_{number:08d}.JPEG", picture(label, size, random))
    if devkit:
        # The kit's numbers run against the order of the names.
        numbers = {label: num_classes - label for label in range(num_classes)}
        synsets = [
            synset(numbers[label], names[label], children=[]) for label in sorted(numbers, key=numbers.__getitem__)
        ]
        synsets.append(synset(num_classes + 1, "n00001740", children=list(numbers.values())))
        (folder / DEVKIT).mkdir(parents=True, exist_ok=True)
        savemat(folder / DEVKIT / "meta.mat", {"synsets": records(synsets)[:, None]})
        write_lines(folder / DEVKIT / "ILSVRC2012_validation_ground_truth.txt", [numbers[label] for label in truth])


def write_tiny_imagenet(folder: Path, num_classes: int = 3, per_class: int = 8, seed: int = 0) -> None:
    random, below = np.random.default_rng(seed), folder / "tiny-imagenet-200"
    names = [f"n{2124075 + 31 * label:08d}" for label in range(num_classes)]
    for label, name in enumerate(names):
        for index in range(per_class):
            save(below / "train" / name / "images" / f"{name}_{index}.JPEG", picture(label, (64, 64), random))
    truth = random.permutation(np.repeat(np.arange(num_classes), max(1, per_class // 2)))
    for index, label in enumerate(truth):
        save(below / "val/images" / f"val_{index}.JPEG", picture(label, (64, 64), random))
    lines = [f"val_{index}.JPEG\t{names[label]}\t0\t32\t44\t62" for index, label in enumerate(truth)]
    write_lines(below / "val/val_annotations.txt", lines)
    # The real list is not sorted either.
    write_lines(below / "wnids.txt", names[::-1])
    write_lines(below / "words.txt", [f"{name}\tthing" for name in names])


def write_cub200(folder: Path, num_classes: int = 3, per_class: int = 8, size: Size = (40, 32), seed: int = 0) -> None:
    """Of each class half the images are for training."""
    random, below = np.random.default_rng(seed), folder / "CUB_200_2011"
    images, labels, split = [], [], []
    for label in range(num_classes):
        for index in range(per_class):
            name = f"{label + 1:03d}.Bird_{label}/Bird_{label}_{index:04d}.jpg"
            save(below / "images" / name, picture(label, size, random))
            number = len(images) + 1
            images.append(f"{number} {name}")
            labels.append(f"{number} {label + 1}")
            split.append(f"{number} {(index + 1) % 2}")
    write_lines(below / "images.txt", images)
    write_lines(below / "image_class_labels.txt", labels)
    write_lines(below / "train_test_split.txt", split)
    write_lines(below / "classes.txt", [f"{label + 1} {label + 1:03d}.Bird_{label}" for label in range(num_classes)])


def write_pets(folder: Path, num_classes: int = 3, per_class: int = 8, size: Size = (40, 32), seed: int = 0) -> None:
    """Of each class half the images are for training; the animal is a disc."""
    random = np.random.default_rng(seed)
    lists: dict[str, list[str]] = {"trainval": [], "test": []}
    for label in range(num_classes):
        for index in range(per_class):
            name = f"Breed_{label}_{index}"
            distance = from_middle(size)
            trimap = np.select([distance < 0.6, distance < 0.7], [1, 3], 2).astype(np.uint8)
            animal, ground = picture(label, size, random), picture(6, size, random)
            save(folder / "images" / f"{name}.jpg", np.where(trimap[:, :, None] == 2, ground, animal))
            save(folder / "annotations/trimaps" / f"{name}.png", trimap)
            lists[("trainval", "test")[index % 2]].append(f"{name} {label + 1} 1 {label + 1}")
    for part, lines in lists.items():
        write_lines(folder / "annotations" / f"{part}.txt", lines)


def write_camvid(folder: Path, num_images: int = 8, size: Size = (64, 32), seed: int = 0) -> None:
    """The upper half of each image is of one class, the lower of another; a line of void lies between."""
    random = np.random.default_rng(seed)
    middle = size[1] // 2
    for part in ("train", "val", "test"):
        for index in range(num_images):
            upper, lower = random.choice(6, 2, replace=False)
            pixels, labels = picture(upper, size, random), np.full(size[::-1], upper, np.uint8)
            pixels[middle:], labels[middle:] = picture(lower, (size[0], size[1] - middle), random), lower
            labels[middle] = 11
            save(folder / part / f"0001TP_{index:06d}.png", pixels)
            save(folder / f"{part}annot" / f"0001TP_{index:06d}.png", labels)


def write_voc2011_sbd(
    folder: Path, num_images: int = 8, size: Size = (40, 32), seed: int = 0, finer: bool = True
) -> None:
    """Discs of classes 1 to 5 on background, in sizes that differ; with `finer` every other has a map of VOC's."""
    random = np.random.default_rng(seed)
    below = folder / "benchmark_RELEASE/dataset"
    for part in ("train", "val"):
        names = [f"{2007 + (part == 'val')}_{index:06d}" for index in range(num_images)]
        write_lines(below / f"{part}.txt", names)
        for index, name in enumerate(names):
            place = (size[0] + index % 3, size[1] + index % 2)
            label, distance = int(random.integers(1, 6)), from_middle(place)
            labels = np.where(distance < 0.7, label, 0).astype(np.uint8)
            disc, ground = picture(label, place, random), picture(6, place, random)
            save(below / "img" / f"{name}.jpg", np.where(labels[:, :, None] > 0, disc, ground))
            write_sbd_map(below / "cls" / f"{name}.mat", labels)
            if finer and index % 2:
                labels[(distance >= 0.6) & (distance < 0.7)] = 255
                write_voc_map(folder / "VOCdevkit/VOC2011/SegmentationClass" / f"{name}.png", labels)


def write_sbd_map(path: Path, labels: np.ndarray) -> None:
    """A struct of the label map, the boundaries of each of 20 classes, and the classes that are present."""
    boundaries = np.empty((20, 1), dtype=object)
    for index in range(20):
        boundaries[index, 0] = csc_matrix(labels == index + 1)
    present = np.setdiff1d(labels, [0, 255])[:, None]
    path.parent.mkdir(parents=True, exist_ok=True)
    truth = {"Boundaries": boundaries, "Segmentation": labels, "CategoriesPresent": present}
    savemat(path, {"GTcls": truth}, do_compression=True)


def write_voc_map(path: Path, labels: np.ndarray) -> None:
    """A PNG whose values are places in a palette."""
    image = Image.frombytes("P", labels.shape[::-1], labels.tobytes())
    image.putpalette([(37 * value + 59 * colour) % 256 for value in range(256) for colour in range(3)])
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def picture(label: int, size: Size, random: np.random.Generator) -> np.ndarray:
    """Noise around the colour of the class."""
    width, height = size
    noise = random.normal(0, 20, (height, width, 3))
    return (np.array(COLOURS[label % len(COLOURS)]) + noise).clip(0, 255).astype(np.uint8)


def from_middle(size: Size) -> np.ndarray:
    """The distance of each pixel from the middle; 1 at the borders."""
    width, height = size
    rows, columns = np.mgrid[0:height, 0:width]
    return np.hypot((2 * rows + 1) / height - 1, (2 * columns + 1) / width - 1)


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"format": "PNG"} if path.suffix == ".png" else {"format": "JPEG", "quality": 95}
    Image.fromarray(pixels).save(path, **options)


def write_lines(path: Path, lines: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def synset(number: int, name: str, children: list[int]) -> dict[str, Any]:
    """An entry of the development kit's meta.mat."""
    return {
        "ILSVRC2012_ID": float(number),
        "WNID": name,
        "words": "thing, object",
        "gloss": "something to look at",
        "num_children": float(len(children)),
        "children": np.array(children, dtype=float),
        "wordnet_height": float(bool(children)),
        "num_train_images": 0.0 if children else 1300.0,
    }


def records(entries: list[dict[str, Any]]) -> np.ndarray:
    """A struct array of MATLAB's."""
    array = np.empty(len(entries), dtype=[(name, object) for name in entries[0]])
    for index, entry in enumerate(entries):
        array[index] = tuple(entry.values())
    return array
