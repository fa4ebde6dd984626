"""Images that are files: decoding, augmenting, batches."""

import io
import re
import struct
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import LAYOUT, noise, to_bytes, write
from PIL import Image, ImageFile
from torch import Tensor

from secateur.data import images as module
from secateur.data.images import Images, Maps, compose, for_testing, for_training, loaders, read_image, read_map
from secateur.errors import InvalidData, InvalidSetting, MissingExtra
from secateur.training.batches import draw

with_workers = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")


def some(folder: Path, count: int, **options: Any) -> Images:
    paths = [write(folder / f"{i}.png", noise(seed=i)) for i in range(count)]
    return Images(paths, [i % 3 for i in range(count)], options.get("transform", for_training(28, 32)), LAYOUT)


# Decoding

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
        Images([str(path)], [0], for_testing(), LAYOUT)[0]
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


# Augmenting


def windows(pixels: np.ndarray, size: int) -> dict[bytes, tuple[int, int, bool]]:
    """Every square of that size in an image and in its mirror image, and where it is."""
    found = {}
    steps = range(pixels.shape[0] - size + 1)
    for mirrored in (False, True):
        whole = pixels[:, ::-1] if mirrored else pixels
        for y in steps:
            for x in steps:
                found[whole[y : y + size, x : x + size].tobytes()] = (y, x, mirrored)
    return found


def resized(side: int) -> np.ndarray:
    return np.array(PLAIN.resize((side, side), Image.Resampling.BILINEAR))


def test_training_with_padding_moves_the_image_over_black() -> None:
    torch.manual_seed(0)
    pixels = np.pad(resized(32), [(2, 2), (2, 2), (0, 0)])
    places, transform = windows(pixels, 32), for_training(32, 32, padding=2)
    found = Counter(places[to_bytes(transform(PLAIN)).numpy().tobytes()] for _ in range(1000))
    assert len(found) == 5 * 5 * 2
    assert min(found.values()) > 3


def test_the_sizes_of_the_paper() -> None:
    pixels = resized(256)
    middle = to_bytes(for_testing()(PLAIN)).numpy()
    assert np.array_equal(middle, pixels[16:240, 16:240])
    places = windows(pixels, 224)
    crops = {places[to_bytes(for_training()(PLAIN)).numpy().tobytes()] for _ in range(5)}
    assert len(crops) > 1


def test_boxes_are_cut_out_first(tmp_path: Path) -> None:
    path = write(tmp_path / "robin.png", noise())
    boxes: list[tuple[float, float, float, float]] = [(5.0, 3.0, 20.0, 10.0), (-1.0, 28.0, 100.0, 4.6)]
    data = Images([path] * 2, [0, 1], compose(), LAYOUT, boxes)
    assert np.array_equal(to_bytes(data[0][0]).numpy(), noise()[3:13, 5:25])
    assert np.array_equal(to_bytes(data[1][0]).numpy(), noise()[28:])
    outside = Images([path], [0], compose(), LAYOUT, [(40.0, 3.0, 20.0, 10.0)])
    with pytest.raises(InvalidData) as caught:
        outside[0]
    assert caught.value.got == "40x32 pixels"


# Batches


@with_workers
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_follow_from_the_seed(tmp_path: Path, workers: int) -> None:
    train, _ = loaders(*[some(tmp_path, 12)] * 2, batch_size=4, workers=workers)

    def epoch(seed: int) -> tuple[Tensor, Tensor]:
        # As the training loop does it.
        torch.manual_seed(seed)
        assert train.generator is not None
        train.generator.manual_seed(seed)
        images, labels = zip(*train, strict=True)
        return torch.cat(images), torch.cat(labels)

    first, other, again = epoch(0), epoch(1), epoch(0)
    assert first[0].shape == (12, 3, 28, 28)
    assert first[1].dtype == torch.long
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])
    assert sorted(first[1].tolist()) == sorted(other[1].tolist()) == [0] * 4 + [1] * 4 + [2] * 4


@with_workers
def test_workers_draw_other_numbers_in_each_pass_and_from_each_other(tmp_path: Path) -> None:
    path = write(tmp_path / "robin.png", noise())
    data = Images([path] * 40, [0] * 40, for_training(20, 32), LAYOUT)
    train, _ = loaders(data, data, batch_size=20, workers=2)
    places = windows(resized(32), 20)
    passes = [[places[to_bytes(image).numpy().tobytes()] for images, _ in train for image in images] for _ in range(2)]
    assert passes[0][:20] != passes[0][20:]
    assert passes[0] != passes[1]


def test_training_is_shuffled_and_testing_is_not(tmp_path: Path) -> None:
    data = some(tmp_path, 30, transform=for_testing(28, 32))
    train, test = loaders(data, data, batch_size=8)
    images, labels = (torch.cat(part) for part in zip(*test, strict=True))
    assert labels.tolist() == data.targets
    assert torch.equal(images, torch.stack([image for image, _ in data]))
    assert [len(labels) for _, labels in train] == [8, 8, 8, 6]
    assert torch.cat([labels for _, labels in train]).tolist() != data.targets
    part = draw(train, 1.0, 2, torch.Generator().manual_seed(0))
    assert Counter(int(label) for _, labels in part for label in labels) == {0: 2, 1: 2, 2: 2}
    with pytest.raises(InvalidSetting):
        loaders(data, data, 0)


@with_workers
def test_a_broken_image_is_named_by_a_worker_too(tmp_path: Path) -> None:
    data = some(tmp_path, 4)
    (tmp_path / "3.png").write_bytes(b"")
    train, _ = loaders(data, data, batch_size=2, workers=2)
    batches: Any = iter(train)
    with pytest.raises(InvalidData, match=r"3.png is damaged: got cannot identify"):
        list(batches)
    # Left to the garbage collector, this takes ten seconds.
    batches._shutdown_workers()


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (4, 3), (64, 8)])
def test_workers_are_for_large_datasets(monkeypatch: pytest.MonkeyPatch, cores: int, workers: int) -> None:
    monkeypatch.setattr(module, "_num_cores", lambda: cores)
    monkeypatch.setattr("torch.utils.data.DataLoader.check_worker_number_rationality", lambda self: None)
    large, small = (Images(["x"] * count, [0] * count, compose(), LAYOUT) for count in (1000, 999))
    train, test = loaders(large, small, 4)
    assert (train.num_workers, test.num_workers) == (workers, 0)


# Label maps: more of them with the datasets that have some


def test_label_maps_are_resized_about_the_middle_of_each_pixel(tmp_path: Path) -> None:
    values = np.random.default_rng(0).choice(np.array([0, 1, 2, 7], np.uint8), (6, 9))
    paths = [write(tmp_path / "image.png", values)], [write(tmp_path / "map.png", values)]
    pixels, labels = Maps(*paths, {0: 0, 1: 1, 2: 2, 7: 255}, compose(), LAYOUT, read_map, size=3)[0]
    assert type(pixels) is type(labels) is Tensor
    assert (pixels.shape, labels.dtype) == ((3, 3, 3), torch.long)
    # Of three pixels the one in the middle, of two the later one.
    wanted = values[1::2, 1::3]
    assert np.array_equal(labels.numpy(), np.where(wanted == 7, 255, wanted))
    image = np.array(Image.fromarray(values).resize((3, 3), Image.Resampling.BILINEAR))
    assert np.array_equal(to_bytes(pixels)[:, :, 0].numpy(), image)


# Packages


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = """
import sys
import secateur.data.images, secateur.data.folders, secateur.data.cub, secateur.data.voc
import secateur.data.pets, secateur.data.camvid
print(sorted({"torchvision", "PIL", "scipy"} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.transforms.v2", None)
    with pytest.raises(MissingExtra, match=r'pip install "secateur\[vision\]"'):
        for_training()
