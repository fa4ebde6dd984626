"""Repair: re-fit the layers of a pruned network in closed form, from a few hundred unlabelled images.

The inputs that a layer has lost, and those that have drifted, are largely linear combinations of the inputs that it
still has. The whole and the pruned network run side by side, each on all images at once, and stop at every layer. There
the combination is fitted and folded into the layer's weight. So each layer is fitted to the inputs that the repaired
layers before it give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from queue import Queue
from threading import Thread
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secateur.channels.example import Example
from secateur.channels.plan import Plan
from secateur.channels.shrink import shrink
from secateur.errors import InvalidData

CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}
TRANSPOSED = {F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Strengths that are tried, relative to the mean square of the inputs; the best on images held out of the fit wins."""
RIDGE = 1e-4
"""The strength where there are too few images to hold any out."""
SAMPLES = 60_000
"""Positions of images that a layer is fitted on, at most."""
EVERY = 4
"""One of so many images is held out."""


@dataclass(frozen=True)
class Layer:
    """A call of a convolution or linear layer that is about to run."""

    name: str
    """Of its weight."""
    inputs: Tensor
    """(images, channels, positions)."""
    groups: int
    transposed: bool


def repair(
    model: nn.Module,
    plan: Plan,
    batches: Iterable[Any],
    *,
    images: int = 512,
    seed: int = 0,
    progress: Callable[[str], object] | None = None,
) -> nn.Module:
    """The model, cut by the plan and re-fitted without training. A copy; the model stays as it is.

    batches: unlabelled images: tensors, tuples of arguments, or a loader whose labels are ignored.
    images: how many of them to use. All go through the network at once, so that memory grows with them.
    progress: called with a line for every layer that keeps its plain cut, and why.
    """
    inputs = gather(batches, plan.graph.calls["eval"][0], images)
    cut = shrink(model, plan)
    repair_(cut, model, plan.remaining, plan.graph.axes, inputs, seed=seed, progress=progress)
    return cut


def gather(batches: Iterable[Any], example: Example, images: int) -> Example:
    """The arguments of one call with so many images; labels and other surplus parts of a batch are left out."""
    count, names = len(example.args), list(example.kwargs)
    found: list[Example] = []
    total = 0
    given: Iterable[Any] = [batches] if isinstance(batches, Tensor) else batches
    for batch in given:
        if names and not (isinstance(batch, Mapping) and set(names) <= set(batch)):
            raise InvalidData("a batch lacks inputs of the network", got=type(batch).__name__, wanted=", ".join(names))
        if names:
            found.append(Example((), {name: batch[name] for name in names}))
        else:
            values = list(batch.values()) if isinstance(batch, Mapping) else batch
            found.append(Example(tuple(values[:count]) if isinstance(values, (tuple, list)) else (values,), {}))
        total += found[-1].size
        if total >= images:
            break
    if not total:
        raise InvalidData("there are no images to repair with")
    joined = iter([torch.cat(parts)[:images] for parts in zip(*(each.tensors for each in found), strict=True)])
    return found[0].map(lambda tensor: next(joined))


@torch.no_grad()
def repair_(
    cut: nn.Module,
    whole: nn.Module,
    kept: Mapping[tuple[str, int], Tensor],
    channels: Mapping[tuple[str, int], Tensor],
    inputs: Example,
    *,
    seed: int = 0,
    progress: Callable[[str], object] | None = None,
) -> None:
    """Re-fit the layers of a cut network, in place, to the whole one.

    kept: the indices of the whole network that are left, of every axis of a weight that has lost some.
    channels: the channel number at each index of an axis, for linear layers behind a flatten.
    """
    say = progress or (lambda text: None)
    inputs = inputs.on(next(cut.parameters()).device)
    uses = _count_uses(cut, inputs)
    for name in sorted({name for name, weight in cut.named_parameters() if weight.dim() > 1} - set(uses)):
        say(f"{name} keeps its plain cut: it is not the weight of a convolution or linear layer")
    # A weight with several uses is fitted to all of them, so its moments must be there before it is used.
    shared: dict[str, Fit] = {}
    if any(count > 1 for count in uses.values()):
        for one, other in _side_by_side(cut, whole, inputs, say):
            fit = shared.get(one.name) or (
                _prepare(one, other, whole, kept, channels, say) if uses[one.name] > 1 else None
            )
            if fit is not None:
                shared[one.name] = fit
                fit.observe(one.inputs, other.inputs, seed)
        for name, fit in shared.items():
            fit.write_(cut.get_parameter(name))
    for one, other in _side_by_side(cut, whole, inputs, say):
        drifted = one.inputs.shape != other.inputs.shape or not torch.equal(one.inputs, other.inputs)
        fit = _prepare(one, other, whole, kept, channels, say) if drifted and uses[one.name] == 1 else None
        if fit is not None:
            fit.observe(one.inputs, other.inputs, seed)
            fit.write_(cut.get_parameter(one.name))


class Fit:
    """The weight of one layer as a function of the moments of its inputs.

    weight: of the whole network, for the outputs that are left: (groups, outputs, inputs, positions of the kernel).
    kept: the inputs that are left, within a group.
    """

    def __init__(self, weight: Tensor, kept: Tensor, arrange: Callable[[Tensor, bool], Tensor], restore: Any) -> None:
        self.weight, self.kept, self.arrange, self.restore = weight.double(), kept, arrange, restore
        groups, _, count, _ = weight.shape
        left = kept.numel()
        self.own = torch.zeros(2, groups, left, left, dtype=torch.float64, device=weight.device)
        """P P', of the images that are fitted and of those held out."""
        self.cross = torch.zeros(2, groups, left, count, dtype=torch.float64, device=weight.device)
        """P O'."""
        self.all = torch.zeros(2, groups, count, count, dtype=torch.float64, device=weight.device)
        """O O'."""
        self.select = torch.zeros(left, count, dtype=torch.float64, device=weight.device)
        self.select[torch.arange(left), kept] = 1

    def observe(self, inputs: Tensor, whole: Tensor, seed: int) -> None:
        """Add the moments of these inputs: (images, channels, positions)."""
        images, _, places = inputs.shape
        total = images * places
        device = inputs.device
        chosen = torch.arange(total, device=device)
        if total > SAMPLES:
            generator = torch.Generator().manual_seed(seed)
            chosen = torch.randint(total, (SAMPLES,), generator=generator).to(device).sort().values
        held = (chosen // places) % EVERY == EVERY - 1
        one, other = (data.movedim(1, -1).reshape(total, -1)[chosen] for data in (inputs, whole))
        for part, which in ((0, ~held), (1, held)):
            if not bool(which.any()):
                continue
            p = self.arrange(one[which], False).movedim(0, -1).double()
            o = self.arrange(other[which], True).movedim(0, -1).double()
            self.own[part] += p @ p.mT
            self.cross[part] += p @ o.mT
            self.all[part] += o @ o.mT

    def solve(self) -> Tensor:
        """The combination C, fitted on all images with the strength that is best on those held out."""
        plain = self.select.expand_as(self.cross[0])
        if not bool(self.all.isfinite().all() & self.own.isfinite().all()):
            return plain
        best = RIDGE
        if bool(self.all[1].any()):
            importance = torch.einsum("goit,gojt->gij", self.weight, self.weight)
            tried = {ridge: self._combination(self.own[0], self.cross[0], ridge) for ridge in RIDGES}
            errors = {ridge: self._error(combination, importance) for ridge, combination in tried.items()}
            best = min(errors, key=lambda ridge: errors[ridge])
            if not errors[best] < self._error(plain, importance):
                return plain
        return self._combination(self.own.sum(0), self.cross.sum(0), best)

    def _combination(self, own: Tensor, cross: Tensor, ridge: float) -> Tensor:
        """C = S + (P P' + r mean(diag) I)^-1 P (O - S' P)'."""
        scale = own.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-30)
        shifted = own + torch.diag_embed((ridge * scale)[:, None].expand(own.shape[:2]))
        missing = cross - own @ self.select
        factor, info = torch.linalg.cholesky_ex(shifted)
        if bool((info != 0).any()):
            return self.select.expand_as(cross)
        return self.select + torch.cholesky_solve(missing, factor)

    def _error(self, combination: Tensor, importance: Tensor) -> float:
        """The square of the error that the layer's outputs have on the images held out."""
        own, cross, every = self.own[1], self.cross[1], self.all[1]
        weighted = combination @ importance
        return float((every * importance).sum() + (weighted * (own @ combination - 2 * cross)).sum())

    def write_(self, parameter: nn.Parameter) -> None:
        """Give the cut layer the weight that its combination makes."""
        fitted = torch.einsum("goct,gkc->gokt", self.weight, self.solve())
        parameter.copy_(self.restore(fitted).reshape(parameter.shape))


def _prepare(
    one: Layer,
    other: Layer,
    whole: nn.Module,
    kept: Mapping[tuple[str, int], Tensor],
    channels: Mapping[tuple[str, int], Tensor],
    say: Callable[[str], object],
) -> Fit | None:
    """How the layer is fitted; None, with the reason reported, if it is not."""
    weight = whole.get_parameter(other.name).detach()
    device = weight.device
    left = {axis: kept[other.name, axis].to(device) for axis in (0, 1) if (other.name, axis) in kept}
    if weight.dim() == 2:
        return _prepare_linear(weight, left, channels.get((other.name, 1)))
    groups, taps = other.groups, prod(weight.shape[2:])
    if other.transposed:
        parts = weight.reshape(groups, -1, weight.shape[1], taps).transpose(1, 2)
    else:
        parts = weight.reshape(groups, -1, weight.shape[1], taps)
    # The outputs, or the inputs of a transposed layer, of all groups lie one after another along axis 0.
    per_group = weight.shape[0] // groups
    first = left.get(0, torch.arange(weight.shape[0], device=device))
    alive = torch.unique(first // per_group)
    within = first.reshape(alive.numel(), -1) % per_group if first.numel() % alive.numel() == 0 else None
    if alive.numel() != one.groups or within is None or not bool((within == within[0]).all()):
        say(f"{other.name} keeps its plain cut: its groups have lost different channels")
        return None
    second = left.get(1, torch.arange(weight.shape[1], device=device))
    inputs, outputs = (within[0], second) if other.transposed else (second, within[0])
    parts = parts[alive][:, outputs]

    def arrange(data: Tensor, is_whole: bool) -> Tensor:
        """(samples, channels) to (samples, groups, channels of a group)."""
        by_group = data.reshape(data.shape[0], groups if is_whole else one.groups, -1)
        return by_group[:, alive] if is_whole else by_group

    def restore(fitted: Tensor) -> Tensor:
        return fitted.transpose(1, 2) if other.transposed else fitted

    return Fit(parts, inputs, arrange, restore)


def _prepare_linear(weight: Tensor, left: dict[int, Tensor], channels: Tensor | None) -> Fit:
    """A linear layer; behind a flatten one combination of channels serves all their positions."""
    device = weight.device
    rows = left.get(0, torch.arange(weight.shape[0], device=device))
    columns = left.get(1, torch.arange(weight.shape[1], device=device))
    order = torch.arange(weight.shape[1], device=device)[:, None]
    if channels is not None and bool((channels >= 0).all()):
        numbers, counts = torch.unique(channels, return_counts=True)
        if int(counts.min()) == int(counts.max()) > 1:
            order = torch.argsort(channels, stable=True).reshape(numbers.numel(), -1).to(device)
    kept = torch.isin(order[:, 0], columns).nonzero()[:, 0]
    own_order = torch.searchsorted(columns, order[kept])

    def arrange(data: Tensor, is_whole: bool) -> Tensor:
        """(samples, features) to (samples and positions, 1, channels)."""
        found = data[:, order if is_whole else own_order]
        return found.transpose(1, 2).reshape(-1, 1, found.shape[1])

    def restore(fitted: Tensor) -> Tensor:
        result = torch.empty(rows.numel(), columns.numel(), dtype=fitted.dtype, device=device)
        result[:, own_order.reshape(-1)] = fitted[0].reshape(rows.numel(), -1)
        return result

    return Fit(weight[rows][:, order][None], kept, arrange, restore)


class _Stops(TorchFunctionMode):
    """Calls `stop` before every convolution and linear layer whose weight is a parameter of the model."""

    def __init__(self, model: nn.Module, stop: Callable[[Layer], None]) -> None:
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.stop = stop

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear or func in CONVOLUTIONS or func in TRANSPOSED:
            data, weight, *rest = [*args, *(kwargs[name] for name in ("input", "weight") if name in kwargs)]
            name = self.names.get(id(weight))
            if name is not None:
                self.stop(_layer(func, name, data, weight, rest, kwargs))
        return func(*args, **kwargs)


def _layer(func: Any, name: str, data: Tensor, weight: Tensor, rest: list[Any], kwargs: dict[str, Any]) -> Layer:
    if func is F.linear:
        return Layer(name, data.reshape(-1, data.shape[-1], 1), 1, False)
    transposed = func in TRANSPOSED
    others = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    given = dict(zip(("bias", "stride", "padding", *others), rest, strict=False)) | kwargs
    data = data if data.dim() == weight.dim() else data[None]
    stride, padding, axes = given.get("stride", 1), given.get("padding", 0), weight.dim() - 2
    if not transposed and set(weight.shape[2:]) == {1} and padding in (0, (0,) * axes):
        steps = (stride,) * axes if isinstance(stride, int) else tuple(stride)
        data = data[(slice(None), slice(None), *(slice(None, None, step) for step in steps))]  # what the layer reads
    return Layer(name, data.flatten(2) if data.dim() > 2 else data[..., None], int(given.get("groups", 1)), transposed)


def _count_uses(model: nn.Module, inputs: Example) -> dict[str, int]:
    """How often each weight is used in a forward pass."""
    uses: dict[str, int] = {}

    def count(layer: Layer) -> None:
        uses[layer.name] = uses.get(layer.name, 0) + 1

    with _evaluating(model), _Stops(model, count):
        inputs.map(lambda tensor: tensor[:1]).copied()(model)
    return uses


class _Stopped(Exception):
    """The other network has failed, or there is nothing left to fit."""


class _Runner(Thread):
    """A forward pass that waits at every layer until it may go on."""

    def __init__(self, model: nn.Module, inputs: Example) -> None:
        super().__init__(daemon=True)
        self.model, self.inputs = model, inputs
        self.found: Queue[Layer | BaseException | None] = Queue()
        self.goes_on: Queue[bool] = Queue()
        self.start()

    def run(self) -> None:
        def stop(layer: Layer) -> None:
            self.found.put(layer)
            if not self.goes_on.get():
                raise _Stopped

        try:
            with torch.no_grad(), _Stops(self.model, stop):
                self.inputs.copied()(self.model)
            self.found.put(None)
        except BaseException as error:  # raised again where it is waited for
            self.found.put(error)

    def next(self) -> Layer | None:
        found = self.found.get()
        if isinstance(found, BaseException):
            raise found
        return found


def _side_by_side(
    cut: nn.Module, whole: nn.Module, inputs: Example, say: Callable[[str], object]
) -> Iterator[tuple[Layer, Layer]]:
    """The layers of both networks in the order in which they run; both networks wait while a layer is fitted."""
    with _evaluating(cut), _evaluating(whole):
        runners = _Runner(cut, inputs), _Runner(whole, inputs)
        try:
            while True:
                one, other = (runner.next() for runner in runners)
                if one is None or other is None:
                    break
                if one.name != other.name:
                    say(f"{one.name} and all that follows keep their plain cut: the networks run in different orders")
                    break
                yield one, other
                for runner in runners:
                    runner.goes_on.put(True)
        finally:
            for runner in runners:
                runner.goes_on.put(False)
                runner.join()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
