"""MATLAB's files: what scipy writes, what MATLAB itself does otherwise, and what is broken."""

import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from miniature_images import records, synset, write_sbd_map
from scipy.io import savemat
from scipy.sparse import csc_matrix

from secateur.data.matlab import read_mat

HEADER = b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM"
SHADES = np.arange(15, dtype=np.uint8).reshape(3, 5)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"])
def test_numbers(tmp_path: Path, kind: str, compressed: bool) -> None:
    values = np.random.default_rng(0).integers(0, 100, (3, 5, 2)).astype(kind)
    # The second begins at an odd place if the first is compressed.
    variables = {"first": SHADES, "x": values, "empty": np.zeros((0, 4), kind)}
    savemat(tmp_path / "x.mat", variables, do_compression=compressed)
    found = read_mat(tmp_path / "x.mat", "x")
    assert found.numpy().dtype == kind
    assert np.array_equal(found.numpy(), values)
    assert read_mat(str(tmp_path / "x.mat"), "empty").shape == (0, 4)


def test_text_and_structs(tmp_path: Path) -> None:
    entries = [synset(1, "n01440764", []), synset(2, "n00001740", [1, 7])]
    inner = {"deep": {"text": "näher"}, "cell": np.array([SHADES, "x"], object), "sparse": csc_matrix(SHADES)}
    savemat(tmp_path / "x.mat", {"synsets": records(entries)[:, None], "nested": inner, "nothing": {}})
    one, two = read_mat(tmp_path / "x.mat", "synsets")
    assert list(one) == list(entries[0])
    assert (one["WNID"], two["WNID"]) == ("n01440764", "n00001740")
    assert (int(one["ILSVRC2012_ID"]), int(two["num_children"])) == (1, 2)
    assert two["children"].tolist() == [[1, 7]]
    assert read_mat(tmp_path / "x.mat", "nested") == [{"deep": [{"text": "näher"}], "cell": None, "sparse": None}]


def element(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content.ljust(len(content) + -len(content) % 8, b"\0")


def small(kind: int, content: bytes) -> bytes:
    """Up to four bytes."""
    return struct.pack("<HH", kind, len(content)) + content.ljust(4, b"\0")


def matrix(kind: int, shape: tuple[int, ...], *content: bytes, name: bytes = b"x") -> bytes:
    flags, sides = struct.pack("<II", kind, 0), struct.pack(f"<{len(shape)}i", *shape)
    return element(14, b"".join([element(6, flags), element(5, sides), small(1, name), *content]))


def structs(count: int, names: list[str], *fields: bytes) -> bytes:
    text = b"".join(name.encode().ljust(8, b"\0") for name in names)
    return matrix(2, (count, 1), small(5, struct.pack("<i", 8)), element(1, text), *fields)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        # MATLAB stores numbers in as few bytes as they need.
        (matrix(6, (1, 2), small(2, b"\x05\x09")), torch.tensor([[5, 9]], dtype=torch.uint8)),
        (matrix(6, (2, 1), small(4, struct.pack("<2H", 5, 900))), torch.tensor([[5], [900]], dtype=torch.uint16)),
        (matrix(4, (1, 2), small(4, "é!".encode("utf-16-le"))), "é!"),
        (matrix(4, (1, 2), small(16, "é!".encode())), "é!"),
        (matrix(4, (1, 2), small(2, b"hi")), "hi"),
        (
            structs(1, ["a", "b"], matrix(4, (1, 1), small(16, b"y"), name=b""), element(14, b"")),
            [{"a": "y", "b": None}],
        ),
        (structs(2**31 - 1, []), []),
    ],
)
def test_what_matlab_does_otherwise(tmp_path: Path, variable: bytes, value: Any) -> None:
    (tmp_path / "x.mat").write_bytes(HEADER + variable)
    found = read_mat(tmp_path / "x.mat", "x")
    if isinstance(value, torch.Tensor):
        assert found.dtype == value.dtype
        assert torch.equal(found, value)
    else:
        assert found == value


def compressed(data: bytes) -> bytes:
    packed = zlib.compress(data)
    return struct.pack("<II", 15, len(packed)) + packed


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (
            b"MATLAB 7.3 MAT-file".ljust(124) + b"\0\2IM",
            ValueError,
            "no header of MATLAB 5 to 7",
        ),
        (HEADER[:-2] + b"MI", ValueError, "no header of MATLAB 5 to 7"),
        (HEADER, ValueError, "no variable x"),
        (HEADER + matrix(9, (1, 1), small(2, b"1"), name=b"y"), ValueError, "no variable x"),
        (HEADER + matrix(9, (1, 1), small(2, b"1"))[:-8], ValueError, "an early end"),
        (HEADER + compressed(bytes(2**25)), ValueError, "more than 16,777,216 bytes"),
        (HEADER + compressed(bytes(999))[:-1], ValueError, "an early end"),
        (HEADER + compressed(b"")[:8] + bytes(8), zlib.error, "Error -3"),
        (HEADER + matrix(9, (60000, 60000), small(2, b"1")), RuntimeError, "shape .* is invalid for input of size 1"),
        (HEADER + matrix(9, (-1, 1), small(2, b"1")), ValueError, r"a matrix of shape \(-1, 1\)"),
        (HEADER + matrix(9, (), small(2, b"1")), ValueError, r"a matrix of shape \(\)"),
        (HEADER + matrix(9, (1, 1), small(77, b"1")), KeyError, "77"),
        (HEADER + structs(2**31 - 1, ["a"], element(14, b"")), ValueError, "an early end"),
        (
            HEADER + structs(1, ["a"], small(2, b"1")),
            ValueError,
            "an element of kind 2 instead of a matrix",
        ),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, error: type[Exception], message: str) -> None:
    (tmp_path / "x.mat").write_bytes(content)
    with pytest.raises(error, match=message):
        read_mat(tmp_path / "x.mat", "x")


def test_deep_files(tmp_path: Path) -> None:
    inner = b""
    for _ in range(5000):
        inner = structs(1, ["a"], inner or element(14, b""))
    (tmp_path / "x.mat").write_bytes(HEADER + inner)
    with pytest.raises(RecursionError):
        read_mat(tmp_path / "x.mat", "x")


def test_no_broken_file_does_more_than_fail(tmp_path: Path) -> None:
    path = tmp_path / "x.mat"
    write_sbd_map(path, SHADES)
    # Packed, most changes would be found by the checksum.
    whole = path.read_bytes()[:128] + zlib.decompress(path.read_bytes()[136:])
    rng, failures = random.Random(0), 0
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(128, 800)] = rng.randrange(256)
        path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        try:
            read_mat(path, "GTcls")
        except Exception:
            failures += 1
    assert 200 < failures < 600
