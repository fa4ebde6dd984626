"""What the files of a dataset should look like, and the errors for those that do not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from secateur.errors import InvalidData


@dataclass(frozen=True)
class Layout:
    """How a dataset's folder looks, in the words of an error message."""

    name: str
    """Of the dataset."""
    tree: str
    """The folder, drawn as a tree, with what the files hold."""
    source: str
    """Which archives it is made from."""

    def __str__(self) -> str:
        return f"the folder of {self.name} ({self.source}) looks like this:\n{indent(self.tree, '  ')}"

    def missing(self, path: Path) -> InvalidData:
        """The error for a file or folder that is not there."""
        return InvalidData(f"{self.name}: there is no {path}; {self}")

    def broken(self, path: Path, reason: str) -> InvalidData:
        """The error for a file that is there and cannot be used."""
        return InvalidData(f"{self.name}: {path} is broken: {reason}; unpack it again; {self}")

    def find(self, folder: Path, *names: str) -> Path:
        """The first of these that exists below the folder: a file, or a folder."""
        for name in names:
            if (folder / name).exists():
                return folder / name
        raise self.missing(folder / names[0])
