"""Files of MATLAB 5 to 7, as far as datasets need them: numbers, text and structs.

scipy reads them too, but some damaged files crash it and the whole process.
"""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_BYTES = 2**24
"""Far more than a label map or the names of a thousand classes take."""

MATRIX, COMPRESSED = 14, 15
STRUCT, TEXT, NUMBERS = 2, 4, range(6, 16)
DTYPES = {
    1: torch.int8,
    2: torch.uint8,
    3: torch.int16,
    4: torch.uint16,
    5: torch.int32,
    6: torch.uint32,
    7: torch.float32,
    9: torch.float64,
    12: torch.int64,
    13: torch.uint64,
}
ENCODINGS = {1: "latin-1", 2: "latin-1", 4: "utf-16-le", 16: "utf-8", 17: "utf-16-le"}


def read_mat(path: str | Path, name: str) -> Any:
    """The variable of that name: a tensor, text, or a list of structs, each a dict; None for other kinds."""
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError("not a plain file")  # a pipe would be waited for
    size = Path(path).stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{size:,} bytes, more than {MAX_BYTES:,}")
    data = Path(path).read_bytes()
    # The version of the format, and the order of bytes.
    if data[124:128] != b"\0\1IM":
        raise ValueError("no header of MATLAB 5 to 7, with low bytes first")
    elements = Elements(memoryview(data)[128:])
    while elements.left:
        kind, content = elements.take()
        if kind == COMPRESSED:
            kind, content = Elements(_decompress(content)).take()
        if kind == MATRIX:
            found, value = _read_matrix(content)
            if found == name:
                return value
    raise ValueError(f"no variable {name}")


class Elements:
    """The parts of a file or a matrix in order: each has a kind, a size and its bytes."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.place = data, 0

    @property
    def left(self) -> int:
        return max(0, len(self.data) - self.place)

    def take(self) -> tuple[int, memoryview]:
        """The kind and the bytes of the next one."""
        if self.left < 8:
            raise ValueError("an early end")
        kind, size = struct.unpack_from("<II", self.data, self.place)
        self.place += 8
        if kind >> 16:
            # Up to four bytes share eight with their kind and their size.
            kind, size = kind & 0xFFFF, kind >> 16
            return kind, self.data[self.place - 4 : self.place][:size]
        if size > self.left:
            raise ValueError("an early end")
        content = self.data[self.place : self.place + size]
        self.place += size if kind == COMPRESSED else size + -size % 8
        return kind, content

    def take_matrix(self) -> Any:
        kind, content = self.take()
        if kind != MATRIX:
            raise ValueError(f"an element of kind {kind} instead of a matrix")
        return _read_matrix(content)[1]

    def take_numbers(self) -> list[int]:
        kind, content = self.take()
        return _tensor(kind, content, (len(content) // DTYPES[kind].itemsize,)).tolist()


def _decompress(content: memoryview) -> memoryview:
    unpacking = zlib.decompressobj()
    data = unpacking.decompress(content, MAX_BYTES)
    if not unpacking.eof:
        raise ValueError(f"an early end, or more than {MAX_BYTES:,} bytes")
    return memoryview(data)


def _read_matrix(content: memoryview) -> tuple[str, Any]:
    """The name and the value; matrices within others have no name."""
    if not content:
        return "", None
    elements = Elements(content)
    kind = elements.take_numbers()[0] & 0xFF
    shape = tuple(elements.take_numbers())
    name = bytes(elements.take()[1]).decode()
    if min(shape, default=-1) < 0:
        raise ValueError(f"a matrix of shape {shape}")
    if kind == STRUCT:
        return name, _read_structs(elements, math.prod(shape))
    if kind == TEXT:
        encoding, text = elements.take()
        return name, bytes(text).decode(ENCODINGS[encoding])
    return name, _tensor(*elements.take(), shape) if kind in NUMBERS else None


def _read_structs(elements: Elements, count: int) -> list[dict[str, Any]]:
    length = elements.take_numbers()[0]
    text = bytes(elements.take()[1])
    names = [text[i : i + length].partition(b"\0")[0].decode() for i in range(0, len(text), length)]
    # Structs without fields take no space, so a small file could claim any number of them.
    return [{name: elements.take_matrix() for name in names} for _ in range(count if names else 0)]


def _tensor(kind: int, content: memoryview, shape: tuple[int, ...]) -> Tensor:
    """A tensor of numbers, which MATLAB stores first index first, and perhaps as a smaller type."""
    dtype = DTYPES[kind]
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.view(shape[::-1]).permute(*reversed(range(len(shape))))
