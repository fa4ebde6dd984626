"""Run two networks of the same structure side by side, and stop both at every convolution and linear layer."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Queue
from threading import Thread
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from secateur.channels.example import Example
from secateur.channels.shrink import copy_model
from secateur.modes import evaluating

KINDS: dict[Any, str] = {
    F.linear: "linear",
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), "convolution"),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), "transposed"),
}
REST = {
    "linear": ("bias",),
    "convolution": ("bias", "stride", "padding", "dilation", "groups"),
    "transposed": ("bias", "stride", "padding", "output_padding", "groups", "dilation"),
}
"""The arguments that follow the input and the weight."""


@dataclass
class Layer:
    """A call of a convolution or linear layer."""

    kind: str
    """linear, convolution or transposed."""
    name: str
    """Of its weight."""
    data: Tensor
    """(images, channels, ...) for a convolution, (..., features) for a linear layer."""
    weight: Tensor
    output: Tensor | None
    """None before the layer has run."""
    bias: Tensor | None = None
    groups: int = 1
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Before and after the data, by axis."""
    dilation: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()

    @property
    def linear(self) -> bool:
        return self.kind == "linear"

    @property
    def transposed(self) -> bool:
        return self.kind == "transposed"

    @property
    def reads(self) -> int:
        """Inputs of one filter, over all positions of its kernel."""
        outputs = self.weight.shape[1] * self.groups if self.transposed else self.weight.shape[0]
        return self.weight.numel() // outputs


def side_by_side(
    one: nn.Module,
    other: nn.Module,
    batches: Sequence[Example],
    keeps: Callable[[str, str], None],
    gone: Container[str] = (),
) -> Iterator[list[tuple[Layer, Layer]]]:
    """The layers in the order in which they run, each with the calls of both networks for every batch. The first
    network waits before the layer, the second one after it, until the next is asked for. Where the networks run in
    different orders it ends, and calls `keeps` with the names and why.

    All batches wait at the same layer, and what they need to go on stays in memory.

    gone: weights that only the second network has; its layers with these do not wait.
    """
    runners: list[_Runner] = []
    with evaluating(one), evaluating(other):
        try:
            for batch in batches:
                runners.append(_Runner(one, batch, waits_after=False))
                runners.append(_Runner(other, batch, waits_after=True, passes=gone))
            while True:
                found = [
                    (first.next(), second.next()) for first, second in zip(runners[::2], runners[1::2], strict=True)
                ]
                layers = [(a, b) for a, b in found if a is not None and b is not None]
                if len(layers) < len(found):
                    return
                names = {layer.name for pair in layers for layer in pair}
                if len(names) > 1:
                    for name in sorted(names):
                        keeps(name, "the networks run in different orders from here on")
                    return
                yield layers
        finally:
            for runner in runners:
                runner.stop()


@dataclass
class Uses:
    """What a forward pass does with a weight of a convolution or linear layer."""

    layers: list[tuple[str, int]] = field(default_factory=list)
    """The kind and the groups of each layer that it is the weight of."""
    others: bool = False
    """Whether another operator reads it too."""


def find_uses(model: nn.Module, batch: Example) -> dict[str, Uses]:
    """The uses of every weight of a convolution or linear layer."""
    uses: dict[str, Uses] = {}

    def note(layer: Layer) -> None:
        uses.setdefault(layer.name, Uses()).layers.append((layer.kind, layer.groups))

    copied = _copy_of(model)
    with evaluating(copied), _Survey(copied, note, waits_after=False) as survey:
        batch.copied()(copied)
    for name in survey.others & set(uses):
        uses[name].others = True
    return uses


def _copy_of(model: nn.Module) -> nn.Module:
    """Modules and buffers of its own, since a forward pass may write to them, with the same parameters."""
    return copy_model(model, {id(parameter): parameter for parameter in model.parameters()})


class _Stopped(BaseException):
    """There is nothing left to do."""


class _Runner(Thread):
    """A forward pass that waits at every layer until it may go on."""

    def __init__(self, model: nn.Module, batch: Example, waits_after: bool, passes: Container[str] = ()) -> None:
        super().__init__(daemon=True)
        self.passes = passes
        self.model, self.batch, self.waits_after = _copy_of(model), batch, waits_after
        self.found: Queue[Layer | BaseException | None] = Queue()
        self.goes_on: Queue[bool] = Queue()
        self.start()

    def run(self) -> None:
        try:
            self._wait()
            with torch.no_grad(), _Stops(self.model, self._pause, self.waits_after):
                self.batch.copied()(self.model)
            self.found.put(None)
        except BaseException as error:  # raised again where it is waited for
            self.found.put(error)

    def _pause(self, layer: Layer) -> None:
        if layer.name in self.passes:
            return
        self.found.put(layer)
        del layer
        self._wait()

    def _wait(self) -> None:
        if not self.goes_on.get():
            raise _Stopped

    def next(self) -> Layer | None:
        """Go on to the next layer, one network and one batch at a time; None at the end."""
        self.goes_on.put(True)
        found = self.found.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def stop(self) -> None:
        self.goes_on.put(False)
        self.join()


class _Stops(TorchFunctionMode):
    """Calls `stop` before or after every convolution and linear layer whose weight is a parameter of the model."""

    def __init__(self, model: nn.Module, stop: Callable[[Layer], None], waits_after: bool) -> None:
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.stop, self.waits_after = stop, waits_after

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = KINDS.get(func)
        if kind is None:
            return func(*args, **kwargs)
        given = dict(zip(("input", "weight", *REST[kind]), args, strict=False)) | kwargs
        name = self.names.get(id(given["weight"]))
        if name is None or is_functorch_wrapped_tensor(given["input"]):
            return func(*args, **kwargs)
        if not self.waits_after:
            self.stop(_layer(kind, name, given, None))
        output = func(*args, **kwargs)
        if self.waits_after:
            self.stop(_layer(kind, name, given, output))
        return output


class _Survey(_Stops):
    """Notes also which parameters other operators read."""

    def __init__(self, model: nn.Module, stop: Callable[[Layer], None], waits_after: bool) -> None:
        super().__init__(model, stop, waits_after)
        self.others: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        read = {self.names[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self.names}
        if read and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # and not only its shape
            kwargs = kwargs or {}
            own = kwargs.get("weight", args[1] if len(args) > 1 else None) if func in KINDS else None
            if func in KINDS and is_functorch_wrapped_tensor(args[0] if args else kwargs["input"]):
                own = None  # within vmap and the like, whose tensors nothing outside can read
            self.others |= read - {self.names.get(id(own), "")}
        return result


def _layer(kind: str, name: str, given: dict[str, Any], output: Tensor | None) -> Layer:
    data, weight, bias = given["input"], given["weight"], given.get("bias")
    if kind == "linear":
        return Layer(kind, name, data, weight, output, bias)
    if data.dim() < weight.dim():
        data, output = data[None], output[None] if output is not None else None
    axes = weight.dim() - 2

    def numbers(option: str, default: int) -> tuple[int, ...]:
        value = given.get(option, default)
        values = (value,) if isinstance(value, int) else tuple(value)
        return values * axes if len(values) == 1 else values

    dilation, padding = numbers("dilation", 1), given.get("padding", 0)
    if isinstance(padding, str):
        same = [dilation[i] * (weight.shape[i + 2] - 1) * (padding == "same") for i in range(axes)]
        sides = tuple(size // 2 for size in same), tuple(size - size // 2 for size in same)
    else:
        sides = numbers("padding", 0), numbers("padding", 0)
    groups, extra = int(given.get("groups", 1)), numbers("output_padding", 0)
    return Layer(kind, name, data, weight, output, bias, groups, numbers("stride", 1), sides, dilation, extra)
