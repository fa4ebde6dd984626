"""Fit a layer to the outputs of another one, from the moments of a sample of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.pruning.side_by_side import Layer

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Strengths that are tried, relative to the mean square of the inputs; the best on images held out of the fit wins."""
RIDGE = 1e-4
"""The strength where there are too few images to hold any out."""
SAMPLES = 60_000
"""Places of the output that a layer is fitted on, at most."""
EVERY = 4
"""One of so many images is held out."""
AT_ONCE = 2**25
"""Numbers that are gathered at once."""


class LeastSquares:
    """A matrix from inputs to outputs, fitted by ridge regression that shrinks towards a prior: once for every group.

    prior: (groups, outputs, inputs).
    importance: how errors of the outputs count, (outputs, outputs); each counts alike without it.
    """

    def __init__(self, prior: Tensor, importance: Tensor | None = None) -> None:
        self.prior, self.importance = prior.double(), importance
        groups, outputs, inputs = prior.shape
        zeros = self.prior.new_zeros
        self.own, self.cross = zeros(2, groups, inputs, inputs), zeros(2, groups, outputs, inputs)
        """Moments of the inputs, and of outputs with inputs: for the images that are fitted, and for those held out."""

    def add(self, inputs: Tensor, outputs: Tensor, held: bool) -> None:
        """Add samples: (groups, samples, inputs) and (groups, samples, outputs)."""
        precision = torch.promote_types(inputs.dtype, torch.float32)
        inputs, outputs = inputs.to(precision), outputs.to(precision)
        self.own[int(held)] += inputs.mT @ inputs
        self.cross[int(held)] += outputs.mT @ inputs

    def agree_(self, average: Callable[[Tensor], Tensor]) -> None:
        """With several processes, each with images of its own: fit the images of all."""
        self.own, self.cross = average(self.own), average(self.cross)

    def solve(self) -> Tensor:
        """Every group is fitted on all images with the strength that is best on those held out. It keeps its prior
        where that is better still, or where its inputs are not finite.
        """
        own, cross = self.own.sum(0), self.cross.sum(0)
        if not bool(own.isfinite().all() & cross.isfinite().all()):
            return self.prior
        if not bool(self.own[1].any()):
            return self._fit(own, cross, RIDGE)
        fits = (self._fit(self.own[0], self.cross[0], ridge) for ridge in RIDGES)
        errors = torch.stack([self._error(self.prior), *(self._error(fit) for fit in fits)]).nan_to_num(torch.inf)
        best, fitted = errors.argmin(0), self.prior
        for choice in set(best.tolist()) - {0}:
            fitted = torch.where((best == choice)[:, None, None], self._fit(own, cross, RIDGES[choice - 1]), fitted)
        return fitted

    def _fit(self, own: Tensor, cross: Tensor, ridge: float) -> Tensor:
        """With inputs X, outputs Y and the prior A: A + (Y - A X) X' (X X' + r mean(diag X X') I)^-1."""
        scale = own.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-30)
        shifted = own.clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_((ridge * scale)[:, None])
        factor, info = torch.linalg.cholesky_ex(shifted)
        missing = cross - self.prior @ own
        found = self.prior + torch.cholesky_solve(missing.mT, factor).mT
        return torch.where(((info == 0) & found.isfinite().all(-1).all(-1))[:, None, None], found, self.prior)

    def _error(self, matrix: Tensor) -> Tensor:
        """The square of the error on the images held out, by group, up to a constant."""
        weighted = matrix if self.importance is None else self.importance @ matrix
        return (weighted * (matrix @ self.own[1] - 2 * self.cross[1])).sum((1, 2))


class FilterFit:
    """The filters of a layer, fitted to give the outputs that the whole network's layer gives.

    outputs: the indices of the whole network's outputs that are left; None for all.
    """

    def __init__(self, layer: Layer, outputs: Tensor | None) -> None:
        self.outputs = outputs
        self.fit = LeastSquares(filters_of(layer, layer.weight))

    def places(self, other: Layer) -> int:
        """Positions of all images in the output."""
        return prod(shape_of(other))

    def observe(self, one: Layer, other: Layer, places: Tensor, held: bool) -> None:
        wanted = outputs_at(other, places)
        wanted = wanted if self.outputs is None else wanted[:, self.outputs]
        wanted = wanted if one.bias is None else wanted - one.bias
        self.fit.add(
            patches(one, places, shape_of(other)), wanted.reshape(len(places), one.groups, -1).transpose(0, 1), held
        )

    def weight(self, layer: Layer) -> Tensor:
        """In the shape of the layer's own."""
        fitted = self.fit.solve()
        if not layer.transposed:
            return fitted.reshape(layer.weight.shape)
        shape = layer.weight.shape
        inputs = shape[0] // layer.groups
        by_input = fitted.reshape(layer.groups, shape[1], inputs, -1).transpose(1, 2)
        return by_input.reshape(shape).flip(tuple(range(2, len(shape))))


class ChannelFit:
    """The inputs of the whole network's layer as combinations of the inputs that are left. One combination serves all
    positions: of a kernel, or of the image before a flatten.

    weight: of the whole network's layer, for the outputs that are left: (outputs, channels, positions).
    order, own_order: where each channel's inputs are in the whole network's layer and in the cut one.
    kept: the channels that are left.
    """

    def __init__(self, weight: Tensor, kept: Tensor, order: Tensor, own_order: Tensor) -> None:
        self.filters, self.order, self.own_order = weight.double(), order, own_order
        prior = self.filters.new_zeros(1, weight.shape[1], kept.numel())
        prior[0, kept, torch.arange(kept.numel())] = 1
        self.fit = LeastSquares(prior, torch.einsum("oit,ojt->ij", self.filters, self.filters))

    def places(self, other: Layer) -> int:
        """Positions of all images in the input."""
        return other.data.numel() // other.data.shape[-1 if other.linear else 1]

    def observe(self, one: Layer, other: Layer, places: Tensor, held: bool) -> None:
        inputs, wanted = (
            rows_of(layer)[places][:, order].transpose(1, 2).reshape(1, -1, order.shape[0])
            for layer, order in ((one, self.own_order), (other, self.order))
        )
        self.fit.add(inputs, wanted, held)

    def weight(self, layer: Layer) -> Tensor:
        """In the shape of the layer's own."""
        fitted = torch.einsum("oct,ck->okt", self.filters, self.fit.solve()[0])
        if layer.weight.dim() > 2:
            return fitted.reshape(layer.weight.shape)
        result = fitted.new_empty(layer.weight.shape)
        result[:, self.own_order.reshape(-1)] = fitted.reshape(layer.weight.shape[0], -1)
        return result


def filters_of(layer: Layer, weight: Tensor) -> Tensor:
    """The filters as rows: (groups, outputs of a group, inputs of a group x taps), as `patches` gives their inputs."""
    if not layer.transposed:
        return weight.reshape(layer.groups, weight.shape[0] // layer.groups, -1)
    taps = weight.flip(tuple(range(2, weight.dim()))).flatten(2)
    by_input = taps.reshape(layer.groups, weight.shape[0] // layer.groups, weight.shape[1], -1)
    return by_input.transpose(1, 2).reshape(layer.groups, weight.shape[1], -1)


def shape_of(layer: Layer) -> tuple[int, ...]:
    """Images and positions of the output."""
    assert layer.output is not None
    shape = layer.output.shape
    return tuple(shape[:-1]) if layer.linear else (shape[0], *shape[2:])


def patches(layer: Layer, places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What the layer reads for these places of its output: (groups, places, inputs of a group x taps).

    shape: images and positions of the output.
    """
    if layer.linear:
        return rows_of(layer)[places][None]
    data, kernel = layer.data, layer.weight.shape[2:]
    axes = range(len(kernel))
    stride, before, after = list(layer.stride), list(layer.padding[0]), list(layer.padding[1])
    if layer.transposed:
        # The same as a convolution over inputs that are spread apart by zeros.
        spread = [(size - 1) * step + 1 for size, step in zip(data.shape[2:], stride, strict=True)]
        wide = data.new_zeros(*data.shape[:2], *spread)
        wide[(..., *(slice(None, None, step) for step in stride))] = data
        reach = [layer.dilation[i] * (kernel[i] - 1) for i in axes]
        data, stride = wide, [1] * len(kernel)
        before = [reach[i] - before[i] for i in axes]
        after = [reach[i] - after[i] + layer.output_padding[i] for i in axes]
    padded = F.pad(data, [side for i in reversed(axes) for side in (before[i], after[i])]).contiguous()
    steps = padded.stride()[2:]
    window = padded.as_strided(
        (*padded.shape[:2], *shape[1:], *kernel),
        (
            *padded.stride()[:2],
            *(steps[i] * stride[i] for i in axes),
            *(steps[i] * layer.dilation[i] for i in axes),
        ),
    )
    image, *where = torch.unravel_index(places, shape)
    return window[(image, slice(None), *where)].reshape(len(places), layer.groups, -1).transpose(0, 1)


def outputs_at(layer: Layer, places: Tensor) -> Tensor:
    """(places, outputs)."""
    assert layer.output is not None
    if layer.linear:
        return layer.output.reshape(-1, layer.output.shape[-1])[places]
    image, *where = torch.unravel_index(places, shape_of(layer))
    return layer.output[(image, slice(None), *where)]


def features_of(channels: Tensor) -> Tensor | None:
    """Where the features of each channel are, as a linear layer behind a flatten reads them: (channels, positions).

    None if some features are of no channel, or channels differ in their number.
    """
    counts = torch.unique(channels, return_counts=True)[1]
    if not bool((channels >= 0).all()) or int(counts.min()) != int(counts.max()):
        return None
    return torch.argsort(channels, stable=True).reshape(counts.numel(), -1)


def rows_of(layer: Layer) -> Tensor:
    """The inputs, one row for every position of every image: (positions, channels)."""
    return layer.data.reshape(-1, layer.data.shape[-1]) if layer.linear else layer.data.movedim(1, -1).flatten(0, -2)


def draw_places(total: int, images: int, first: int, limit: int, seed: int) -> tuple[Tensor, Tensor]:
    """Some of the places of a batch of images: those that are fitted, and those of images held out.

    first: the number of the batch's first image.
    """
    places = torch.arange(total)
    if total > limit:
        places = torch.randint(total, (limit,), generator=torch.Generator().manual_seed(seed)).sort().values
    held = (first + places * images // total) % EVERY == EVERY - 1
    return places[~held], places[held]
