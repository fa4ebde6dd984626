"""Run a network without its arithmetic: only shapes are right, at a fraction of the time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = ("convolution", "mm", "addmm", "bmm", "baddbmm")
"""The operators that multiply and add."""
SIZED = ("view", "shape", "expand", "slice", "split", "narrow", "select", "strided", "repeat", "empty", "zeros", "ones")
"""Parts of the names of operators whose integers are sizes or positions, which change with the width."""


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


def _numbers(operator: str, args: tuple[Any, ...], values: list[Any]) -> list[Any]:
    """Arguments that do not depend on the width: kernel sizes, strides, factors and so on."""
    if operator == "convolution":
        return [args[1].shape[2:], *args[3:6]]
    kinds = float if any(word in operator for word in SIZED) else (int, float, str)
    return [value for value in values if isinstance(value, kinds)]


class ShapesOnly(EagerMode):
    """Run a network without its arithmetic: convolutions and matrix products give zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        """The operators that were run."""
        self.addresses: set[int] = set()
        """Memory addresses of their arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        values = tree_leaves((args, kwargs))
        given = (value for value in values if isinstance(value, Tensor))
        self.addresses |= {tensor.data_ptr() for tensor in given if tensor.layout is torch.strided and tensor.numel()}
        operator = name.partition("::")[2]
        self.names.append(f"{name}{_numbers(operator, args, values)}")
        result = shape_only(operator, args)
        return func(*args, **kwargs) if result is None else result


def has_mask(indices: list[Tensor | None]) -> bool:
    """Whether an index picks by value: then even the shape of the result depends on values."""
    return any(index is not None and is_mask(index) for index in indices)


def is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)
