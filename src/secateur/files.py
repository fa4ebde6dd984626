"""Files of ours: written whole or not at all, read with a limit on their size; JSON that every parser reads."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from secateur.errors import InvalidData

LARGEST = 2**26
"""Bytes that a JSON file or a picture may have."""
LARGEST_LINES = 2**28
"""Bytes that a file of one object per line may have: the events of weeks."""
UNFINISHED = ".unfinished"
"""The folder, within another, of files that are not all written yet."""


def write_atomic(path: str | Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file that appears whole or not at all, and survives a power failure; its folder is made if needed.

    content: text, bytes, or a function that writes to the path it is given.
    """
    path = Path(path)
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with _named(path, temporary):
        _write(path, temporary, content)
        sync_folder(path.parent)


def _write(path: Path, temporary: Path, content: str | bytes | Callable[[Path], object]) -> None:
    try:
        temporary.touch(exist_ok=False)
        if callable(content):
            content(temporary)
            _sync(temporary, os.O_RDWR)
        else:
            write_synced(temporary, content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _place(source: Path, folder: Path, names: list[str]) -> None:
    """Move these files, all of them or none; if they cannot be moved, those that were there before are there again."""
    aside, placed = source / "before", list[str]()
    try:
        aside.mkdir()
        for name in reversed(names):
            if (folder / name).exists():
                (folder / name).replace(aside / name)
        for name in names:
            (source / name).replace(folder / name)
            placed.append(name)
        sync_folder(folder)
    except BaseException:
        for name in placed:
            with suppress(OSError):
                (folder / name).unlink()
        for name in names:
            with suppress(OSError):
                (aside / name).replace(folder / name)
        raise


def write_together(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files that belong together; those of that name in the folder stay until all new ones are on the disk.

    At any moment the folder holds the first so many of them, by their order, of the same generation.
    """
    unfinished = folder / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        for name, content in files.items():
            write_atomic(unfinished / name, content)
        _place(unfinished, folder, list(files))
    except OSError as error:
        name = Path(str(error.filename)).name
        error.filename = str(folder / name if name in files else folder)
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_tensors(path: str | Path, tensors: Mapping[str, Any]) -> None:
    """Write a .safetensors file atomically."""
    write_atomic(path, serialize(tensors))


def serialize(tensors: Mapping[str, Any]) -> bytes:
    """The content of a .safetensors file; tensors may share memory and be on any device. Other values are skipped."""
    import safetensors.torch
    from torch import Tensor

    found = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    # Copies, because tensors that share memory cannot be saved.
    return safetensors.torch.save({name: t.detach().to("cpu", copy=True).contiguous() for name, t in found.items()})


@contextmanager
def _named(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Let an error of the system name the file that the user knows: a failing write or sync names none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise


def is_full(error: BaseException) -> bool:
    """Whether the system refused because the disk, or the user's part of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def reason(error: OSError) -> str:
    """Why the system refused, in its own words; a full disk is called one.

    >>> reason(OSError(errno.ENOSPC, "No space left on device"))
    'the disk is full (No space left on device)'
    """
    said = error.strerror or str(error)
    return f"the disk is full ({said})" if is_full(error) else said


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk; its name is only after `sync_folder`."""
    with _named(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if hasattr(os, "O_DIRECTORY"):  # not on Windows, which cannot open folders
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, which anybody may have written."""
    return _object(read_bytes(path), f"{path}")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of one per line. A last line without an end is left out: it may be half written."""
    return list(each_json_line(path)[1])


def each_json_line(path: Path) -> tuple[int, Iterator[dict[str, Any]]]:
    """What `read_json_lines` reads, one at a time, and how many there are: all at once take much memory, and long."""
    *lines, _ = read_bytes(path, LARGEST_LINES).split(b"\n")
    return len(lines), (_object(line, f"line {number} of {path}") for number, line in enumerate(lines, 1))


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidData(f"{what} cannot be read", got=error) from error
    if not isinstance(found, dict):
        raise InvalidData(f"{what} cannot be read", got=type(found).__name__, wanted="an object")
    return found


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """The content of a plain file that is not too large; a pipe would never end."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError("not a plain file")
        if (size := path.stat().st_size) > largest:
            raise OSError(f"{size:,} bytes, more than {largest:,}")
        return path.read_bytes()
    except OSError as error:
        raise InvalidData(f"{path} cannot be read", got=reason(error)) from error


def to_json(data: Any, indent: int | None = None) -> str:
    """JSON that every parser reads: a number that is not finite becomes null.

    >>> to_json({"accuracy": 93.1, "loss": float("inf"), "scores": (0.5, float("nan"))})
    '{"accuracy": 93.1, "loss": null, "scores": [0.5, null]}'
    """
    return json.dumps(
        _map(data, lambda value: None if isinstance(value, float) and not math.isfinite(value) else value),
        indent=indent,
        allow_nan=False,
    )


def numbers(data: Any) -> Any:
    """Metrics read from JSON: null, which stands for what was not finite, becomes NaN.

    >>> numbers({"accuracy": 93.1, "loss": None})
    {'accuracy': 93.1, 'loss': nan}
    """
    return _map(data, lambda value: math.nan if value is None else value)


def _map(data: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(data, dict):
        return {key: _map(value, change) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_map(value, change) for value in data]
    return change(data)
