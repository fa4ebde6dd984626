"""Read the data in a pickle, as CIFAR's files are, without running any program in it.

This is an interpreter of its own. It has no opcode that imports or calls: the few functions with which arrays are
pickled stay names, and are carried out here. Time and memory are bounded, whatever the bytes.
"""

from __future__ import annotations

import math
import pickle
import pickletools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import NoReturn

import torch
from torch import Tensor

_MAX_STEPS = 1_000_000
"""CIFAR-100's 50,000 rows with names and two labels take half of it in the most verbose protocol."""

_NUMBERS = {
    pickle.BININT1: Struct("<B"),
    pickle.BININT2: Struct("<H"),
    pickle.BININT: Struct("<i"),
    pickle.BINFLOAT: Struct(">d"),
}


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


# The number of bytes of the length, and what is made of the bytes after it. Text of Python 2 stays bytes.
_SIZED: dict[bytes, tuple[int, Callable[[bytes], object]]] = {
    pickle.SHORT_BINSTRING: (1, bytes),
    pickle.BINSTRING: (4, bytes),
    pickle.SHORT_BINBYTES: (1, bytes),
    pickle.BINBYTES: (4, bytes),
    pickle.BINBYTES8: (8, bytes),
    pickle.BYTEARRAY8: (8, bytes),
    pickle.SHORT_BINUNICODE: (1, bytes.decode),
    pickle.BINUNICODE: (4, bytes.decode),
    pickle.BINUNICODE8: (8, bytes.decode),
    pickle.LONG1: (1, _long),
}
_FRESH: dict[bytes, Callable[[], object]] = {
    pickle.EMPTY_DICT: dict,
    pickle.EMPTY_LIST: list,
    pickle.EMPTY_TUPLE: tuple,
    pickle.NONE: lambda: None,
    pickle.NEWTRUE: lambda: True,
    pickle.NEWFALSE: lambda: False,
}
_TUPLES = {pickle.TUPLE1: 1, pickle.TUPLE2: 2, pickle.TUPLE3: 3}

# numpy has renamed its modules; in protocol 2 Python 3 writes bytes as text and a call.
_NAMES = {
    "numpy.core.multiarray._reconstruct": "reconstruct",
    "numpy._core.multiarray._reconstruct": "reconstruct",
    "numpy.core.numeric._frombuffer": "frombuffer",
    "numpy._core.numeric._frombuffer": "frombuffer",
    "numpy.ndarray": "ndarray",
    "numpy.dtype": "dtype",
    "_codecs.encode": "encode",
    "__builtin__.bytes": "bytes",
}
_DTYPES = {"u1": torch.uint8, "i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64}
_NATIVE = {"little": "<", "big": ">"}[sys.byteorder]
_MAX_DIMENSIONS = 32


def unpickle(data: bytes) -> object:
    """The data in a pickle of protocol 2 to 5, with arrays as tensors; raises ValueError for what is not allowed.

    >>> unpickle(pickle.dumps({"labels": [3, 1, 4]}))
    {'labels': [3, 1, 4]}
    """
    try:
        return _Machine(data).run()
    except IndexError as error:
        raise ValueError("an empty stack where it takes a value") from error
    except UnicodeError as error:
        raise ValueError("text in another encoding") from error


@dataclass(frozen=True)
class _Name:
    """A function or a class of numpy or Python, by name only."""

    name: str


@dataclass
class _Dtype:
    code: str
    order: str = ""


@dataclass
class _Array:
    """An array that may not be filled yet; a pickle stores it before its contents are known."""

    tensor: Tensor | None = None


class _Arguments(tuple[object, ...]):
    """A tuple with something that is not data."""


_DATA = {dict, list, tuple, bytes, str, int, float, bool, type(None), Tensor}


def _is_data(items: list[object]) -> bool:
    return {*map(type, items)} <= _DATA


class _Machine:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        # Bytes that calls may copy: those of an array are decoded from text once, and made numbers once.
        self.room = 2 * len(data)

    def run(self) -> object:
        for _ in range(_MAX_STEPS):
            opcode = self.read(1)
            if opcode == pickle.STOP:
                break
            self.step(opcode)
        else:
            raise ValueError(f"more than {_MAX_STEPS:,} steps")
        if len(self.stack) != 1 or self.marks or not _is_data(self.stack):
            raise ValueError("no single value at its end")
        return self.stack[0]

    def step(self, opcode: bytes) -> None:
        if opcode in _NUMBERS:
            (number,) = _NUMBERS[opcode].unpack(self.read(_NUMBERS[opcode].size))
            self.stack.append(number)
        elif opcode in _SIZED:
            width, decode = _SIZED[opcode]
            self.stack.append(decode(self.read(self.read_number(width))))
        elif opcode in _FRESH:
            self.stack.append(_FRESH[opcode]())
        elif opcode in _TUPLES:
            self.push_tuple([self.stack.pop() for _ in range(_TUPLES[opcode])][::-1])
        else:
            self.act(opcode)

    def act(self, opcode: bytes) -> None:
        match opcode:
            case pickle.PROTO:
                protocol = self.read_number(1)
                if not 2 <= protocol <= 5:
                    raise ValueError(f"protocol {protocol} of pickle, and 2 to 5 can be read")
            case pickle.FRAME:  # a hint for readers of streams
                self.read(8)
            case pickle.MARK:
                self.marks.append(len(self.stack))
            case pickle.TUPLE:
                self.push_tuple(self.pop_to_mark())
            case pickle.APPEND:
                self.extend([self.stack.pop()])
            case pickle.APPENDS:
                self.extend(self.pop_to_mark())
            case pickle.SETITEM:
                self.update([self.stack.pop(), self.stack.pop()][::-1])
            case pickle.SETITEMS:
                self.update(self.pop_to_mark())
            case pickle.BINPUT:
                self.memo[self.read_number(1)] = self.stack[-1]
            case pickle.LONG_BINPUT:
                self.memo[self.read_number(4)] = self.stack[-1]
            case pickle.MEMOIZE:
                self.memo[len(self.memo)] = self.stack[-1]
            case pickle.BINGET:
                self.recall(self.read_number(1))
            case pickle.LONG_BINGET:
                self.recall(self.read_number(4))
            case pickle.GLOBAL:
                self.push_name(self.read_line(), self.read_line())
            case pickle.STACK_GLOBAL:
                name, module = self.stack.pop(), self.stack.pop()
                self.push_name(module, name)
            case pickle.REDUCE:
                arguments = self.stack.pop()
                self.stack[-1] = self.call(self.stack[-1], arguments)
            case pickle.BUILD:
                state = self.stack.pop()
                self.stack[-1] = self.fill(self.stack[-1], state)
            case _:
                names = (known.name for known in pickletools.opcodes if known.code == opcode.decode("latin1"))
                _refuse(f"the opcode {next(names, opcode)}")

    def read(self, size: int) -> bytes:
        start, self.position = self.position, self.position + size
        if self.position > len(self.data):
            raise ValueError(f"an end after {len(self.data):,} bytes, in the middle of its data")
        return self.data[start : self.position]

    def read_number(self, width: int) -> int:
        return int.from_bytes(self.read(width), "little")

    def read_line(self) -> str:
        end = self.data.find(b"\n", self.position, self.position + 100)
        if end < 0:
            _refuse("a long name")
        return self.read(end + 1 - self.position)[:-1].decode()

    def pop_to_mark(self) -> list[object]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def push_tuple(self, items: list[object]) -> None:
        self.stack.append(tuple(items) if _is_data(items) else _Arguments(items))

    def push_name(self, module: object, name: object) -> None:
        full = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "no text"
        if full not in _NAMES:
            _refuse(repr(full[:100]))
        self.stack.append(_Name(_NAMES[full]))

    def extend(self, items: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is not list or not _is_data(items):
            _refuse("a list of what is not data")
        target.extend(items)

    def update(self, items: list[object]) -> None:
        target, keys, values = self.stack[-1], items[::2], items[1::2]
        # Keys of other types can collide, or take forever to hash.
        fits = len(keys) == len(values) and {*map(type, keys)} <= {bytes, str} and _is_data(values)
        if type(target) is not dict or not fits:
            _refuse("a dict whose keys are not text or whose values are not data")
        target.update(zip(keys, values, strict=True))

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise ValueError(f"a reference to value {index}, which it has not stored")
        value = self.memo[index]
        if isinstance(value, _Array) and value.tensor is not None:
            value = value.tensor
        self.stack.append(value)

    def call(self, function: object, arguments: object) -> object:
        # Each pattern checks the type before the value: comparing values from the file may be slow or fail.
        match function, arguments:
            case _Name("reconstruct"), (_Name("ndarray"), (int(0),), bytes(b"b")):
                return _Array()
            case _Name("frombuffer"), (bytes(raw), _Dtype() as dtype, tuple(shape), str("C" | "F" as order)):
                return self.tensor(shape, dtype, order == "F", raw)
            case _Name("dtype"), (str() | bytes() as code, int(0), int(1)):
                return _Dtype(_text(code))
            case _Name("encode"), (str(text), str("latin1")):
                self.spend(len(text))
                return text.encode("latin1")
            case _Name("bytes"), ():
                return b""
        _refuse(f"a call of {function.name!r} in an unknown way" if isinstance(function, _Name) else "a call")

    def fill(self, target: object, state: object) -> object:
        match target, state:
            case _Array() as array, (int(1), tuple(shape), _Dtype() as dtype, int(fortran), bytes(raw)):
                array.tensor = self.tensor(shape, dtype, bool(fortran), raw)
                return array.tensor
            case _Dtype() as dtype, (int(3), str() | bytes() as order, None, None, None, int(-1), int(-1), int(0)):
                dtype.order = _text(order)
                return dtype
        _refuse("an object with a state of its own")

    def tensor(self, shape: tuple[object, ...], dtype: _Dtype, fortran: bool, raw: bytes) -> Tensor:
        kind = _DTYPES.get(dtype.code)
        if kind is None or (kind.itemsize > 1 and dtype.order != _NATIVE):
            _refuse(f"an array of {dtype.order + dtype.code!r}")
        sizes = [size for size in shape if type(size) is int and size > 0]
        if len(sizes) != len(shape) or len(shape) > _MAX_DIMENSIONS or math.prod(sizes) * kind.itemsize != len(raw):
            raise ValueError(f"an array whose shape does not fit its {len(raw):,} bytes")
        self.spend(len(raw))
        # A copy, since tensors can be written to.
        flat = torch.frombuffer(bytearray(raw), dtype=kind)
        return flat.reshape(sizes[::-1]).permute([*range(len(sizes))][::-1]) if fortran else flat.reshape(sizes)

    def spend(self, size: int) -> None:
        self.room -= size
        if self.room < 0:
            raise ValueError("much more data than its own size")


def _text(text: str | bytes) -> str:
    """A short code, written as text or bytes."""
    return text[:8] if isinstance(text, str) else text[:8].decode("latin1")


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"{what}; only plain data and arrays of integers are read from a pickle")
