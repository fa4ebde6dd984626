"""Pickles come back as they were written, or not at all."""

import pickle
from typing import Any

import miniature
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy._core.multiarray import _reconstruct  # type: ignore[attr-defined]
from numpy._core.numeric import _frombuffer  # type: ignore[attr-defined]
from torch import Tensor

from secateur.data.unpickle import unpickle

PROTOCOLS = [2, 3, 4, 5]
WHOLE = st.integers(-(2**2000), 2**2000)
LEAVES = st.none() | st.booleans() | WHOLE | st.floats(allow_nan=False) | st.binary() | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.binary(max_size=300), inner)
    ),
)


@settings(deadline=None)
@given(VALUES, st.sampled_from(PROTOCOLS))
def test_plain_data_come_back(value: object, protocol: int) -> None:
    # The text tells a number from a truth value, and zero from its negative.
    assert repr(unpickle(pickle.dumps(value, protocol))) == repr(value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", ["u1", "i1", "i2", "i4", "i8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_come_back(protocol: int, kind: str, order: Any) -> None:
    shapes = [(), (1,), (7,), (3, 4), (2, 3, 4), (70, 1000)]
    written = [np.random.default_rng(0).integers(-100, 100, s).astype(kind).copy(order=order) for s in shapes]
    written.append(written[-1].reshape(70, 10, 100)[:, ::2, 1:])
    read = check_list(unpickle(pickle.dumps(written, protocol)))
    for tensor, wanted in zip(read, map(torch.from_numpy, written), strict=True):
        assert torch.equal(tensor, wanted)
        assert tensor.dtype == wanted.dtype
        assert tensor.stride() == wanted.contiguous().stride() or order == "F"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_array_that_occurs_twice_is_one(protocol: int) -> None:
    array = np.arange(6).reshape(2, 3)
    first, second, other = check_list(unpickle(pickle.dumps([array, array, array[0].copy()], protocol)))
    assert first is second
    assert torch.equal(other, torch.arange(3))


def check(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def check_list(value: object) -> list[Tensor]:
    assert isinstance(value, list)
    return [check(item) for item in value]


def python2_file() -> bytes:
    images = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    entries = {"data": miniature.array(images), "labels": miniature.numbers(torch.tensor([7, 200]))}
    return miniature.python2_pickle({**entries, "name": miniature.text("é" * 200)})


def test_python_2_text_is_bytes() -> None:
    read, wanted = unpickle(python2_file()), pickle.loads(python2_file(), encoding="bytes")
    assert isinstance(read, dict)
    assert list(read) == list(wanted) == [b"data", b"labels", b"name"]
    assert torch.equal(read[b"data"], torch.from_numpy(wanted[b"data"]))
    assert torch.equal(read[b"data"], torch.arange(6, dtype=torch.uint8).reshape(2, 3))
    assert read[b"labels"] == wanted[b"labels"] == [7, 200]
    assert read[b"name"] == wanted[b"name"] == ("é" * 200).encode()


def files() -> list[bytes]:
    value = {"data": np.arange(6).reshape(2, 3), b"labels": [1, 300, 70_000, -1, 2**40, 0.5, None, True]}
    return [python2_file(), *(pickle.dumps(value, protocol) for protocol in PROTOCOLS)]


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(files()), st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 7)), min_size=1, max_size=4))
def test_changed_files_are_read_or_refused(data: bytes, flips: list[tuple[int, int]]) -> None:
    changed = bytearray(data)
    for position, bit in flips:
        changed[position % len(data)] ^= 1 << bit
    read_or_refuse(bytes(changed))


# What the machine knows: with other opcodes a program would end before it gets anywhere.
OPCODES = [bytes([code]) for code in b"})]N\x88\x89(taeus\x85\x86\x87\x94Rb\x93"]
NAMES = [b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n"]
ARGUMENTS = [b"q\0", b"h\0", b"X\x06\0\0\0latin1", b"U\x02u1", b"U\x01b", b"K\0", b"K\x01", b"K\x03"]
WHOLE_PARTS = [miniature.array(torch.zeros(1, dtype=torch.uint8)), b"cnumpy\ndtype\nU\x02u1K\0K\x01\x87R"]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from([*OPCODES, *NAMES, *ARGUMENTS, *WHOLE_PARTS]), max_size=60))
def test_random_programs_are_read_or_refused(program: list[bytes]) -> None:
    read_or_refuse(b"\x80\x02(" + b"".join(program) + b"t.")


def read_or_refuse(data: bytes) -> None:
    try:
        value = unpickle(data)
    except ValueError:
        return
    assert_plain(value)


def assert_plain(value: object) -> None:
    waiting, seen = [value], set[int]()  # a list may be in itself
    while waiting:
        value = waiting.pop()
        assert type(value) in (dict, list, tuple, bytes, str, int, float, bool, type(None), Tensor)
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting += [*value.keys(), *value.values()] if isinstance(value, dict) else value


class Reduced:
    """Pickled as the call that it was made with."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b"\x80\x02.",
        b"NN.",
        b"(N.",
        b"cnumpy\ndtype\n.",
        b"N\x85\x85\x86.",
        b"(e.",
        b"u.",
        b"q\0.",
        b"h\x07.",
        b"X\x01\0\0\0\xff.",
        b"c_codecs\nencode\nX\x02\0\0\0\xc4\x80X\x06\0\0\0latin1\x86R.",
        b"\x80\x01N.",
        b"\x80\x06N.",
    ],
)
def test_nonsense_is_refused(program: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        unpickle(program)


BYTE, WORD = np.dtype("u1"), np.dtype("i4")
MADE = _reconstruct, (np.ndarray, (0,), b"b")
STATE = 1, (6,), BYTE, False, b"abcdef"


@pytest.mark.parametrize(
    "shape",
    [
        (3,),
        (7,),
        (2, 2),
        (-2, -3),
        (-6,),
        (0,),
        (2, 3, 0),
        (2**62, 2**62, 0),
        (2**64 + 6,),
        (6.0,),
        (True, 6),
        ("6",),
        ((6,),),
        (6, np.arange(6)),
        (1,) * 40 + (6,),
        (2**1000,) * 32,
    ],
    ids=repr,
)
@pytest.mark.parametrize("way", ["state", "buffer"])
def test_arrays_must_have_the_shape_of_their_bytes(shape: tuple[Any, ...], way: str) -> None:
    def pickled(shape: object) -> bytes:
        made = Reduced(*MADE, (1, shape, BYTE, False, b"abcdef"))
        return pickle.dumps(made if way == "state" else Reduced(_frombuffer, (b"abcdef", BYTE, shape, "C")), 3)

    assert check(unpickle(pickled((2, 3)))).tolist() == [[97, 98, 99], [100, 101, 102]]
    with pytest.raises(ValueError, match="shape does not fit its 6 bytes"):
        unpickle(pickled(shape))


@pytest.mark.parametrize(
    "call",
    [
        (*MADE, (1, (8,), WORD, False, b"abcdefgh")),
        (*MADE, (1, (2,), WORD, False, b"abcdefg")),
        (*MADE, (2, (6,), BYTE, False, b"abcdef")),
        (*MADE, (1, [6], BYTE, False, b"abcdef")),
        (*MADE, (1, (6,), "u1", False, b"abcdef")),
        (*MADE, (1, (6,), BYTE, None, b"abcdef")),
        (*MADE, (1, (6,), BYTE, False, "abcdef")),
        (*MADE, (1, (6,), BYTE, False, [1, 2, 3, 4, 5, 6])),
        (*MADE, ((6,), BYTE, False, b"abcdef")),
        (*MADE, {"data": b"abcdef"}),
        MADE,
        (_reconstruct, (np.matrix, (0,), b"b"), STATE),
        (_reconstruct, (np.dtype, (0,), b"b"), STATE),
        (_reconstruct, (np.ndarray, (2**40,), b"b"), STATE),
        (_reconstruct, (np.ndarray, (0,), b"O"), STATE),
        (_frombuffer, (b"abcdef", BYTE, (6,), "A")),
        (_frombuffer, (b"abcdef", BYTE, (6,))),
        (_frombuffer, ([97], BYTE, (1,), "C")),
        (np.dtype, ("u1", np.arange(3), True)),
        *(
            (*MADE, (1, (6,), Reduced(np.dtype, ("u1", False, True), state), False, b"abcdef"))
            for state in (
                (3, "|", None, ("a",), {"a": (BYTE, 0)}, -1, -1, 0),
                (3, "|", np.arange(3), None, None, -1, -1, 0),
                (3, "|", None, None, None, 2, -1, 0),
            )
        ),
    ],
)
def test_arrays_must_be_made_as_numpy_does(call: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"only plain data|does not fit|no single value"):
        unpickle(pickle.dumps(Reduced(*call), 3))
