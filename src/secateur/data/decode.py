"""Image files: Pillow reads them all with care; plain JPEGs can be decoded on a GPU, many at once."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.data.layout import Layout
from secateur.errors import MissingExtra
from secateur.extras import import_extra

# Pillow's other decoders are little tested, or start programs.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "GIF", "TIFF")
MAX_PIXELS = 178_000_000
MAX_BYTES = 1 << 30
PLAIN_PIXELS = 1 << 24
"""Of a JPEG that is decoded on a GPU; larger ones are rare, and would take the memory of many."""

Decoder = Callable[[list[Tensor]], list[Tensor]]
"""From the bytes of JPEGs to their pixels, each colour x height x width."""


def read_image(path: str, layout: Layout) -> Any:
    """A Pillow image in RGB, whatever mode the file has."""
    with layout.reading(path), open_image(path) as image:
        if image.mode in ("I", "F"):
            raise ValueError(f"pixels of 32 bits (mode {image.mode}), whose range is unknown")
        if image.mode.startswith("I;16"):
            # Pillow would clip at 255.
            image = image.point(lambda value: value * (1 / 257))
        if image.mode == "P":
            # Pillow warns of partly transparent palettes otherwise.
            image = image.convert("RGBA")
        if image.mode == "RGB":
            image.load()
            return image
        return image.convert("RGB")


def read_map(path: str) -> Tensor:
    """The values of a label map: grey levels, or indices of a palette."""
    with open_image(path) as image:
        if image.mode not in ("L", "P"):
            raise ValueError(f"an image of mode {image.mode} instead of one value of 8 bits for each pixel")
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width)


def check_plain(path: str) -> None:
    """Raise for a pipe, which would be waited for, and for a device, which has no end."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
        raise ValueError("not a plain file")


def open_image(path: str) -> Any:
    """A Pillow image of which only the header is read; raises if it is too large to decode."""
    check_plain(path)
    image = import_extra("PIL.Image", "vision").open(path, formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise ValueError(f"{image.width}x{image.height} pixels, more than {MAX_PIXELS:,}")
    return image


def plain_jpeg_size(content: bytes | memoryview) -> tuple[int, int] | None:
    """Width and height of a JPEG that all decoders take for the same: whole, baseline, YCbCr or grey; else None."""
    if content[:2] != b"\xff\xd8" or content[-2:] != b"\xff\xd9":
        return None
    place = 2
    while place + 4 <= len(content) and content[place] == 0xFF:
        kind, size = content[place + 1], int.from_bytes(content[place + 2 : place + 4])
        segment = content[place + 4 : place + 2 + size]
        if kind == 0xEE and segment[:5] == b"Adobe" and segment[11:12] != b"\x01":
            return None  # its colours are RGB or CMYK
        if kind == 0xC0:
            names = segment[6::3]
            height, width = int.from_bytes(segment[1:3]), int.from_bytes(segment[3:5])
            colour = len(segment) == 15 and segment[5] == 3 and names == b"\x01\x02\x03"
            grey = len(segment) == 9 and segment[5] == 1 and segment[7] == 0x11
            plain = segment[:1] == b"\x08" and (colour or grey)
            return (width, height) if plain and 0 < width * height <= PLAIN_PIXELS else None
        if 0xC1 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            return None  # progressive, arithmetic, lossless ...
        place += 2 + size
    return None


def read_photo(path: str, layout: Layout) -> Any:
    """The same as bytes, height x width x colour, if torchvision can decode it, which is faster."""
    if torchvision_decodes():
        with layout.reading(path):
            content = layout.read_bytes(Path(path), MAX_BYTES)
        if plain_jpeg_size(content) is not None:
            try:
                return _decode([torch.frombuffer(bytearray(content), dtype=torch.uint8)], "cpu")[0].movedim(0, 2)
            except RuntimeError:
                pass  # Pillow says what is wrong with it
    return read_image(path, layout)


@cache
def torchvision_decodes() -> bool:
    """Whether torchvision is there, with its decoders."""
    try:
        import_extra("torchvision.io", "vision")
        return hasattr(torch.ops.image, "decode_jpeg")
    except MissingExtra:
        return False


def gpu_decoder(device: torch.device) -> Decoder | None:
    """torchvision's decoder of JPEGs on that device, if it has one there."""
    if device.type != "cuda" or not torchvision_decodes() or not hasattr(torch.ops.image, "decode_jpegs_cuda"):
        return None
    return lambda contents: _decode(contents, device)


def _decode(contents: list[Tensor], device: torch.device | str) -> list[Tensor]:
    io = import_extra("torchvision.io", "vision")
    with warnings.catch_warnings():
        # Since 0.29 torchvision says that it will do without; then Pillow decodes.
        warnings.simplefilter("ignore", DeprecationWarning)
        return io.decode_jpeg(contents, mode=io.ImageReadMode.RGB, device=device)
