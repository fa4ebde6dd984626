"""Images in a folder per class: a user's own, ImageNet, and Tiny-ImageNet; and a user's own without labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from secateur.data.layout import Layout, names_in
from secateur.data.matlab import read_mat
from secateur.data.photos import Photos, photos
from secateur.data.split import draw_share
from secateur.data.views import Crops
from secateur.errors import InvalidSetting
from secateur.words import counted

CLASS_FOLDERS = Layout(
    "class folders",
    """\
train/
  cat/        a folder for each class, of any name
    1.jpg     and other images: .jpeg .png .bmp .webp .ppm .gif .tif .tiff
  dog/
val/          or test/; the same classes, or some of them
  cat/
  dog/
cat/          or, without train and val, the folders of the classes alone:
dog/          a fifth of each class, which a seed decides, is for testing""",
    "your own images",
    "Replace or remove it",
)

IMAGES = Layout(
    "images without labels",
    """\
1.jpg           images: .jpg .jpeg .png .bmp .webp .ppm .gif .tif .tiff
monday/         and folders of images, to any depth
  camera_1/
    2.png""",
    "your own images",
    "Replace or remove it",
)

IMAGENET = Layout(
    "ImageNet",
    """\
train/
  n01440764/                                    a folder for each class
    n01440764_10026.JPEG
val/
  n01440764/                                    the same classes,
    ILSVRC2012_val_00000293.JPEG
  ILSVRC2012_val_00000001.JPEG                  or all in one folder, and then also
ILSVRC2012_devkit_t12/data/
  ILSVRC2012_validation_ground_truth.txt        the number of the class of each
  meta.mat                                      the name of the class of each number""",
    "ILSVRC2012_img_train.tar and the archives in it, ILSVRC2012_img_val.tar, ILSVRC2012_devkit_t12.tar.gz",
)

TINY_IMAGENET = Layout(
    "Tiny-ImageNet",
    """\
tiny-imagenet-200/
  wnids.txt                       a class on each line: n02124075
  train/
    n02124075/
      images/
        n02124075_0.JPEG
  val/
    val_annotations.txt           lines of: val_0.JPEG n02124075 0 32 44 62
    images/
      val_0.JPEG""",
    "tiny-imagenet-200.zip",
)


def class_folders(folder: str | Path, batch_size: int = 64, size: int = 224) -> tuple[Photos, Photos]:
    """A user's own images; classes are numbered in the order of their names."""
    folder, crops = Path(folder), _crops(size)
    if not names_in(folder).isdisjoint(("train", "val", "test")):
        classes = _classes(folder / "train", CLASS_FOLDERS)
        train = _labelled(((folder / "train" / name, i) for i, name in enumerate(classes)), CLASS_FOLDERS)
        test = _test_folders(CLASS_FOLDERS.find(folder, "val", "test"), classes, CLASS_FOLDERS)
        parts = photos(train, test, CLASS_FOLDERS, crops, batch_size)
    else:
        classes = _classes(folder, CLASS_FOLDERS)
        if len(classes) == 1:
            raise CLASS_FOLDERS.damaged(folder, f"one folder, {classes[0]}", "a folder for each of two classes or more")
        paths, targets = _labelled(((folder / name, i) for i, name in enumerate(classes)), CLASS_FOLDERS)
        for number, name in enumerate(classes):
            if targets.count(number) == 1:
                raise CLASS_FOLDERS.damaged(folder / name, "one image", "two or more, one of them to test on")
        every = Photos(paths, targets, CLASS_FOLDERS, replace(crops, random=True), batch_size, shuffle=True)
        parts = every.parted(draw_share(paths, targets))
    train, test = (replace(part, classes=classes) for part in parts)
    return train, test


def images(folder: str | Path, batch_size: int = 64, size: int = 224) -> tuple[Photos, Photos]:
    """A user's own images without labels: the same ones shuffled, and in the order of their paths.

    They are resized to 8/7 of that size, 256x256 for 224, and cropped to the middle.
    """
    found = Photos(IMAGES.images_below(Path(folder)), None, IMAGES, _crops(size), batch_size)
    return replace(found, shuffle=True), found


def imagenet(folder: str | Path, batch_size: int = 256) -> tuple[Photos, Photos]:
    """1.28 million images for training and 50,000 for testing; classes are numbered in the order of their names.

    Images are resized to 256x256 and cropped to 224x224: randomly, with random flips, or in the middle.
    """
    folder = Path(folder)
    classes = _classes(folder / "train", IMAGENET)
    train = _labelled(((folder / "train" / name, i) for i, name in enumerate(classes)), IMAGENET)
    if IMAGENET.subfolders(folder / "val"):
        test = _test_folders(folder / "val", classes, IMAGENET)
    else:
        test = _flat_validation(folder, classes)
    return photos(train, test, IMAGENET, Crops(), batch_size)


def tiny_imagenet(folder: str | Path, batch_size: int = 128) -> tuple[Photos, Photos]:
    """100,000 images for training and 10,000 for testing; classes are numbered in the order of their names.

    They keep their 64x64 pixels; for training they are shifted by up to 4 pixels and randomly flipped.
    """
    names = TINY_IMAGENET.find(Path(folder), "tiny-imagenet-200/wnids.txt", "wnids.txt")
    classes = sorted(name for (name,) in TINY_IMAGENET.read_table(names, wnid=str))
    for name in classes:
        TINY_IMAGENET.check_name(name, names)
    folder = names.parent
    train = _labelled(((folder / "train" / name / "images", i) for i, name in enumerate(classes)), TINY_IMAGENET)
    test = _annotated(folder / "val", classes)
    return photos(train, test, TINY_IMAGENET, Crops(64, 64, padding=4), batch_size)


def _crops(size: int) -> Crops:
    if size < 1:
        raise InvalidSetting("the size of images is out of range", got=size, wanted="1 pixel or more")
    return Crops(size, round(size * 256 / 224))


def _classes(folder: Path, layout: Layout) -> list[str]:
    classes = layout.subfolders(folder)
    if not classes:
        raise layout.damaged(folder, "no folders", "a folder for each class")
    return classes


def _labelled(folders: Iterable[tuple[Path, int]], layout: Layout) -> tuple[list[str], list[int]]:
    """The images in these folders, and the number of the class of each."""
    paths: list[str] = []
    targets: list[int] = []
    for folder, number in folders:
        images = layout.images_in(folder)
        paths += images
        targets += [number] * len(images)
    return paths, targets


def _test_folders(folder: Path, classes: list[str], layout: Layout) -> tuple[list[str], list[int]]:
    numbers = {name: i for i, name in enumerate(classes)}
    names = _classes(folder, layout)
    for name in names:
        if name not in numbers:
            raise layout.damaged(folder / name, f"class {name!r}", "classes of train")
    return _labelled(((folder / name, numbers[name]) for name in names), layout)


def _flat_validation(folder: Path, classes: list[str]) -> tuple[list[str], list[int]]:
    """ImageNet's validation images in one folder, with classes from the development kit."""
    data = folder / "ILSVRC2012_devkit_t12" / "data"
    source = data / "ILSVRC2012_validation_ground_truth.txt"
    truth = [number for (number,) in IMAGENET.read_table(source, number=int)]
    images = IMAGENET.images_in(folder / "val")
    if len(images) != len(truth):
        raise IMAGENET.damaged(source, counted(len(truth), "line"), counted(len(images), "image"))
    names = [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, len(truth) + 1)]
    paths = IMAGENET.named_files(folder / "val", names, source)
    places = {name: i for i, name in enumerate(classes)}
    numbers = {number: places[name] for number, name in _class_names(data / "meta.mat").items() if name in places}
    for number in truth:
        if number not in numbers:
            raise IMAGENET.damaged(source, f"class {number}", "classes that are in both meta.mat and train")
    return paths, [numbers[number] for number in truth]


def _class_names(path: Path) -> dict[int, str]:
    """The name of each class by its number in the development kit; classes of classes are among them."""
    with IMAGENET.reading(str(path)):
        return {int(synset["ILSVRC2012_ID"]): synset["WNID"] for synset in read_mat(path, "synsets")}


def _annotated(folder: Path, classes: list[str]) -> tuple[list[str], list[int]]:
    """Tiny-ImageNet's test images, with classes from a list, whose boxes are not needed."""
    source = folder / "val_annotations.txt"
    rows = TINY_IMAGENET.read_table(source, file=str, wnid=str, left=int, top=int, right=int, bottom=int)
    numbers = {name: i for i, name in enumerate(classes)}
    for _, name, *_ in rows:
        if name not in numbers:
            raise TINY_IMAGENET.damaged(source, repr(name), "classes of wnids.txt")
    paths = TINY_IMAGENET.named_files(folder / "images", [file for file, *_ in rows], source)
    return paths, [numbers[name] for _, name, *_ in rows]
