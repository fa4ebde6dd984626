"""Networks compiled by torch.compile, where that pays.

Whether it does is decided by counting, not by timing: a run that is resumed must decide the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from secateur.nested import tensors_in

COMPILED = 0.35
"""Seconds to compile a layer, forwards and backwards."""
SAVED_BY_VALUE, SAVED_BY_LAYER = 2.8e-12, 8e-6
"""Seconds that a training step saves for each value that a layer puts out, and for each layer. All three were measured
on an H200 with 16 cores, by ResNet-50 at 224 pixels and ResNet-56 at 32.
"""


class Compiled(nn.Module):
    """A network that is compiled for inputs of the shapes that come first, and computed as it is for others.

    Making one makes torch's compiler more careful in this process, for others too.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.shapes: list[tuple[torch.Size, torch.dtype]] | None = None
        _set_up_torch()
        vars(self)["compiled"] = torch.compile(network, dynamic=False)  # not a second child with the same tensors

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        shapes = _shapes((args, kwargs))
        self.shapes = self.shapes or shapes
        return (self.compiled if shapes == self.shapes else self.network)(*args, **kwargs)

    @property
    def training(self) -> bool:
        return self.network.training

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the network counts, which `train` sets too."""

    def __getattr__(self, name: str) -> Any:
        if name == "network":
            return super().__getattr__(name)
        return getattr(self.network, name)


def _set_up_torch() -> None:
    config: Any = torch._dynamo.config
    # Torch takes it for granted that the tensors and hooks of a module stay, and would not notice that others train.
    trusting = ("tensor_guards_with_matching_dict_tags", "nnmodule_hook_guards")
    for name in (*(f"skip_{what}" for what in trusting), "use_recursive_dict_tags_for_guards"):
        if hasattr(config, name):
            setattr(config, name, False)
    # Every cut, and every kind of work, means another one; beyond the limit networks would silently not be compiled.
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(config, name, max(getattr(config, name), 1000))


def pays(model: nn.Module, run: Callable[[], object], steps: int) -> bool:
    """Whether so many steps win back the time of compiling.

    run: computes the network once, for one batch.
    """
    values = 0

    def count(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal values
        values += output.numel() if isinstance(output, Tensor) else 0

    layers = [module for module in model.modules() if module._parameters and not any(module.children())]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    saved = SAVED_BY_VALUE * values + SAVED_BY_LAYER * len(layers)
    return steps * saved > 1.5 * COMPILED * len(layers)


@contextmanager
def unchanged(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Give tensors their values back."""
    before = [(tensor, tensor.clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


def _shapes(batch: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors_in(batch)]
