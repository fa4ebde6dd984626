"""The example input, however it is given, and what a model returns, however it is wrapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from secateur.nested import map_tensors

LEAVES = str, bytes, int, float, complex, type(None), type, range, torch.dtype, torch.device, nn.Module
"""Types that hold no tensors."""


@dataclasses.dataclass(frozen=True)
class Example:
    """Arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(example: Any) -> Example:
        """A tuple holds positional arguments, a dict keyword arguments, anything else is the one argument."""
        if isinstance(example, Example):
            return example
        if isinstance(example, tuple):
            return Example(example, {})
        if isinstance(example, dict):
            return Example((), example)
        return Example((example,), {})

    def __call__(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)

    def map(self, change: Callable[[Tensor], Tensor]) -> Example:
        return Example(map_tensors(self.args, change), map_tensors(self.kwargs, change))

    def to(self, precision: torch.dtype) -> Example:
        return self.map(lambda t: in_precision(t, precision))

    def on(self, device: torch.device) -> Example:
        return self.map(lambda t: t.to(device))

    def copied(self) -> Example:
        """A copy, so that a model that writes into its input leaves the caller's alone."""
        return self.map(lambda t: t.detach().clone())

    def repeated(self) -> Example:
        """Twice the batch, for training mode: tensors whose first axis is that of the first tensor.

        Images are mirrored and darker the second time: norms over two that are the same would blow up rounding.
        """
        tensors = [t for t in self.tensors if t.dim() > 1]
        batch = tensors[0].shape[0] if tensors else None

        def twice(tensor: Tensor) -> Tensor:
            other = tensor.flip(-1) / 2 if tensor.dim() > 3 and tensor.is_floating_point() else tensor
            return torch.cat([tensor, other])

        return self.map(lambda t: twice(t) if t.dim() > 0 and t.shape[0] == batch else t)

    def batch(self, size: int, generator: torch.Generator | None = None) -> Example:
        """The first sample repeated: of tensors whose first axis is that of the first tensor.

        generator: if given, fractions are drawn at random instead.
        """
        first = self.tensors[0].shape[:1]

        def sized(tensor: Tensor) -> Tensor:
            batch = torch.cat([tensor[:1]] * size) if tensor.dim() and tensor.shape[:1] == first else tensor
            if generator is None or not tensor.is_floating_point():
                return batch
            return torch.randn(batch.shape, generator=generator).to(batch)

        return self.map(sized)

    def varied(self) -> Example:
        """With noise on constant tensors, such as zeros, which would hide differences."""
        generator = torch.Generator(device="cpu").manual_seed(0)

        def vary(tensor: Tensor) -> Tensor:
            plain = tensor.is_floating_point() and tensor.numel() > 1 and tensor.device.type != "meta"
            if not plain or bool((tensor != tensor.flatten()[0]).any()):
                return tensor
            noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype, device="cpu")
            return tensor + noise.to(tensor.device)

        return self.map(vary)

    @property
    def size(self) -> int:
        """The batch size."""
        return next(iter(self.tensors[0].shape), 1)

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_within((self.args, self.kwargs))

    def __str__(self) -> str:
        shapes = ["x".join(str(n) for n in t.shape) or "scalar" for t in self.tensors]
        return ", ".join(shapes) or "no tensors"


Calls = dict[str, list[Example]]
"""What to call a model with in each mode, "eval" and "train": the first that it can run on."""


def tensors_within(value: Any) -> list[Tensor]:
    """Every tensor in nested containers and plain objects, in order."""
    found: list[Tensor] = []
    seen: set[int] = set()

    def visit(item: Any) -> None:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, LEAVES) or type(item).__module__ == "numpy":
            return
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, Mapping):
                for entry in item.values():
                    visit(entry)
            elif isinstance(item, (Collection, Iterator)):
                for entry in item:
                    visit(entry)
            else:
                slots = [name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())]
                for entry in [*getattr(item, "__dict__", {}).values(), *(getattr(item, n, None) for n in slots)]:
                    visit(entry)

    visit(value)
    return found


def in_precision(tensor: Tensor, precision: torch.dtype) -> Tensor:
    """The tensor in that precision if it is floating-point or complex."""
    if tensor.is_complex():
        return tensor.to(torch.complex128 if precision == torch.float64 else torch.complex64)
    return tensor.to(precision) if tensor.is_floating_point() else tensor
