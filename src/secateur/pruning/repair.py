"""Repair: re-fit the layers of a pruned network in closed form, from a few hundred unlabelled images.

The inputs that a layer has lost, and those that have drifted, are largely linear combinations of the inputs that it
still has. The whole and the pruned network run side by side on the same images and stop at every layer. There the
filters of the pruned layer are fitted to give what the whole network's layer gives. So each layer is fitted to the
inputs that the repaired layers before it give.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.cost import is_kept
from secateur.channels.example import Example, tensors_within
from secateur.channels.plan import Plan
from secateur.channels.shrink import shrink
from secateur.errors import InvalidData, InvalidSetting
from secateur.pruning.least_squares import AT_ONCE, SAMPLES, ChannelFit, FilterFit, draw_places, features_of
from secateur.pruning.side_by_side import Layer, find_uses, side_by_side

WIDEST = 4608
"""Inputs of a filter, over all positions of its kernel, up to which all are fitted; beyond that, so many channels."""
AT_LEAST = 64
"""Smaller batches are joined: each takes two threads."""
SECONDS = 5.0
"""Between lines of progress."""


def repair(
    model: nn.Module,
    plan: Plan,
    batches: Iterable[Any],
    *,
    images: int = 512,
    seed: int = 0,
    progress: Callable[[str], object] | None = None,
    note: Callable[[str], object] | None = None,
) -> nn.Module:
    """The model, cut by the plan and re-fitted without training. A copy; the model stays as it is.

    batches: unlabelled images: tensors, tuples of arguments, or a loader whose labels are ignored.
    images: how many of them to use. What they need between two layers stays in memory.
    progress: called every few seconds with a line on how far it is.
    note: called with a line for every layer that keeps its plain cut, and why.
    """
    inputs = gather(batches, plan.graph.calls["eval"][0], images)
    cut = shrink(model, plan)
    repair_(cut, model, plan, inputs, seed=seed, progress=progress, note=note)
    return cut


def gather(batches: Iterable[Any], example: Example, images: int) -> list[Example]:
    """The arguments of calls with so many images; labels and other surplus parts of a batch are left out."""
    if images < 1:
        raise InvalidSetting("images is out of range", got=images, wanted="1 or more")
    found: list[Example] = []
    left = images
    given: Iterable[Any] = [batches] if isinstance(batches, Tensor) else batches
    for batch in given:
        call = _arguments(batch, example)
        if not call.tensors:
            raise InvalidData("a batch holds no images", got=type(batch).__name__, wanted="tensors")
        if any(isinstance(arg, (tuple, list)) and {t.dim() for t in tensors_within(arg)} == {3} for arg in call.args):
            raise InvalidData("the network takes a list of images", wanted="images of one size in one tensor")
        call = first_images(call, left)
        left -= call.size
        joined = _joined(found[-1], call) if found and found[-1].size < AT_LEAST else None
        found = [*found, call] if joined is None else [*found[:-1], joined]
        if not left:
            break
    if not any(call.size for call in found):
        raise InvalidData("there are no images")
    return found


def _arguments(batch: Any, example: Example) -> Example:
    """What the network is called with, out of a batch: its arguments, or these and labels."""
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    first = parts[0] if parts else None
    if names := list(example.kwargs):
        given = next((part for part in (batch, first) if isinstance(part, Mapping) and set(names) <= set(part)), None)
        if given is None and len(names) == 1 and isinstance(first, Tensor):
            given = {names[0]: first}
        if given is None:
            raise InvalidData("a batch lacks inputs of the network", got=type(batch).__name__, wanted=", ".join(names))
        return Example((), {name: given[name] for name in names})
    count = len(example.args)
    if count == 1 and isinstance(example.args[0], Mapping) and isinstance(first, Mapping):
        return Example((first,), {})
    if isinstance(batch, Mapping):
        return Example(_entries(batch, example.args), {})
    if count > 1 and isinstance(first, (tuple, list)) and len(first) == count:
        return Example(tuple(first), {})
    return Example(tuple(parts[:count]), {})


def _entries(batch: Mapping[Any, Any], wanted: Sequence[Any]) -> tuple[Any, ...]:
    """The entries of a dict that can be these arguments; raises if they are not the only ones."""
    kinds = {_kind(argument) for argument in wanted}
    found = [value for value in batch.values() if _kind(value) in kinds]
    if len(found) != len(wanted):
        raise InvalidData(
            "a batch does not show which entries the network takes",
            got=f"a dict of {', '.join(map(str, batch))}",
            remedy='Say it when you make the task, as with batch=("image", "label")',
        )
    return tuple(found)


def _kind(value: Any) -> Any:
    """What tells images from labels and masks."""
    return (value.is_floating_point(), value.dim()) if isinstance(value, Tensor) else type(value)


def _joined(one: Example, other: Example) -> Example | None:
    """Both calls as one; None if their tensors do not fit together."""
    pairs = list(zip(one.tensors, other.tensors, strict=False))
    sizes = one.size, other.size
    if len(one.tensors) != len(other.tensors) or any(
        (a.shape[:1], b.shape[:1]) != ((sizes[0],), (sizes[1],)) or a.shape[1:] != b.shape[1:] for a, b in pairs
    ):
        return None
    parts = iter([torch.cat(pair) for pair in pairs])
    return one.map(lambda tensor: next(parts))


def first_images(call: Example, count: int) -> Example:
    """The same call with no more than so many images."""
    size = call.size
    return call.map(lambda tensor: tensor[:count] if tensor.shape[:1] == (size,) else tensor)


@torch.no_grad()
def repair_(
    cut: nn.Module,
    whole: nn.Module,
    plan: Plan,
    inputs: list[Example],
    *,
    since: Plan | None = None,
    seed: int = 0,
    average: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    progress: Callable[[str], object] | None = None,
    note: Callable[[str], object] | None = None,
) -> list[str]:
    """Re-fit the layers of a cut network, in place, to the whole one; the names of the weights that were fitted.

    plan: by which the network was cut.
    since: by which the whole network had already been cut before, if it had.
    average: with several processes, the mean of a tensor over all of them.
    """
    say, said = progress or (lambda text: None), time.monotonic()
    keeps = _keeper(note)
    device = next(cut.parameters()).device
    inputs = [each.on(device) for each in inputs]
    uses = find_uses(cut, first_images(inputs[0], 2))  # code may squeeze the axis of a single one
    for name in sorted({name for name, weight in cut.named_parameters() if weight.dim() > 1} - set(uses)):
        keeps(name, "it is not the weight of a convolution or linear layer")
    for name, use in list(uses.items()):
        if use.others or len(set(use.layers)) > 1:
            keeps(name, "another operator reads it too" if use.others else "layers of different kinds share it")
            del uses[name]
    kept = plan.cuts(since).kept
    fits: dict[str, FilterFit | ChannelFit] = {}
    fitted: list[str] = []

    def channels_of(name: str) -> Tensor | None:
        channels = plan.graph.axes.get((name, 1))
        return channels if channels is None or since is None else channels[is_kept(channels, since.kept)]

    def observe(pairs: list[tuple[Layer, Layer]]) -> None:
        """Add the moments of a layer, if anything that it reads has changed."""
        name = pairs[0][0].name
        if name not in uses:
            return
        drifted = any(a.data.shape != b.data.shape or not torch.equal(a.data, b.data) for a, b in pairs)
        if not float(average(torch.tensor(float(drifted), dtype=torch.float64, device=device))) and name not in fits:
            return
        fit = fits.get(name) or _prepare(*pairs[0], kept.get(name, {}), channels_of(name))
        if fit is None:
            keeps(name, f"its filters have more than {WIDEST} inputs")
            return
        fits[name] = fit
        sizes = [each.size for each in inputs]
        for number, (one, other) in enumerate(pairs):
            before, limit = sum(sizes[:number]), ceil(SAMPLES * sizes[number] / sum(sizes))
            drawn = draw_places(fit.places(other), one.data.shape[0], before, limit, seed + number)
            step = max(1, AT_ONCE // (one.reads * one.groups))
            for held, places in enumerate(drawn):
                for start in range(0, len(places), step):
                    fit.observe(one, other, places[start : start + step].to(device), bool(held))

    def write_(layer: Layer) -> None:
        fit = fits.pop(layer.name)
        fit.fit.agree_(average)
        weight = fit.weight(layer).to(layer.weight)
        if torch.equal(weight, layer.weight):
            finite = bool(fit.fit.own.isfinite().all() & fit.fit.cross.isfinite().all())
            keeps(layer.name, "a fit is worse on the images held out" if finite else "its inputs are not finite")
            return
        layer.weight.copy_(weight)
        fitted.append(layer.name)

    # A weight with several uses is fitted to all of them, so its moments must be there before it is used.
    shared: dict[str, Layer | None] = {name: None for name, use in uses.items() if len(use.layers) > 1}
    gone = plan.gone - (since.gone if since is not None else set())
    for pairs in side_by_side(cut, whole, inputs, keeps, gone) if shared else ():
        layer = pairs[0][0]
        if layer.name in shared:
            observe(pairs)
            shared[layer.name] = layer if layer.name in fits else None
    for layer in shared.values():
        if layer is not None:
            write_(layer)
    for number, pairs in enumerate(side_by_side(cut, whole, inputs, keeps, gone)):
        if time.monotonic() - said > SECONDS:
            said = time.monotonic()
            say(f"repairing layer {number + 1} of {sum(len(use.layers) for use in uses.values())}")
        layer = pairs[0][0]
        if layer.name not in shared:
            observe(pairs)
            if layer.name in fits:
                write_(layer)
    return fitted


def _keeper(note: Callable[[str], object] | None) -> Callable[[str, str], None]:
    """Called with the name of a weight that keeps its plain cut, and why."""

    def keeps(name: str, why: str) -> None:
        if note is not None:
            note(f"{name} keeps its plain cut: {why}")

    return keeps


def _prepare(
    one: Layer, other: Layer, kept: Mapping[int, Tensor], channels: Tensor | None
) -> FilterFit | ChannelFit | None:
    """How a layer is fitted; None if it is not.

    kept: what is left of the axes of its weight. channels: of the second axis, before the cut.
    """
    device = one.weight.device
    left = {axis: indices.to(device) for axis, indices in kept.items()}
    order = features_of(channels) if one.linear and channels is not None else None
    if order is not None and order.shape[1] > 1:
        return _by_channel(other.weight, left, order.to(device))
    if one.reads <= WIDEST:
        return FilterFit(one, _outputs(other, left))
    if one.groups == other.groups == 1 and not one.transposed and other.weight.shape[1] <= WIDEST:
        return _by_channel(other.weight, left, torch.arange(other.weight.shape[1], device=device)[:, None])
    return None


def _outputs(layer: Layer, left: Mapping[int, Tensor]) -> Tensor | None:
    """The outputs of the whole network's layer that the cut one still has; None for all."""
    if not layer.transposed:
        return left.get(0)
    if not left:
        return None
    weight, groups = layer.weight, layer.groups
    each = weight.shape[0] // groups
    alive = torch.unique(left[0] // each) if 0 in left else torch.arange(groups, device=weight.device)
    within = left.get(1, torch.arange(weight.shape[1], device=weight.device))
    return (alive[:, None] * weight.shape[1] + within).flatten()


def _by_channel(weight: Tensor, left: Mapping[int, Tensor], order: Tensor) -> ChannelFit:
    """order: where the inputs of each channel are: (channels, positions)."""
    weight = weight if 0 not in left else weight[left[0]]
    columns = left.get(1, torch.arange(weight.shape[1], device=weight.device))
    kept = torch.isin(order[:, 0], columns).nonzero()[:, 0]
    filters = weight[:, order] if weight.dim() == 2 else weight.flatten(2)
    return ChannelFit(filters, kept, order, torch.searchsorted(columns, order[kept]))
