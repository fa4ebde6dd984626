"""Read the data in a pickle, as CIFAR's files are, without running any program in it.

pickletools takes the file apart, and an interpreter of our own acts on the opcodes of plain data. It imports and calls
nothing: the few functions with which arrays are pickled stay names, and are carried out here. Time and memory are
bounded, whatever the bytes.
"""

from __future__ import annotations

import math
import pickletools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

_MAX_STEPS = 1_000_000
"""CIFAR-100's 50,000 rows with names and two labels take half of it in the most verbose protocol."""

# What an opcode pushes, given its argument. Text of Python 2, which pickletools gives as Latin-1, stays bytes.
_PUSHES: dict[str, Callable[..., object]] = {
    **dict.fromkeys(("BININT1", "BININT2", "BININT", "BINFLOAT", "LONG1"), lambda number: number),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), lambda text: text),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"), bytes),
    **dict.fromkeys(("SHORT_BINSTRING", "BINSTRING"), lambda text: text.encode("latin-1")),
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}

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

    >>> import pickle
    >>> unpickle(pickle.dumps({"labels": [3, 1, 4]}))
    {'labels': [3, 1, 4]}
    """
    interpreter = _Interpreter(len(data))
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number >= _MAX_STEPS:
                raise ValueError(f"more than {_MAX_STEPS:,} steps")
            interpreter.step(opcode.name, argument)
    except IndexError as error:
        raise ValueError("an empty stack where it takes a value") from error
    return interpreter.result()


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


class _Interpreter:
    def __init__(self, size: int) -> None:
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}
        # Bytes that calls may copy: those of an array are decoded from text once, and made numbers once.
        self.room = 2 * size

    def result(self) -> object:
        if len(self.stack) != 1 or self.marks or not _is_data(self.stack):
            raise ValueError("no single value at its end")
        return self.stack[0]

    def step(self, opcode: str, argument: object) -> None:
        if opcode in _PUSHES:
            self.stack.append(_PUSHES[opcode](argument))
        elif opcode in _TUPLES:
            self.push_tuple([self.stack.pop() for _ in range(_TUPLES[opcode])][::-1])
        else:
            self.act(opcode, argument)

    def act(self, opcode: str, argument: object) -> None:
        match opcode, argument:
            case "PROTO", int(protocol):
                if not 2 <= protocol <= 5:
                    raise ValueError(f"protocol {protocol} of pickle, and 2 to 5 can be read")
            case (("FRAME" | "STOP"), _):
                pass
            case "MARK", _:
                self.marks.append(len(self.stack))
            case "TUPLE", _:
                self.push_tuple(self.pop_to_mark())
            case "APPEND", _:
                self.extend([self.stack.pop()])
            case "APPENDS", _:
                self.extend(self.pop_to_mark())
            case "SETITEM", _:
                self.update([self.stack.pop(), self.stack.pop()][::-1])
            case "SETITEMS", _:
                self.update(self.pop_to_mark())
            case (("BINPUT" | "LONG_BINPUT"), int(index)):
                self.memo[index] = self.stack[-1]
            case "MEMOIZE", _:
                self.memo[len(self.memo)] = self.stack[-1]
            case (("BINGET" | "LONG_BINGET"), int(index)):
                self.recall(index)
            case "GLOBAL", str(name):
                self.push_name(name.replace(" ", "."))
            case "STACK_GLOBAL", _:
                name, module = self.stack.pop(), self.stack.pop()
                are_text = isinstance(module, str) and isinstance(name, str)
                self.push_name(f"{module}.{name}" if are_text else "no text")
            case "REDUCE", _:
                arguments = self.stack.pop()
                self.stack[-1] = self.call(self.stack[-1], arguments)
            case "BUILD", _:
                state = self.stack.pop()
                self.stack[-1] = self.fill(self.stack[-1], state)
            case _:
                _refuse(f"the opcode {opcode}")

    def pop_to_mark(self) -> list[object]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def push_tuple(self, items: list[object]) -> None:
        self.stack.append(tuple(items) if _is_data(items) else _Arguments(items))

    def push_name(self, name: str) -> None:
        if name not in _NAMES:
            _refuse(repr(name[:100]))
        self.stack.append(_Name(_NAMES[name]))

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
