"""Copies of a model: what copy.deepcopy gives, in a fraction of the time.

A model that is copied many times, as the probe does, is written down once; its copies are read from that.
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from secateur.channels.guard import check_module
from secateur.errors import InvalidModel

COPYING = "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__new__", "__slots__"
"""Methods by which a class says how to copy it."""
EMPTY = {dict, OrderedDict, set, list}
UNCHANGING = {int, float, bool, str, type(None)}
PLAIN = UNCHANGING | {tuple, list, dict, OrderedDict, set}
SHARED = type, types.FunctionType, types.BuiltinFunctionType, property, ref, torch.dtype, torch.device, Enum
"""What a copy shares with its original."""


def copy_with(model: nn.Module, contents: Iterable[tuple[Tensor, Tensor]]) -> nn.Module:
    """A copy of the model: for these parameters and buffers it has these tensors."""
    known = {
        id(tensor): nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
        for tensor, data in contents
    }
    return copy_model(model, known)


def copy_model(model: nn.Module, known: Mapping[int, Tensor] | None = None) -> nn.Module:
    """A copy of the model.

    known: tensors of the copy that exist already, by the ids of those that they stand for.
    """
    check_module(model)
    known = known or {}
    with suppress(Exception):
        if (written := WRITTEN.get(model)) is not None:
            return written.copy(dict(known))
    with suppress(Exception):
        return _copied(model, dict(known))
    # Tensors that a forward pass has left in the modules, as weight_norm does, can be copied without history only.
    left = [t for module in model.modules() for t in tree_leaves(vars(module)) if _has_history(t)]
    try:
        return _copied(model, {id(tensor): tensor.detach().clone() for tensor in left} | dict(known))
    except Exception as error:
        remedy = "Work without copies: analyze(probe=False) and shrink_"
        raise InvalidModel(f"{type(model).__name__} cannot be copied", got=error, remedy=remedy) from error


def write_down(model: nn.Module) -> nn.Module:
    """The same model, which must not change any more: its copies are made faster from now on, if that is possible."""
    with suppress(Exception):
        WRITTEN[model] = Written(model)
    return model


class Written(pickle.Pickler):
    """A model written down, without its tensors, functions and classes."""

    def __init__(self, model: nn.Module) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=4)
        self._held: list[Any] = []
        """What is not written down, or found by its name."""
        self._numbers: dict[int, int] = {}
        self.dump(model)
        self.clear_memo()  # which holds the model
        self._text = self._file.getvalue()

    def persistent_id(self, obj: Any) -> int | None:
        kind = type(obj)
        if kind in PLAIN:
            return None
        if isinstance(obj, SHARED) and _has_name(obj):
            return None
        if isinstance(obj, (Tensor, *SHARED)):
            if id(obj) not in self._numbers:
                self._numbers[id(obj)] = len(self._held)
                self._held.append(obj)
            return self._numbers[id(obj)]
        if hasattr(kind, "__deepcopy__"):
            raise pickle.PicklingError(f"{kind.__name__} says itself how it is copied")
        return None

    def reducer_override(self, obj: Any) -> Any:
        # By its name it would be another method, where an attribute hides it.
        return (types.MethodType, (obj.__func__, obj.__self__)) if type(obj) is types.MethodType else NotImplemented

    def copy(self, memo: dict[int, Any]) -> Any:
        """A copy.

        memo: parts of the copy that exist already, by the ids of those that they stand for.
        """
        return _Reader(self._text, self._held, memo).load()


class _Reader(pickle.Unpickler):
    def __init__(self, text: bytes, held: list[Any], memo: dict[int, Any]) -> None:
        super().__init__(io.BytesIO(text))
        self._held = held
        self._memo = memo

    def persistent_load(self, pid: int) -> Any:
        value = self._held[pid]
        return _copied(value, self._memo) if isinstance(value, Tensor) else value


WRITTEN: WeakKeyDictionary[nn.Module, Written] = WeakKeyDictionary()


def _copied(value: Any, memo: dict[Any, Any]) -> Any:
    kind = type(value)
    if kind in UNCHANGING or (kind is tuple and all(type(entry) in UNCHANGING for entry in value)):
        return value
    if (known := memo.get(id(value))) is not None:
        return known
    if kind in EMPTY and not value:
        new = memo[id(value)] = kind()
    elif kind is dict and all(type(key) is str for key in value):
        new = memo[id(value)] = {}
        new.update((key, _copied(entry, memo)) for key, entry in value.items())
    elif kind is nn.Parameter:
        new = value.__deepcopy__(memo)  # what copy.deepcopy does in the end
    elif kind is Tensor and _is_bare(value):
        new = memo[id(value)] = _copied_tensor(value, memo)
    elif isinstance(value, nn.Module) and _is_plain(type(value)):
        new = memo[id(value)] = type(value).__new__(type(value))
        entries = vars(value).items()
        new.__setstate__({name: e if type(e) in UNCHANGING else _copied(e, memo) for name, e in entries})
    else:
        new = copy.deepcopy(value, memo)
    return new


def _has_name(value: Any) -> bool:
    """Whether it is a function or class that is found by its name."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    return found is not None and getattr(found, getattr(value, "__qualname__", ""), None) is value


def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether the class leaves it to Python how its modules are copied."""
    return all(getattr(kind, name, None) is getattr(nn.Module, name, None) for name in COPYING)


def _is_bare(tensor: Tensor) -> bool:
    """Whether it is numbers in memory and nothing else."""
    more = tensor.requires_grad or tensor.grad is not None or vars(tensor)
    more = more or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return not more and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _copied_tensor(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """What its `__deepcopy__` gives: tensors that share memory do so in the copy."""
    memory = tensor.untyped_storage()
    known = memo.setdefault("torch", {})
    if memory._cdata not in known:
        known[memory._cdata] = memory.clone()
    return tensor.new_empty(0).set_(known[memory._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())


def _has_history(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_leaf
