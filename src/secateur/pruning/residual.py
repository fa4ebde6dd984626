"""A score for repair: what a channel gives to the layers that read it and their other inputs cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from secateur.channels.cost import is_kept
from secateur.channels.groups import ChannelGraph
from secateur.channels.labels import Role
from secateur.channels.plan import Plan
from secateur.errors import InvalidModel
from secateur.pruning.gates import Gates
from secateur.pruning.hook import Hook
from secateur.pruning.least_squares import features_of
from secateur.pruning.scores import Score, register, zero_

PLACES = 4096
"""Positions of a batch that are observed, about."""
RIDGE = 1e-3
"""Relative to the mean square of all inputs."""
ROUNDING = 1e-5
"""The same, relative to the mean square of each input: moments are added in single precision."""


@dataclass(frozen=True)
class Reader:
    """A convolution or linear layer that reads channels."""

    name: str
    module: nn.Linear | _ConvNd
    channels: Tensor
    """Of every input of a group; -1 for those that always stay."""
    order: Tensor
    """Where the inputs are among the features of a linear layer: (inputs, positions before a flatten)."""

    @property
    def groups(self) -> int:
        return self.module.groups if isinstance(self.module, _ConvNd) else 1

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Of the sums over its inputs and its gradients."""
        weight, inputs = self.module.weight, self.channels.numel()
        yield f"inputs of {self.name}", (self.groups, inputs, inputs)
        yield f"gradients of {self.name}", (weight.shape[1] * self.groups if self.transposed else weight.shape[0],)

    def by_channel(self, data: Tensor) -> Tensor:
        """Inputs or outputs as rows: (positions of all images, channels), at least in single precision."""
        axis = -1 if isinstance(self.module, nn.Linear) else 1 - self.module.weight.dim()
        rows = data.detach().movedim(axis, -1)
        return rows.reshape(-1, rows.shape[-1]).to(torch.promote_types(data.dtype, torch.float32))

    def samples(self, data: Tensor) -> Tensor:
        """(groups, samples, inputs)."""
        rows = self.by_channel(data)
        if isinstance(self.module, nn.Linear):
            rows = rows[:, self.order.to(rows.device)].transpose(1, 2).flatten(0, 1)
        total = rows.shape[0]
        # A step that shares no factor with the sizes of the images, so that it does not keep to some columns.
        step = next(step for step in count(max(1, total // PLACES)) if gcd(step, total) == 1)
        return rows[::step].unflatten(1, (self.groups, -1)).transpose(0, 1)

    def filters(self) -> Tensor:
        """The weights: (groups, outputs, inputs, taps or positions)."""
        weight = self.module.weight.detach().double()
        if isinstance(self.module, nn.Linear):
            return weight[:, self.order.to(weight.device)][None]
        grouped = weight.unflatten(0, (self.groups, -1)).flatten(3)
        return grouped.transpose(1, 2) / self._spread if self.transposed else grouped

    @torch.no_grad()
    def put_(self, filters: Tensor) -> None:
        """Give the layer these weights, in the shape of `filters`."""
        weight = self.module.weight
        if isinstance(self.module, nn.Linear):
            weight[:, self.order.to(weight.device)] = filters[0].to(weight)
            return
        grouped = filters.transpose(1, 2) * self._spread if self.transposed else filters
        weight.copy_(grouped.reshape(weight.shape))

    @property
    def transposed(self) -> bool:
        return isinstance(self.module, _ConvTransposeNd)

    @property
    def _spread(self) -> float:
        """With strides an output of a transposed convolution reads a share of the taps only."""
        return prod(self.module.stride) ** 0.5 if isinstance(self.module, _ConvTransposeNd) else 1.0


@register("residual")
class Residual(Score):
    """Hassibi and Stork's optimal brain surgeon by channel, over all convolutions and linear layers that read it.

    With M the moments of a layer's inputs, the loss of input j changes the outputs by |w_j|^2 / (M^-1)_jj if the other
    inputs are re-fitted. Every output counts by the mean square of the loss's gradient, summed over positions. The
    score of a channel is infinite if none of these layers reads it, or none gets a gradient: nothing is known of it.
    """

    capturable = True

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.sums: dict[str, Tensor] = {}

    def begin(self, gates: Gates) -> None:
        super().begin(gates)
        self.close()
        device = gates.phis[0].device
        self.readers = list(readers_in(gates.model, gates.whole, gates.present))
        wanted = dict(shape for reader in self.readers for shape in reader.shapes())
        self.numbers = {name: number for number, name in enumerate(wanted)}
        wanted["counts"] = (len(wanted),)
        if {name: (tuple(t.shape), t.device) for name, t in self.sums.items()} == {
            name: (shape, device) for name, shape in wanted.items()
        }:
            zero_(self.sums)
        else:
            self.sums = {n: torch.zeros(shape, dtype=torch.float64, device=device) for n, shape in wanted.items()}
        hooks = [(reader.module, Hook(self._hook(reader))) for reader in self.readers]
        self.handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks]

    def _hook(self, reader: Reader) -> Callable[..., None]:
        inputs, gradients = (name for name, _ in reader.shapes())

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if not output.requires_grad:
                return
            data: Tensor = args[0] if args else kwargs["input"]
            with torch.autocast(data.device.type, enabled=False):
                rows = reader.samples(data)
                self._add(inputs, rows.mT @ rows, rows.shape[1])
            output.register_hook(backward)

        def backward(gradient: Tensor) -> None:
            # The loss is a mean over images: with this factor small batches count as large ones do.
            images = gradient.shape[0]
            squares = reader.by_channel(gradient).square().sum(0, dtype=torch.float64)
            self._add(gradients, squares * images, images)

        return hook

    def _add(self, name: str, found: Tensor, number: int) -> None:
        """Add to a sum, unless it is not finite."""
        if self.sums[name].device != found.device:
            self.sums = {key: tensor.to(found.device) for key, tensor in self.sums.items()}
        finite = found.isfinite().all()
        self.sums[name] += torch.where(finite, found, 0)
        self.sums["counts"][self.numbers[name]] += finite * number

    @torch.no_grad()
    def end(self) -> Tensor:
        total = torch.zeros(self.gates.graph.num_channels, dtype=torch.float64, device="cpu")
        known = torch.zeros_like(total, dtype=torch.bool)
        for reader, moments, importance in self.seen():
            here = is_kept(reader.channels, self.gates.kept)
            filters, moments = weighted(reader.filters(), importance)[:, :, here], moments[:, here][:, :, here]
            for channels, lost in losses(*inverse_of(moments), filters, reader.channels[here]):
                total[channels] += lost.cpu()
                known[channels] = True
        self.close()
        total[~known] = torch.inf
        return total

    def seen(self) -> list[tuple[Reader, Tensor, Tensor]]:
        """The layers that got gradients, with the moments of their inputs and the importance of their outputs."""
        counts, found = self.sums["counts"].tolist(), []
        for reader in self.readers:
            names = [name for name, _ in reader.shapes()]
            passes = [counts[self.numbers[name]] for name in names]
            if all(passes):
                moments, importance = (self.sums[name] / number for name, number in zip(names, passes, strict=True))
                found.append((reader, moments, importance))
        if not found:
            raise InvalidModel(
                f"{type(self).__name__} has seen no layer that reads channels",
                wanted="modules with a gradient that is finite",
            )
        return found

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def state(self) -> dict[str, Tensor]:
        return self.sums


def readers_in(model: nn.Module, graph: ChannelGraph, present: Plan) -> Iterator[Reader]:
    """The layers of a model that read channels.

    present: what its tensors have of the whole network.
    """
    for (tensor, axis), channels in graph.axes.items():
        if tensor in present.gone:
            continue
        path, _, attribute = tensor.rpartition(".")
        module = model.get_submodule(path)
        if attribute != "weight" or not isinstance(module, nn.Linear | _ConvNd):
            continue
        if graph.roles[tensor, axis] != Role.CONSUMES:
            continue
        channels = channels[is_kept(channels, present.kept)]
        order = torch.arange(channels.numel(), device="cpu")[:, None]
        if isinstance(module, nn.Linear):
            found = features_of(channels)
            order = order if found is None else found
            channels = channels[order[:, 0]]
        elif isinstance(module, _ConvTransposeNd):
            channels = channels[: channels.numel() // module.groups]
        yield Reader(tensor, module, channels, order)


def weighted(filters: Tensor, importance: Tensor) -> Tensor:
    """Filters as they count: each output by the root of its importance."""
    return filters * importance.view(*filters.shape[:2], 1, 1).sqrt()


def inverse_of(moments: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of the moments with a ridge, and that ridge: (groups, inputs, inputs) and (groups, inputs)."""
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    ridge = ROUNDING * diagonal + RIDGE * diagonal.mean(-1, keepdim=True).clamp_min(1e-30)
    return torch.cholesky_inverse(torch.linalg.cholesky(moments + torch.diag_embed(ridge))), ridge


def losses(inverse: Tensor, ridge: Tensor, filters: Tensor, channels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Channels, and what is lost with each: all its inputs go at once, and the others are re-fitted.

    inverse, ridge: as `inverse_of` gives them; filters: (groups, outputs, inputs, taps); channels: of the inputs.
    """
    rows = filters.transpose(1, 2).flatten(2)
    numbers, counts = torch.unique(channels, return_counts=True)
    ends, order = torch.cumsum(counts, 0), torch.argsort(channels, stable=True)
    for size in torch.unique(counts[numbers >= 0]).tolist():
        chosen = (numbers >= 0) & (counts == size)
        places = order[ends[chosen][:, None] - torch.arange(size, 0, -1, device="cpu")]
        block, lost = inverse[:, places[:, :, None], places[:, None, :]], rows[:, places]
        # What the ridge has added to the moments is not lost.
        change = lost * (torch.linalg.solve(block, lost) - ridge[:, places][..., None] * lost)
        yield numbers[chosen], change.sum((0, 2, 3)).clamp_min(0)
