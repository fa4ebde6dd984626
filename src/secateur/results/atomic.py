"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError


def write(path: str | Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write a new file beside it, in a folder that is made if need be, then put that in its place."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # not the name of a temporary file
    os.close(handle)
    try:
        try:
            fill(Path(name))
        except SafetensorError as error:  # such as on a full disk
            raise OSError(f"{path} cannot be written: {error}") from error
        with Path(name).open("r+b") as file:
            os.fsync(file.fileno())  # lest the machine goes down between the name and what it stands for
        # A new file of the user's, not one of tempfile's that nobody else may read.
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
