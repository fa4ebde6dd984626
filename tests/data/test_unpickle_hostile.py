"""Pickles that were made to do harm: nothing is run, and little time and memory is taken."""

import pickle
import subprocess
import sys
from collections import OrderedDict
from datetime import datetime
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from secateur.data.unpickle import unpickle


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def programs(path: Path) -> dict[str, bytes]:
    """Ways to have a folder made by reading a file."""
    argument, function = text(str(path)), b"cos\nmkdir\n"
    return {
        "GLOBAL": b"\x80\x02" + function + argument + b"\x85R.",
        "STACK_GLOBAL": b"\x80\x04" + text("os") + text("mkdir") + b"\x93" + argument + b"\x85R.",
        "INST": b"(" + argument + b"ios\nmkdir\n.",
        "OBJ": b"(" + function + argument + b"o.",
        "in a list": b"\x80\x02](" + function + argument + b"\x85Re.",
        "by a partial": b"\x80\x02cfunctools\npartial\n" + function + b"\x85R" + argument + b"\x85R.",
        "NEWOBJ": b"\x80\x02cbuiltins\nlist\ncbuiltins\nmap\n" + function + b"]" + argument + b"a\x86\x81\x85R.",
        "BUILD": b"\x80\x02ctypes\nSimpleNamespace\n)R}" + text("__setstate__") + function + b"sb" + argument + b"b.",
    }


@pytest.mark.parametrize("way", programs(Path()))
def test_nothing_is_run(way: str, tmp_path: Path) -> None:
    program = programs(tmp_path / "made")[way]
    with pytest.raises(ValueError, match=r"^('os.mkdir'|'builtins|'functools|'types|the opcode INST)"):
        unpickle(program)
    assert not (tmp_path / "made").exists()
    pickle.loads(program)
    assert (tmp_path / "made").is_dir()  # it would have been


class Stateful:
    def __getstate__(self) -> dict[str, int]:
        return {"__class__": 1}


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset({1}),
        1j,
        OrderedDict(),
        range(3),
        datetime(2020, 1, 1),
        Fraction(1, 2),
        Path("/"),
        len,
        int,
        partial(print, "x"),
        Stateful(),
        torch.zeros(1),
        np.int64(3),
        np.dtype("u1"),
        (np.dtype("u1"), 1),
        [np.dtype("u1")],
        {"a": (1, (np.dtype("u1"),))},
        np.ndarray,
        np.array([1.5]),
        np.array(["a"]),
        np.array([b"a"]),
        np.array([True]),
        np.array([{}], dtype=object),
        np.array([1], dtype=">i4"),
        np.array([1], dtype="u8"),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.zeros(2, dtype=[("a", "u1")]),
        np.array([[1]]).view(np.recarray),
        {1: "a number for a key"},
        {("a",): "a tuple for a key"},
        2**3000,
    ],
    ids=lambda value: type(value).__name__,  # the text of some is not the same in every process
)
def test_other_things_are_refused(value: object, protocol: int) -> None:
    with pytest.raises(ValueError, match=r"only plain data|no single value"):
        unpickle(pickle.dumps(value, protocol))


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (b"cos\nsystem\n", "'os.system'"),
        (text("posix") + text("system") + b"\x93", "'posix.system'"),
        (b"K\x01K\x01\x93", "'no text'"),
        (b"cnumpy\nload\n", "'numpy.load'"),
        (b"cnumpy.core.multiarray\nscalar\n", "'numpy.core.multiarray.scalar'"),
        (b"c" + b"a" * 1000 + b"\n\n", "a" * 100),
        (b"cnumpy\ndtype\n)\x81", "NEWOBJ"),
        (b"cnumpy\ndtype\n)}\x92", "NEWOBJ_EX"),
        (b"(inumpy\ndtype\n", "INST"),
        (b"(cnumpy\ndtype\no", "OBJ"),
        (b"\x82\x01", "EXT1"),
        (b"\x83\x01\0", "EXT2"),
        (b"\x84\x01\0\0\0", "EXT4"),
        (b"Pid\n", "PERSID"),
        (b"NQ", "BINPERSID"),
        (b"\x97", "NEXT_BUFFER"),
        (b"N\x98", "READONLY_BUFFER"),
        (b"N0", "POP"),
        (b"NNR", "a call"),
        (b"cnumpy\nndarray\n(K\x01\x85tR", "a call of 'ndarray'"),
        (b"cnumpy\ndtype\n" + text("u1") + b"\x85R", "a call of 'dtype'"),
        (b"c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R", "a call of 'bytes'"),
        *(
            (b"c_codecs\nencode\n" + text("a") + text(codec) + b"\x86R", "a call of 'encode'")
            for codec in ("rot13", "zlib", "utf-8", "latin-1")
        ),
        (b"N}b", "an object with a state"),
        (b"cnumpy\ndtype\n}" + text("__setstate__") + b"Nsb", "an object with a state"),
        (b"cnumpy\ndtype\nN}" + text("__reduce__") + b"Ns\x86b", "an object with a state"),
        (b"]}" + text("__class__") + b"Nsb", "an object with a state"),
        (b"NNa", "a list of what is not data"),
        (b"]cnumpy\ndtype\na", "a list of what is not data"),
        (b"]" + text("a") + b"Ns", "a dict whose keys"),
        (b"}NNs", "a dict whose keys"),
        (b"}(" + text("a") + b"u", "a dict whose keys"),
    ],
)
def test_what_is_refused_is_named(program: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=f"{named}.*; only plain data and arrays of integers are read"):
        unpickle(b"\x80\x04" + program + b".")


LIMITED = """
import resource, sys, time
from pathlib import Path
from secateur.data.unpickle import unpickle

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 400 * 2**20,) * 2)
for name in sys.argv[1:]:
    started = time.monotonic()
    try:
        unpickle(Path(name).read_bytes())
        print("read")
    except ValueError as error:
        print(error)
    assert time.monotonic() - started < 10, name
"""


def sized(opcode: bytes, width: int, size: int) -> bytes:
    return opcode + size.to_bytes(width, "little") + b"abc"


def bombs() -> dict[str, tuple[bytes, str | None]]:
    """Small files that ask for much, and what is said of them."""
    cut, much, steps = None, "much more data than its own size", "more than 1,000,000 steps"
    tuples = b")q\0" + b"h\0\x86q\0" * 60
    dtype = pickle.dumps(np.dtype("u1"), 2)[2:-1]
    megabyte = b"a" * 2**20
    array = b"h\x32(h\x33h\x34(J\0\0\x10\0tX\x01\0\0\0CtR"
    encoded = b"h\x32h\x33h\x34\x86R"
    collisions = b"".join(b"\x8a\x14" + (k * (2**61 - 1)).to_bytes(20, "little") + b"N" for k in range(100_000))
    return {
        "put far away": (b"\x80\x02Nr\xff\xff\xff\x7f.", "read"),
        "put farthest": (b"\x80\x02Nr\xff\xff\xff\xff.", "read"),
        "long": (sized(b"\x8b", 4, 2**31 - 1), cut),
        "digits": (b"L" + b"9" * 1_000_000 + b"L\n.", cut),
        "bytes": (sized(b"B", 4, 2**32 - 1), cut),
        "more bytes": (sized(b"\x8e", 8, 2**62), cut),
        "most bytes": (sized(b"\x8e", 8, 2**64 - 1), cut),
        "bytearray": (sized(b"\x96", 8, 2**40), cut),
        "text": (sized(b"X", 4, 2**32 - 1), cut),
        "more text": (sized(b"\x8d", 8, 2**63 - 1), cut),
        "text of Python 2": (sized(b"T", 4, 2**31 - 1), cut),
        "negative": (sized(b"T", 4, 2**32 - 1), cut),
        "frame": (b"\x80\x04\x95" + b"\xff" * 8 + b"N.", "read"),
        "steps": (b"]\x94" * 1_000_000, steps),
        "deep lists": (b"]" * 100_000 + b"a" * 99_999 + b".", "read"),
        "deep tuples": (b")" + b"\x85" * 100_000 + b".", "read"),
        "deep arguments": (b"cnumpy\ndtype\n" + b"\x85" * 100_000 + b".", "single value"),
        "wide tuples": (tuples + b".", "read"),
        "wide key": (b"}" + tuples + b"Ns.", "a dict whose keys"),
        "wide keys": (b"}(" + tuples + b"N" + tuples + b"Nu.", "a dict whose keys"),
        "wide name": (tuples + b"h\0\x93.", "'no text'"),
        "wide arguments": (b"cnumpy\ndtype\n" + tuples + b"h\0h\0\x87R.", "a call of 'dtype'"),
        "wide state": (dtype + tuples + b"b.", "an object with a state"),
        "wide shape": (
            b"cnumpy.core.numeric\n_frombuffer\n(C\x01a" + dtype + tuples + b"X\x01\0\0\0CtR.",
            "does not fit its 1 bytes",
        ),
        "colliding keys": (b"}(" + collisions + b"u.", "a dict whose keys"),
        "arrays": (
            b"cnumpy.core.numeric\n_frombuffer\nq\x32"
            + (b"B\0\0\x10\0" + megabyte + b"q\x33" + dtype + b"q\x34" + b"](" + array * 10_000 + b"e."),
            much,
        ),
        "encoded": (
            b"c_codecs\nencode\nq\x32X\0\0\x10\0" + megabyte + b"q\x33" + text("latin1") + b"q\x34" + encoded * 10_000,
            much,
        ),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited in the way of Linux")
def test_memory_and_time_are_bounded(tmp_path: Path) -> None:
    wanted = bombs()
    for name, (data, _) in wanted.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", LIMITED, *wanted]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    for (name, (_, message)), line in zip(wanted.items(), done.stdout.splitlines(), strict=True):
        assert line != "read" if message is None else message in line, name


def test_far_away_values_come_back() -> None:
    assert unpickle(b"\x80\x02](K\x07r\xff\xff\xff\x7fj\xff\xff\xff\x7fe.") == [7, 7]
