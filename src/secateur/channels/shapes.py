"""Run a network without its arithmetic: only shapes are right, at a fraction of the time."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("convolution", "mm", "addmm", "bmm", "baddbmm")
"""The operators that multiply and add."""
SIZED = ("view", "shape", "expand", "slice", "split", "narrow", "select", "strided", "repeat", "empty", "zeros", "ones")
"""Parts of the names of operators whose integers are sizes or positions, which change with the width."""
IN_PLACE = ("relu_", "hardtanh_", "silu_", "leaky_relu_", "hardswish_")
"""Activations that write into what they are given."""
VALUE_TAGS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
FEW = 16
"""Numbers in a tensor that are compared one by one."""


class EagerMode(TorchDispatchMode):
    """A dispatch mode that does not load the compiler, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def shape_only(operator: str, args: tuple[Any, ...]) -> Tensor | None:
    """Zeros of the shape and layout that a heavy operator would give; None for operators that must run."""
    if operator == "convolution":
        data, weight, _, stride, padding, dilation, transposed, output_padding, groups = args
        channels = weight.shape[1] * groups if transposed else weight.shape[0]
        shape = [data.shape[0], channels]
        for i, (size, kernel) in enumerate(zip(data.shape[2:], weight.shape[2:], strict=True)):
            s, p, d = (values[min(i, len(values) - 1)] for values in (stride, padding, dilation))
            extent = d * (kernel - 1) + 1
            last = output_padding[min(i, len(output_padding) - 1)]
            shape.append((size - 1) * s - 2 * p + extent + last if transposed else (size + 2 * p - extent) // s + 1)
        if data.shape[1] != (weight.shape[0] if transposed else weight.shape[1] * groups) or min(shape) <= 0:
            return None
        formats = {memory_format(data), memory_format(weight)} - {torch.contiguous_format}
        result = torch.zeros(shape, dtype=data.dtype, device=data.device)
        return result.to(memory_format=formats.pop()) if formats else result
    if operator in ("mm", "bmm", "addmm", "baddbmm"):
        left, right = args[-2:] if len(args) == 2 else args[1:3]
        if left.shape[-1] == right.shape[-2] and left.shape[:-2] == right.shape[:-2]:
            return left.new_zeros([*left.shape[:-1], right.shape[-1]])
    return None


def skipped(operator: str, args: tuple[Any, ...]) -> Any:
    """What an operator gives that leaves shapes as they are, without its arithmetic; None for others."""
    if operator in IN_PLACE:
        return args[0]
    if operator == "native_batch_norm":
        data, *vectors, training, _, _ = args
        fits = all(vector is None or vector.shape == data.shape[1:2] for vector in vectors)
        if fits and not training:
            return torch.zeros_like(data), data.new_empty(0), data.new_empty(0)
    return None


def memory_format(tensor: Tensor) -> torch.memory_format:
    """Contiguous or channels_last, whichever the tensor has."""
    if not tensor.is_contiguous():
        for dim, candidate in ((4, torch.channels_last), (5, torch.channels_last_3d)):
            if tensor.dim() == dim and tensor.is_contiguous(memory_format=candidate):
                return candidate
    return torch.contiguous_format


def channels_last(tensor: Tensor) -> Tensor:
    """The tensor in channels_last memory format, if it holds images or volumes."""
    wanted = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return tensor if wanted is None else tensor.contiguous(memory_format=wanted)


@cache
def is_sized(operator: str) -> bool:
    return any(word in operator for word in SIZED)


@cache
def name_of(func: Any) -> str:
    """The name of an operator; one of aten's goes without the namespace."""
    return func._schema.name.removeprefix("aten::")


@cache
def reads_values(func: Any) -> bool:
    """Whether what Python does next may depend on values."""
    return not func._schema.name.startswith("aten::") or any(tag in func.tags for tag in VALUE_TAGS)


@cache
def gives_any_shape(func: Any) -> bool:
    """Whether the shape of its result depends on values."""
    return torch.Tag.dynamic_output_shape in func.tags


def numbers(operator: str, args: tuple[Any, ...], values: list[Any]) -> list[Any]:
    """Arguments that do not depend on the width: kernel sizes, strides, factors and so on.

    values: all that the operator was called with, those in lists among them.
    """
    if operator == "convolution":
        return [args[1].shape[2:], *args[3:6]]
    if operator == "lift_fresh":
        known = args[0].numel() <= FEW and args[0].device.type != "meta"
        return args[0].flatten().tolist() if known else []  # what torch.tensor was called with
    kinds = float if is_sized(operator) else (int, float, str)
    return [value for value in values if isinstance(value, kinds)]


def has_mask(indices: list[Tensor | None]) -> bool:
    """Whether an index picks by value: then even the shape of the result depends on values."""
    return any(index is not None and is_mask(index) for index in indices)


def is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)
