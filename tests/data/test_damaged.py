"""Folders of images with something missing or damaged: the error names the file, what is in it, and the layout."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from miniature_images import (
    DEVKIT,
    records,
    save,
    synset,
    write_camvid,
    write_class_folders,
    write_cub200,
    write_imagenet,
    write_pets,
    write_tiny_imagenet,
    write_voc2011_sbd,
)
from scipy.io import savemat

from secateur.data.camvid import CAMVID, camvid
from secateur.data.cub import CUB200, cub200
from secateur.data.folders import CLASS_FOLDERS, IMAGENET, TINY_IMAGENET, class_folders, imagenet, tiny_imagenet
from secateur.data.maps import Maps
from secateur.data.pets import PETS, pets, pets_segmentation
from secateur.data.voc import VOC2011_SBD, voc2011_sbd
from secateur.errors import InvalidData

DATASETS: dict[str, tuple[Any, Callable[[Path], object], Any]] = {
    "class_folders": (CLASS_FOLDERS, lambda folder: write_class_folders(folder, per_class=1), class_folders),
    "imagenet": (IMAGENET, lambda folder: write_imagenet(folder, devkit=True), imagenet),
    "tiny_imagenet": (TINY_IMAGENET, write_tiny_imagenet, tiny_imagenet),
    "cub200": (CUB200, write_cub200, cub200),
    "pets": (PETS, lambda folder: write_pets(folder, 1, 2), pets),
    "pets_segmentation": (PETS, lambda folder: write_pets(folder, 1, 2), lambda f: pets_segmentation(f, size=8)),
    "camvid": (CAMVID, lambda folder: write_camvid(folder, 2), camvid),
    "voc": (VOC2011_SBD, lambda folder: write_voc2011_sbd(folder, 2, finer=False), voc2011_sbd),
    "fine voc": (VOC2011_SBD, lambda folder: write_voc2011_sbd(folder, 2), voc2011_sbd),
}
"""The layout, what writes a small one, and what reads it."""


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes each dataset once."""
    folder = tmp_path_factory.mktemp("originals")

    def find(name: str) -> Path:
        if not (folder / name).exists():
            DATASETS[name][1](folder / name)
        return folder / name

    return find


def grey(value: int, height: int = 32, width: int = 64) -> np.ndarray:
    return np.full((height, width), value, np.uint8)


def truth(*numbers: int) -> str:
    return "".join(f"{number}\n" for number in numbers)


def sbd(segmentation: Any) -> dict[str, Any]:
    return {"GTcls": {"Segmentation": segmentation}}


GROUND_TRUTH = f"{DEVKIT}/ILSVRC2012_validation_ground_truth.txt"
META = f"{DEVKIT}/meta.mat"
ANNOTATIONS = "tiny-imagenet-200/val/val_annotations.txt"
CUB = "CUB_200_2011/"
ONE = "1 001.Bird_0/Bird_0_0000.jpg"
SBD = "benchmark_RELEASE/dataset/"
MAT, PNG = f"{SBD}cls/2007_000000.mat", "VOCdevkit/VOC2011/SegmentationClass/2007_000001.png"
NO_FIELD = "a field Segmentation of bytes"
MATLAB = b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM"
MISSING = None
EMPTY = "an empty file"

# The dataset, the file that is removed (None), replaced, or of which the first line is ([line]); and what the error
# says was got, or MISSING; at last the file that it names, if it is another one.
CASES: list[tuple[Any, ...]] = [
    ("class_folders", "train", None, MISSING),
    ("class_folders", "val", None, MISSING),
    ("class_folders", "train/class_9", {}, "no images"),
    ("class_folders", "val/class_9", {}, "class 'class_9'"),
    ("class_folders", "train", {}, "no folders"),
    ("class_folders", "val", {}, "no folders"),
    ("imagenet", GROUND_TRUTH, truth(*[1] * 11), "11 lines"),
    ("imagenet", GROUND_TRUTH, truth(*[1] * 11, 9), "class 9"),
    ("imagenet", GROUND_TRUTH, truth(*[1] * 11, 4), "class 4"),  # the root of the kit's tree
    ("imagenet", GROUND_TRUTH, "1\nn0144\n", "'n0144' in line 2"),
    ("imagenet", GROUND_TRUTH, "\n\n", EMPTY),
    ("imagenet", GROUND_TRUTH, None, MISSING),
    ("imagenet", META, None, MISSING),
    ("imagenet", META, b"x" * 200, "no header of MATLAB"),
    ("imagenet", META, {"words": 1}, "no variable synsets"),
    ("imagenet", META, {"synsets": "n0144"}, "TypeError"),
    ("imagenet", META, {"synsets": records([synset(1, "n1", [])])}, "class 1", GROUND_TRUTH),
    ("imagenet", "val", {}, "no images"),
    ("imagenet", "val/ILSVRC2012_val_00000002.JPEG", Path("2.JPEG"), MISSING),
    ("tiny_imagenet", "tiny-imagenet-200/wnids.txt", None, MISSING),
    ("tiny_imagenet", "tiny-imagenet-200/wnids.txt", "", EMPTY),
    ("tiny_imagenet", "tiny-imagenet-200/wnids.txt", "n02124075\n../../secret\n", "'../../secret'"),
    ("tiny_imagenet", "tiny-imagenet-200/wnids.txt", "n02124075\nn9\n", MISSING, "train/n9/images"),
    ("tiny_imagenet", "tiny-imagenet-200/wnids.txt", "n02124075\nn02124106\n", "'n02124137'", ANNOTATIONS),
    ("tiny_imagenet", ANNOTATIONS, None, MISSING),
    ("tiny_imagenet", ANNOTATIONS, "val_0.JPEG n02124075\n", "'val_0.JPEG n02124075' in line 1"),
    ("tiny_imagenet", ANNOTATIONS, "val_99.JPEG n02124075 0 0 1 1\n", MISSING, "val/images/val_99.JPEG"),
    ("tiny_imagenet", ANNOTATIONS, "/etc/passwd n02124075 0 0 1 1\n", "'/etc/passwd'"),
    ("tiny_imagenet", ANNOTATIONS, "C:\\x.JPEG n02124075 0 0 1 1\n", "x.JPEG'"),
    ("tiny_imagenet", ANNOTATIONS, b"\xff\xfe\x00", "bytes"),
    *(("cub200", f"{CUB}{file}.txt", "\n", EMPTY) for file in ("images", "image_class_labels", "classes")),
    *(("cub200", f"{CUB}{file}.txt", None, MISSING) for file in ("images", "train_test_split")),
    ("cub200", f"{CUB}images.txt", [f"{ONE}\n{ONE}"], "two lines for one image"),
    ("cub200", f"{CUB}images.txt", ["1"], "'1' in line 1"),
    ("cub200", f"{CUB}images.txt", ["one 001.Bird_0/Bird_0_0000.jpg"], "in line 1"),
    ("cub200", f"{CUB}images.txt", ["1 001.Bird_0/../../x.jpg"], "'001.Bird_0/../../x.jpg'"),
    ("cub200", f"{CUB}images.txt", ["1 /etc/passwd"], "'/etc/passwd'"),
    ("cub200", f"{CUB}images.txt", [r"1 ..\..\x.jpg"], "x.jpg'"),
    ("cub200", f"{CUB}images.txt", ["1 001.Bird_0/x\0.jpg"], MISSING, "images/001.Bird_0/x"),
    ("cub200", f"{CUB}images.txt", ["1 x\0y/x.jpg"], MISSING, "images/x"),
    ("cub200", f"{CUB}images.txt", ["1 001.Bird_0/Bird_0_9999.jpg"], MISSING, "001.Bird_0/Bird_0_9999.jpg"),
    ("cub200", f"{CUB}images.txt", ["1 009.Bird_8/Bird_8_0000.jpg"], MISSING, "009.Bird_8/Bird_8_0000.jpg"),
    ("cub200", f"{CUB}images.txt", [f"99 {ONE[2:]}"], "image 1 in it or in images.txt", "image_class_labels.txt"),
    ("cub200", f"{CUB}image_class_labels.txt", ["99 1"], "image 1 in it or in images.txt"),
    ("cub200", f"{CUB}image_class_labels.txt", ["1 0"], "0 for image 1"),
    ("cub200", f"{CUB}image_class_labels.txt", ["1 4"], "4 for image 1"),
    ("cub200", f"{CUB}train_test_split.txt", ["1 2"], "2 for image 1"),
    ("cub200", f"{CUB}train_test_split.txt", ["1 1\n99 1"], "image 99 in it or in images.txt"),
    *(
        ("cub200", f"{CUB}train_test_split.txt", "".join(f"{i} {mark}\n" for i in range(1, 25)), "no image with")
        for mark in (0, 1)
    ),
    ("pets", "annotations/trainval.txt", "Breed_0_0 0 1 1\n", "class 0 for Breed_0_0"),
    ("pets", "annotations/test.txt", "Breed_0_1 38 1 1\n", "class 38 for Breed_0_1"),
    ("pets_segmentation", "annotations/test.txt", "Breed_0_1 1\n", "'Breed_0_1 1' in line 1"),
    ("pets", "annotations/test.txt", "Breed_0_99 1 1 1\n", MISSING, "images/Breed_0_99.jpg"),
    ("pets", "annotations/test.txt", "../x 1 1 1\n", "'../x.jpg'"),
    ("pets", "annotations/test.txt", 1 << 34, "17,179,869,184 bytes"),
    ("pets", "annotations/trainval.txt", None, MISSING),
    ("pets_segmentation", "annotations/trimaps/Breed_0_0.png", grey(0, 32, 40), "the value 0"),
    ("pets_segmentation", "annotations/trimaps/Breed_0_0.png", grey(1, 32, 41), "41x32 pixels"),
    ("pets_segmentation", "annotations/trimaps/Breed_0_0.png", None, MISSING),
    ("camvid", "train", None, MISSING),
    ("camvid", "test", {}, "no images"),
    ("camvid", "testannot", None, MISSING, "testannot/0001TP_000000.png"),
    ("camvid", "trainannot/0001TP_000001.png", None, MISSING),
    ("camvid", "testannot/0001TP_000000.png", grey(12), "the value 12"),
    ("camvid", "testannot/0001TP_000000.png", grey(255), "the value 255"),
    ("camvid", "testannot/0001TP_000000.png", grey(0, 64, 32), "32x64 pixels"),
    ("camvid", "testannot/0001TP_000000.png", np.zeros((32, 64, 3), np.uint8), "an image of mode RGB"),
    ("voc", f"{SBD}train.txt", "2007_000000\n2009_000001\n", MISSING, "img/2009_000001.jpg"),
    ("voc", f"{SBD}train.txt", "../../../secret\n", "'../../../secret.jpg'"),
    ("voc", f"{SBD}train.txt", "/etc/passwd\n", "'/etc/passwd.jpg'"),
    ("voc", f"{SBD}train.txt", "2007_000000 1\n", "'2007_000000 1' in line 1"),
    ("voc", f"{SBD}train.txt", None, MISSING),
    ("voc", MAT, None, MISSING),
    ("voc", MAT, sbd(grey(21, 32, 40)), "the value 21"),
    ("voc", MAT, sbd(grey(254, 32, 40)), "the value 254"),
    ("voc", MAT, sbd(grey(0, 40, 32)), "32x40 pixels"),
    ("voc", MAT, sbd(np.zeros((32, 40, 3), np.uint8)), "3x40x32 pixels"),
    *(("voc", MAT, sbd(x), NO_FIELD) for x in (np.zeros((32, 40)), np.full((32, 40), "x", object), "text")),
    *(("voc", MAT, {"GTcls": x}, NO_FIELD) for x in ({"Boundaries": grey(0)}, grey(0), "text")),
    ("voc", MAT, {"GTinst": grey(0)}, "no variable GTcls"),
    ("voc", MAT, b"", "no header of MATLAB"),
    ("voc", MAT, bytes(400), "no header of MATLAB"),
    ("voc", MAT, MATLAB + bytes(2**24), "16,777,344 bytes"),
    *(("voc", MAT, kept, "") for kept in (range(100), range(200), range(300), range(400))),
    ("fine voc", PNG, range(200), "Truncated File Read"),
    ("fine voc", PNG, np.zeros((33, 41, 3), np.uint8), "an image of mode RGB"),
]


def change(path: Path, content: Any) -> None:
    """Damage a file or folder as a row of the table says."""
    before = path.read_bytes() if path.is_file() else b""
    if path.is_dir():
        shutil.rmtree(path)
    elif isinstance(content, Path):
        path.rename(path.with_name(content.name))
    else:
        path.unlink(missing_ok=True)
    match content:
        case None | Path():
            pass
        case {}:
            path.mkdir() if not content else savemat(path, content)
        case [line]:
            path.write_text("\n".join([line, *before.decode().splitlines()[1:]]))
        case range():
            path.write_bytes(before[: len(content)])
        case int():
            with path.open("wb") as file:
                file.truncate(content)  # the disk holds nothing of it
        case np.ndarray():
            save(path, content)
        case _:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def read_all(read: Callable[[Path], Any], folder: Path) -> None:
    for loader in read(folder):
        if isinstance(getattr(loader, "dataset", None), Maps):
            list(loader)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[3]}")
def test_what_is_missing_or_damaged_is_named(
    case: tuple[Any, ...], originals: Callable[[str], Path], tmp_path: Path
) -> None:
    dataset, file, content, got, *other = case
    layout, _, read = DATASETS[dataset]
    folder = shutil.copytree(originals(dataset), tmp_path / "data")
    change(folder / file, content)
    with pytest.raises(InvalidData) as caught:
        read_all(read, folder)
    error = caught.value
    assert error.what.startswith(f"{layout.name}: ")
    assert (other or [file])[0] in error.what
    assert error.remedy == (str(layout) if got is MISSING else f"{layout.remedy}. {layout}")
    assert (error.got is None) == (got is MISSING)
    assert got is MISSING or got in str(error.got)


def test_what_is_not_used_may_be_missing(originals: Callable[[str], Path], tmp_path: Path) -> None:
    for dataset, file, read in (
        ("pets", "annotations/trimaps/Breed_0_0.png", pets),
        ("fine voc", f"{SBD}cls/2007_000001.mat", voc2011_sbd),
    ):
        folder = shutil.copytree(originals(dataset), tmp_path / dataset)
        (folder / file).unlink()
        read(folder)
