"""Tensors in nested containers, such as a batch or a model's arguments."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nesting of tuples, lists and dicts with `change` applied to every tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, change) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(v, change) for v in value)
    if type(value) is dict:
        return {k: map_tensors(v, change) for k, v in value.items()}
    if isinstance(value, (dict, UserDict)):
        changed = copy.copy(value)
        for k, v in value.items():
            changed[k] = map_tensors(v, change)
        return changed
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    found: list[Tensor] = []
    map_tensors(value, found.append)
    return found
