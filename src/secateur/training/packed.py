"""A state as files hold it: tensors, and JSON with their places."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from secateur.errors import InvalidSetting

DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
STORED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
STORED |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
"""Data types of every version of safetensors; tensors of others are stored as bytes."""

FORMATS = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}


class Packed:
    """A state in parts: its tensors on the CPU, each once, and a JSON skeleton with their places.

    In the skeleton an object has one key: {"dict": a dict}, {"tensor": its number}, or {"float": "nan" or "inf"}.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.formats: dict[str, str] = {}
        self.bytes: dict[str, list[Any]] = {}
        self._names: dict[object, str] = {}
        self._storages: set[int] = set()
        self.skeleton = self._pack(state, "state")

    def _pack(self, value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": self._name(value, where)}
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise InvalidSetting(f"a checkpoint cannot hold a key of {where}", got=repr(key), wanted="a string")
            return {"dict": {key: self._pack(item, f"{where}[{key!r}]") for key, item in value.items()}}
        if isinstance(value, list | tuple):
            return [self._pack(item, f"{where}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(float(value))}
        if value is None or isinstance(value, str | int | float):
            return value
        wanted = "a tensor, number, string, list or dict"
        raise InvalidSetting(f"a checkpoint cannot hold {where}", got=type(value).__name__, wanted=wanted)

    def _name(self, tensor: Tensor, where: str) -> str:
        """Its number; tensors that are the same view of the same memory have the same."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            got = "a sparse, quantized or meta tensor"
            raise InvalidSetting(f"a checkpoint cannot hold {where}", got=got, wanted="a dense tensor")
        if tensor.numel():
            view = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()
            key: object = (*view, tensor.dtype, tensor.is_conj(), tensor.is_neg())
        else:
            key = id(tensor)  # all empty tensors lie at the same address
        if (name := self._names.get(key)) is None:
            name = self._names[key] = str(len(self._names))
            self._store(name, tensor.detach())
        return name

    def _store(self, name: str, tensor: Tensor) -> None:
        if memory_format := format_of(tensor):
            self.formats[name] = memory_format
        tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        if tensor.dtype not in STORED:
            self.bytes[name] = [str(tensor.dtype), list(tensor.shape)]
            tensor = tensor.reshape(-1).view(torch.uint8)
        storage = tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that overlap.
        self.tensors[name] = tensor.clone() if storage in self._storages else tensor
        self._storages.add(storage)


def unpack(node: Any, tensors: dict[str, Tensor]) -> Any:
    """The value that a node of the skeleton stands for."""
    if isinstance(node, list):
        return [unpack(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    match list(node.items()):
        case [("dict", dict(items))]:
            return {key: unpack(item, tensors) for key, item in items.items()}
        case [("tensor", str(name))] if name in tensors:
            return tensors[name]
        case [("float", str(text))]:
            return float(text)
    raise ValueError("state.json holds something that is neither a dict, nor a tensor, nor a float")


def format_of(tensor: Tensor) -> str | None:
    """The memory format, unless it is contiguous."""
    name = {4: "channels_last", 5: "channels_last_3d"}.get(tensor.dim())
    if name is None:
        return None
    # With an axis of size one a tensor fits several formats; its strides still decide which kernels run.
    strides = torch.empty_like(tensor, device="meta").stride()
    plain = torch.empty(tensor.shape, device="meta").stride()
    other = torch.empty(tensor.shape, device="meta", memory_format=FORMATS[name]).stride()
    return name if strides == other != plain else None
