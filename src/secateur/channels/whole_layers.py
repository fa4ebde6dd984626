"""Torch's own layers in a recorded pass, noted as one step each: every operator that is watched takes its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn

CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d
NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
OPTIONS: dict[type[nn.Module], tuple[str, ...]] = {
    **dict.fromkeys(NORMS, ("training", "momentum", "eps")),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.Hardsigmoid), ("inplace",)),
    nn.LeakyReLU: ("inplace", "negative_slope"),
    nn.GELU: ("approximate",),
    nn.Sigmoid: (),
}
"""Layers beside convolutions, and their attributes that say what they do."""


class Recorder(Protocol):
    """What runs a layer and notes it; raises if the layer has to run operator by operator."""

    def convolve(self, module: Any, data: Tensor, forward: Callable[..., Tensor]) -> Tensor: ...

    def pass_through(self, module: nn.Module, data: Tensor, forward: Callable[..., Tensor]) -> Tensor: ...


@contextmanager
def as_one_step(recorder: Recorder) -> Iterator[None]:
    """Let this run torch's own convolutions, batch norms and activations as a whole, in this thread alone."""
    own: dict[Any, Any] = {kind: kind.forward for kind in (*CONVOLUTIONS, *OPTIONS)}
    # Not those that somebody has replaced.
    own = {kind: forward for kind, forward in own.items() if forward.__module__.startswith("torch.nn.modules.")}
    inherited = [kind for kind in own if "forward" not in vars(kind)]
    for kind, forward in own.items():
        run = recorder.convolve if kind in CONVOLUTIONS else recorder.pass_through
        kind.forward = _whole(kind, run, forward)
    try:
        yield
    finally:
        for kind, forward in own.items():
            if kind in inherited:
                del kind.forward
            else:
                kind.forward = forward


def _whole(kind: type[nn.Module], run: Callable[..., Tensor], forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    owner = get_ident()

    def whole(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Derived layers may do more; what raises is run again as it is, which notes where and why.
        if type(self) is kind and len(args) == 1 and not kwargs and get_ident() == owner and _is_plain(args[0]):
            try:
                with torch._C._DisableTorchDispatch():
                    return run(self, args[0], partial(forward, self))
            except Exception:
                pass
        return forward(self, *args, **kwargs)

    return whole


def _is_plain(data: Any) -> bool:
    """Whether an operator that is given this runs as it is, without autocast or a transform such as vmap."""
    plain = type(data) is Tensor and not torch._C._is_any_autocast_enabled()
    return plain and torch._C._functorch.maybe_current_level() is None  # pyright: ignore
