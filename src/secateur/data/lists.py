"""The files of a dataset: as its folders show them, and as the lists that come with it name them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path, PureWindowsPath
from typing import Any

from secateur.data.files import Layout

LARGEST = 1 << 28
"""Bytes of a list; ImageNet's have some millions."""
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")


def read_table(path: Path, layout: Layout, **columns: Callable[[str], Any]) -> list[tuple[Any, ...]]:
    """The lines of a text file, cut at white space into columns of these kinds; empty lines do not count."""
    if not path.is_file():
        raise layout.missing(path)
    if path.stat().st_size > LARGEST:
        raise layout.broken(path, f"it has {path.stat().st_size:,} bytes, more than any list ({LARGEST:,})")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise layout.broken(path, "it is not a text file") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words:
            continue
        try:
            rows.append(tuple(kind(word) for kind, word in zip(columns.values(), words, strict=True)))
        except ValueError as error:
            raise layout.broken(path, f"line {number} is {line[:80]!r}, wanted: {' '.join(columns)}") from error
    if not rows:
        raise layout.broken(path, "it is empty")
    return rows


def names_in(folder: Path) -> list[str]:
    """All that lies in a folder, in no order."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def subfolders(folder: Path, layout: Layout) -> list[str]:
    """The names of the folders in a folder, sorted; hidden ones do not count."""
    if not folder.is_dir():
        raise layout.missing(folder)
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def images_in(folder: Path, layout: Layout) -> list[str]:
    """The paths of the images in a folder, sorted; hidden files do not count."""
    if not folder.is_dir():
        raise layout.missing(folder)
    names = [name for name in names_in(folder) if name.lower().endswith(EXTENSIONS) and not name.startswith(".")]
    if not names:
        raise layout.broken(folder, f"it holds no images ({' '.join(EXTENSIONS)})")
    return [f"{folder}{os.sep}{name}" for name in sorted(names)]


def named_files(folder: Path, names: list[str], source: Path, layout: Layout) -> list[str]:
    """The paths of the files of these names below the folder; `source` is the list that names them."""
    # One look at each folder, since one at each file takes minutes where files lie across a network.
    seen: dict[str, set[str]] = {}
    for name in names:
        check_name(name, source, layout)
        place, _, file = name.rpartition("/")
        if place not in seen:
            below = folder / place
            seen[place] = set(names_in(below)) if below.is_dir() else set()
        if file not in seen[place]:
            raise layout.missing(folder / name)
    return [f"{folder}{os.sep}{name}" for name in names]


def check_name(name: str, source: Path, layout: Layout) -> None:
    """A name from a list must stay below the folder it belongs to."""
    # Windows' rules refuse all that others do: both slashes, and letters of drives.
    path = PureWindowsPath(name)
    if path.anchor or ".." in path.parts:
        raise layout.broken(source, f"{name[:80]!r} leads out of the folder")
