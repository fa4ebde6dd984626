"""A dataset's folder: how it looks, the files in it, and the errors for those that are missing or damaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from textwrap import indent
from typing import Any

from secateur.errors import InvalidData

LARGEST_LIST = 1 << 28
"""Bytes of a text file; those of ImageNet have some millions."""
EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")


@dataclass(frozen=True)
class Layout:
    """How a dataset's folder looks."""

    name: str
    """Of the dataset."""
    tree: str
    """The folder, drawn as a tree, with what the files hold."""
    source: str
    """The archives it is made from."""
    remedy: str = "Unpack it again"
    """What to do about a damaged file."""

    def __str__(self) -> str:
        return f"The folder of {self.name} ({self.source}) looks like this:\n{indent(self.tree, '  ')}"

    def missing(self, path: Path) -> InvalidData:
        """The error for a file or folder that is not there."""
        return InvalidData(f"{self.name}: there is no {path}", remedy=str(self))

    def damaged(self, path: str | Path, got: str, wanted: str | None = None) -> InvalidData:
        """The error for a file that is there and cannot be used."""
        return InvalidData(f"{self.name}: {path} is damaged", got=got, wanted=wanted, remedy=f"{self.remedy}. {self}")

    @contextmanager
    def reading(self, path: str | Path) -> Iterator[None]:
        """Turn any error of reading a file into one that names it."""
        try:
            yield
        except InvalidData:
            raise
        except FileNotFoundError:
            raise self.missing(Path(path)) from None
        except (OSError, ValueError, EOFError) as error:
            raise self.damaged(path, str(error)) from error
        except Exception as error:  # decoders raise errors of many types
            raise self.damaged(path, repr(error)) from error

    def find(self, folder: Path, *names: str) -> Path:
        """The first of these files or folders that exists below the folder."""
        for name in names:
            if (folder / name).exists():
                return folder / name
        raise self.missing(folder / names[0])

    def read_bytes(self, path: Path, largest: int) -> bytes:
        """The content of a file of at most so many bytes."""
        if not path.is_file():
            raise self.missing(path)
        if (size := path.stat().st_size) > largest:
            raise self.damaged(path, f"{size:,} bytes", f"{largest:,} at most")
        return path.read_bytes()

    def read_table(self, path: Path, **columns: Callable[[str], Any]) -> list[tuple[Any, ...]]:
        """The lines of a text file, split at white space into columns of these types; empty lines do not count."""
        try:
            lines = self.read_bytes(path, LARGEST_LIST).decode().split("\n")
        except UnicodeDecodeError as error:
            raise self.damaged(path, "bytes", "text") from error
        rows = []
        for number, line in enumerate(lines, start=1):
            words = line.split()
            if not words:
                continue
            try:
                rows.append(tuple(kind(word) for kind, word in zip(columns.values(), words, strict=True)))
            except ValueError as error:
                raise self.damaged(path, f"{line[:80]!r} in line {number}", " ".join(columns)) from error
        if not rows:
            raise self.damaged(path, "an empty file")
        return rows

    def subfolders(self, folder: Path) -> list[str]:
        """The names of the folders in a folder, sorted; hidden ones do not count."""
        if not folder.is_dir():
            raise self.missing(folder)
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".") and path.is_dir())

    def images_in(self, folder: Path) -> list[str]:
        """The paths of the images in a folder, sorted; hidden files do not count."""
        if not folder.is_dir():
            raise self.missing(folder)
        names = _images_among(names_in(folder))
        if not names:
            raise self.damaged(folder, "no images", " ".join(EXTENSIONS))
        return [f"{folder}{os.sep}{name}" for name in sorted(names)]

    def images_below(self, folder: Path) -> list[str]:
        """The same at any depth; neither hidden folders nor links to folders are entered."""
        if not folder.is_dir():
            raise self.missing(folder)
        found: list[str] = []
        for place, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [f"{place}{os.sep}{name}" for name in _images_among(files)]
        if not found:
            raise self.damaged(folder, "no images", " ".join(EXTENSIONS))
        return sorted(found)

    def named_files(self, folder: Path, names: list[str], source: Path) -> list[str]:
        """The paths of the files of these names below the folder; `source` is the list that names them."""
        # One look at each folder; one at each file takes minutes where files are on a network.
        seen: dict[str, set[str]] = {}
        for name in names:
            self.check_name(name, source)
            place, _, file = name.rpartition("/")
            if place not in seen:
                below = folder / place
                seen[place] = names_in(below)
            if file not in seen[place]:
                raise self.missing(folder / name)
        return [f"{folder}{os.sep}{name}" for name in names]

    def check_name(self, name: str, source: Path) -> None:
        """Raise for a name in a list that leads out of the folder it belongs to."""
        # Windows' rules refuse all that others do: both slashes, and drive letters.
        path = PureWindowsPath(name)
        if path.anchor or ".." in path.parts:
            raise self.damaged(source, repr(name[:80]), "names below the folder")


def _images_among(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.lower().endswith(EXTENSIONS) and not name.startswith(".")]


def names_in(folder: Path) -> set[str]:
    """The names of all that is in a folder; none if there is no folder."""
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
