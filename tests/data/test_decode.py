"""Image files: what is read of them, and what is refused."""

import io
import os
import re
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import LAYOUT, noise, write
from PIL import Image, ImageFile

from secateur.data.decode import PLAIN_PIXELS, gpu_decoder, plain_jpeg_size, read_image, read_map, read_photo
from secateur.data.matlab import read_mat
from secateur.errors import InvalidData

PLAIN = Image.fromarray(noise())
SMOOTH = Image.fromarray(np.linspace(0, 255, 40 * 32).round().astype(np.uint8).reshape(32, 40))
PALETTE = Image.frombytes("P", (40, 32), SMOOTH.tobytes())
PALETTE.putpalette([value for shade in range(256) for value in (shade, 255 - shade, 7)])


@pytest.mark.parametrize("name", ["x.png", "x.bmp", "x.ppm", "x.tif", "png.jpg", "x.jpg", "x.webp", "x.gif"])
def test_kinds_of_files(tmp_path: Path, name: str) -> None:
    # By what is in them: some JPEGs of ImageNet are PNGs.
    path = write(tmp_path / name, SMOOTH.convert("RGB"), format="PNG" if name == "png.jpg" else None)
    difference = np.array(read_image(path, LAYOUT)).astype(int) - np.array(SMOOTH)[:, :, None]
    assert np.abs(difference).max() <= (12 if name in ("x.jpg", "x.webp", "x.gif") else 0)


@pytest.mark.parametrize(
    ("name", "image", "options"),
    [
        ("grey.png", SMOOTH, {}),
        ("grey and alpha.png", SMOOTH.convert("LA"), {}),
        ("alpha.png", SMOOTH.convert("RGBA"), {}),
        ("16 bits.png", Image.fromarray(np.array(SMOOTH).astype(np.uint16) * 257), {}),
        ("16 bits.tif", Image.fromarray(np.array(SMOOTH).astype(np.uint16) * 257), {}),
        ("palette.png", PALETTE, {}),
        ("transparent palette.png", PALETTE, {"transparency": bytes(range(256))}),
        ("black and white.png", SMOOTH.convert("1"), {}),
        ("cmyk.tif", SMOOTH.convert("RGB").convert("CMYK"), {}),
    ],
)
def test_kinds_of_pixels(tmp_path: Path, name: str, image: Image.Image, options: dict[str, Any]) -> None:
    read = read_image(write(tmp_path / name, image, **options), LAYOUT)
    assert read.mode == "RGB"
    wanted = SMOOTH if image.mode.startswith("I") else image
    assert np.array_equal(np.array(read), np.array(wanted.convert("RGB")))


def png_of(width: int, height: int) -> bytes:
    """A PNG that claims to be of that size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(3 * 40 + 1) * 32)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def jpeg(quality: int = 95) -> bytes:
    file = io.BytesIO()
    PLAIN.save(file, "JPEG", quality=quality)
    return file.getvalue()


def jpeg_of(width: int, height: int) -> bytes:
    data = bytearray(jpeg())
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">2H", height, width)
    return bytes(data)


DAMAGED = {
    "half a JPEG": (jpeg()[:2000], r"image file is truncated"),
    "the header of a JPEG": (jpeg()[:150], r"Truncated File Read|cannot identify image file"),
    "half a PNG": (png_of(40, 32)[:60], r"image file is truncated|broken PNG file"),
    "nothing": (b"", r"cannot identify image file"),
    "text": (b"404 Not Found", r"cannot identify image file"),
    "a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", r"cannot identify image file"),
    "floating-point numbers": (None, r"pixels of 32 bits \(mode F\)"),
    "missing": (..., "None"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_image_is_named(tmp_path: Path, kind: str) -> None:
    data, got = DAMAGED[kind]
    path = tmp_path / "robin.jpg"
    if data is None:
        Image.fromarray(np.zeros((4, 4), np.float32)).save(path, "TIFF")
    elif isinstance(data, bytes):
        path.write_bytes(data)
    check_refused(path, got)


def check_refused(path: Path, got: str) -> None:
    with pytest.raises(InvalidData) as caught:
        read_image(str(path), LAYOUT)
    error = caught.value
    assert error.what.startswith("Birds: ")
    assert path.name in error.what
    assert re.search(got, str(error.got))
    assert str(LAYOUT) in str(error.remedy)


def test_a_failure_of_a_decoder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise struct.error("unpack requires 4 bytes")

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    check_refused(Path(write(tmp_path / "robin.png", PLAIN)), r"error\('unpack requires 4 bytes'\)")


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("data", [png_of(60000, 60000), jpeg_of(60000, 60000)], ids=["png", "jpeg"])
def test_an_image_too_large_is_refused_by_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, limited: bool
) -> None:
    def fail(self: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    if not limited:
        # As libraries do that read maps.
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    path = tmp_path / "robin.jpg"
    path.write_bytes(data)
    check_refused(path, "DecompressionBombError" if limited else "60000x60000 pixels, more than 178,000,000")
    with pytest.raises((ValueError, Image.DecompressionBombError), match="pixels"):
        read_map(str(path))


# What a GPU may decode


def saved(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def marked(data: bytes, marker: bytes, content: bytes) -> bytes:
    """The file with a segment more, at its beginning."""
    return data[:2] + marker + struct.pack(">H", len(content) + 2) + content + data[2:]


ADOBE = b"Adobe" + bytes(6)


def named(*names: int) -> bytes:
    """A JPEG whose colours have these names in its header, by which decoders know RGB."""
    data = bytearray(jpeg())
    place = data.index(b"\xff\xc0") + 10
    data[place : place + 9 : 3] = bytes(names)
    return bytes(data)


def sampled(grey: bytes) -> bytes:
    """A grey JPEG whose header gives a sampling that has no meaning there."""
    place = grey.index(b"\xff\xc0") + 11
    return grey[:place] + b"\x22" + grey[place + 1 :]


@pytest.mark.parametrize(
    "data",
    [
        jpeg(),
        saved(PLAIN, subsampling="4:4:4"),
        saved(PLAIN, subsampling="4:2:2", optimize=True, restart_marker_blocks=2),
        marked(jpeg(), b"\xff\xe1", b"Exif" + bytes(1000)),
        marked(jpeg(), b"\xff\xee", ADOBE + b"\x01"),
        # Within a segment bytes may look like a marker.
        marked(jpeg(), b"\xff\xfe", b"\xff\xc2" * 20),
        saved(SMOOTH),
    ],
)
def test_plain_jpegs_have_a_size(data: bytes) -> None:
    assert plain_jpeg_size(data) == plain_jpeg_size(memoryview(data)) == (40, 32)


@pytest.mark.parametrize(
    "data",
    {
        "progressive": saved(PLAIN, progressive=True),
        "grey, of another sampling": sampled(saved(SMOOTH)),
        "CMYK": saved(PLAIN.convert("CMYK")),
        "RGB": saved(PLAIN, keep_rgb=True),
        "RGB by its mark": marked(jpeg(), b"\xff\xee", ADOBE + b"\x00"),
        "RGB by its names": named(*b"RGB"),
        "half": jpeg()[:2000],
        "more than its end": jpeg() + b"more",
        "huge": jpeg_of(PLAIN_PIXELS // 2000, 2001),
        "empty": jpeg_of(0, 32),
        "no size": jpeg()[:150] + b"\xff\xd9",
        "PNG": png_of(40, 32),
        "nothing": b"",
        "a start": b"\xff\xd8\xff\xd9",
        "a segment without a size": b"\xff\xd8\xff\xe0\x00\x00\xff\xd9",
    }.items(),
    ids=lambda item: item[0],
)
def test_other_files_go_the_careful_way(data: tuple[str, bytes]) -> None:
    assert plain_jpeg_size(data[1]) is None


def test_a_cpu_has_no_decoder_of_its_own() -> None:
    assert gpu_decoder(torch.device("cpu")) is None


def test_an_image_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(InvalidData) as caught:
        read_image(str(tmp_path / "pipe.jpg"), LAYOUT)
    assert "not a plain file" in str(caught.value.got)
    with pytest.raises(ValueError, match="not a plain file"):
        read_mat(tmp_path / "pipe.jpg", "x")


def test_a_decoder_that_will_go_is_used_quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision 0.29 and later warn of their decoders."""
    asked = []

    def decode_jpeg(contents: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
        asked.append(options)
        return [torch.zeros(3, 32, 40, dtype=torch.uint8)]

    monkeypatch.setattr("secateur.data.decode.torchvision_decodes", lambda: True)
    monkeypatch.setattr("torchvision.io.decode_jpeg", decode_jpeg)
    path = tmp_path / "a.jpg"
    PLAIN.save(path, quality=90)
    assert read_photo(str(path), LAYOUT).shape == (32, 40, 3)
    assert len(asked) == 1
