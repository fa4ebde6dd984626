"""PASCAL VOC 2011's segmentation, extended by the Semantic Boundaries Dataset (SBD): 20 classes and background."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from secateur.data.decode import read_map
from secateur.data.layout import Layout, names_in
from secateur.data.maps import VOID, Maps, compose, loaders
from secateur.data.matlab import read_mat
from secateur.errors import InvalidSetting

VOC2011_SBD = Layout(
    "VOC 2011 with SBD",
    """\
benchmark_RELEASE/dataset/
  train.txt                 a name on each line: 2008_000002
  val.txt
  img/
    2008_000002.jpg
  cls/
    2008_000002.mat
VOCdevkit/VOC2011/          or TrainVal/VOCdevkit/VOC2011/, or left out
  SegmentationClass/        finer label maps, taken where there is one
    2007_000032.png""",
    "SBD's benchmark.tgz and VOCtrainval_25-May-2011.tar",
)
SBD = "benchmark_RELEASE/dataset"
FINER = "VOCdevkit/VOC2011/SegmentationClass"


def voc2011_sbd(folder: str | Path, batch_size: int = 1) -> tuple[DataLoader, DataLoader]:
    """SBD's 8,498 images for training and 2,857 for testing, in full size; labels 0 to 20, and 255 for void."""
    if batch_size != 1:
        raise InvalidSetting("images of VOC differ in size, so batch_size is out of range", got=batch_size, wanted=1)
    return loaders(_part(Path(folder), "train.txt"), _part(Path(folder), "val.txt"), batch_size)


def _part(folder: Path, names_file: str) -> Maps:
    source = folder / SBD / names_file
    names = [name for (name,) in VOC2011_SBD.read_table(source, name=str)]
    images = VOC2011_SBD.named_files(folder / SBD / "img", [f"{name}.jpg" for name in names], source)
    finer = next((place for place in (FINER, f"TrainVal/{FINER}") if (folder / place).is_dir()), None)
    fine = names_in(folder / finer) if finer is not None else set()
    maps = [f"{finer}/{name}.png" if f"{name}.png" in fine else f"{SBD}/cls/{name}.mat" for name in names]
    return Maps(
        images,
        VOC2011_SBD.named_files(folder, maps, source),
        {value: value for value in (*range(21), VOID)},
        compose(),
        VOC2011_SBD,
        _read,
    )


def _read(path: str) -> Tensor:
    """A label map of VOC or SBD."""
    if path.endswith(".png"):
        return read_map(path)
    truth = read_mat(path, "GTcls")
    values = truth[0].get("Segmentation") if isinstance(truth, list) and truth else None
    if not isinstance(values, Tensor) or values.dtype != torch.uint8:
        raise ValueError("no variable GTcls with a field Segmentation of bytes")
    return values
