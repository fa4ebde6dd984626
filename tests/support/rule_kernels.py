"""CPU kernels for operators that need another device, so that their rules can be tested without it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _batch_norm(*args: Any) -> tuple[Tensor, ...]:
    return torch.native_batch_norm(*args)


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


def _attention_with(count: int, *places: int) -> Callable[..., tuple[Any, ...]]:
    """Attention that also returns `count` empty tensors, and zeros at these places among them."""

    def kernel(*args: Any, **options: Any) -> tuple[Any, ...]:
        out = _attention(*args, **options)
        rest: list[Any] = [out.new_empty(0) for _ in range(count)]
        for place in places:
            rest.insert(place, 0)
        return (out, *rest)

    return kernel


KERNELS: dict[str, Callable[..., Any]] = {
    "cudnn_batch_norm": lambda *args: (*_batch_norm(*args), args[0].new_empty(0)),
    "miopen_batch_norm": _batch_norm,
    "cudnn_grid_sampler": lambda x, grid: F.grid_sample(x, grid, align_corners=True),
    "mkldnn_max_pool2d": F.max_pool2d,
    "pin_memory": lambda x, device=None: x.view_as(x),
    "_scaled_dot_product_flash_attention": _attention_with(6, 3, 4),
    "_scaled_dot_product_cudnn_attention": _attention_with(6, 3, 4),
    "_scaled_dot_product_fused_attention_overrideable": _attention_with(6, 3, 4),
    "_scaled_dot_product_efficient_attention": _attention_with(3),
}


@contextmanager
def other_kernels() -> Iterator[None]:
    """Register the kernels."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in KERNELS.items():
            library.impl(name, kernel, "CPU")
        yield
