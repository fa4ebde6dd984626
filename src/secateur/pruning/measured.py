"""A score by trial: take channels of one group away, re-fit the layers that read them, and see what becomes of the
outputs.

Estimates compare channels of one layer well, and layers with each other badly. So the residual score orders the
channels within a group here, and trials on a copy of the network compare the groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from secateur.channels.cost import is_kept
from secateur.channels.groups import ChannelGroup
from secateur.channels.plan import Plan
from secateur.errors import InvalidModel
from secateur.modes import evaluating
from secateur.nested import map_tensors
from secateur.pruning.hook import Hook
from secateur.pruning.plain import plain_copy
from secateur.pruning.residual import Reader, Residual, inverse_of, losses, readers_in, weighted
from secateur.pruning.scores import register
from secateur.words import counted

SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
"""Of a group's channels that are taken away in its trials."""
AT_ONCE = 32
"""One of so many channels of a group goes before the others are looked at again."""
ENOUGH = 2.0
"""No more channels are taken away once the outputs have changed so much."""
LEAST = 1e-12
"""What a channel counts at least."""
APART = 1e-6
"""By this much, relatively, a channel counts more than the one before it, so that they go in that order."""
IMAGES = 512
"""That trials look at, about."""


@register("measured")
class Measured(Residual):
    """What the outputs change, in nats, when channels go and the layers that read them are re-fitted.

    The channels of each group are taken away in the order of what they give to those layers. After some of them the
    images that were observed are run again. The score of a channel is what the outputs change with it, made to rise
    along the order, so that a rank by score per MAC goes down the steepest way first.

    classes: whether the outputs are scores of two or more classes along axis 1, which are compared as probabilities;
        others are compared by the square of their change, relative to their variance.
    """

    capturable = False

    def __init__(self, classes: bool = True) -> None:
        super().__init__()
        self.classes = classes
        self.calls: list[tuple[Any, Any]] = []
        self.images = 0
        self.precision: torch.dtype | None = None

    @property
    def resumable(self) -> bool:
        return False  # the images are not kept

    def begin(self, gates: Any) -> None:
        super().begin(gates)
        self.images = 0
        keep = Hook(self._keep)
        self.handles.append(gates.model.register_forward_pre_hook(keep, with_kwargs=True))

    def _keep(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or self.images >= IMAGES:
            return
        kind = next(module.parameters()).device.type
        self.precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        call = map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())
        self.calls.append(call)
        first = next((leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)), None)
        # A list of images has one tensor for each.
        several = isinstance(args[0], list) if args else False
        self.images += len(args[0]) if several else 1 if first is None or not first.dim() else first.shape[0]

    def close(self) -> None:
        super().close()
        self.calls = []

    @torch.no_grad()
    def end(self) -> Tensor:
        seen = {reader.name: self._left(reader, *sums) for reader, *sums in self.seen()}
        super().close()
        kept, groups = self.gates.kept, self.gates.whole.groups
        total = torch.full((kept.numel(),), torch.inf, dtype=torch.float64, device="cpu")
        model = plain_copy(self.gates)
        readers = [r for r in readers_in(model, self.gates.whole, Plan(self.gates.whole, kept)) if r.name in seen]
        with evaluating(model):
            before = list(self._outputs(model))
            if not any(before):
                got = counted(len(self.calls), "call") + " of the model observed"
                wanted = "calls of the model itself since the last removal, with tensors of numbers as outputs"
                raise InvalidModel("Measured has no outputs to compare", got=got, wanted=wanted)
            for group in groups:
                parts = [Part(reader, *seen[reader.name]) for reader in readers if group.has_any(reader.channels)]
                if parts and bool(kept[group.span].any()):
                    self._try(model, before, group, parts, total)
        return total

    def _left(self, reader: Reader, moments: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
        """The same without what is masked, as the copy has it."""
        graph, present, kept = self.gates.whole, self.gates.present.kept, self.gates.kept

        def left(axis: int) -> Tensor:
            channels = graph.axes.get((reader.name, axis))
            if channels is None:
                return torch.ones(reader.module.weight.shape[axis], dtype=torch.bool, device="cpu")
            return is_kept(channels[is_kept(channels, present)], kept)

        rows = left(0).unflatten(0, (reader.groups, -1))  # outputs, or the inputs of a transposed convolution
        alive = rows.any(1)
        outputs = left(1).expand(reader.groups, -1) if reader.transposed else rows
        inputs = is_kept(reader.channels, kept)
        importance = importance.unflatten(0, (reader.groups, -1))[outputs & alive[:, None]]
        return moments[alive][:, inputs][:, :, inputs], importance

    def _try(
        self, model: nn.Module, before: list[list[Tensor]], group: ChannelGroup, parts: list[Part], total: Tensor
    ) -> None:
        """Write the scores of the channels of a group."""
        here = self.gates.kept[group.span].nonzero()[:, 0] + group.start
        gone: list[int] = []
        points = [(0, 0.0)]
        for share in SHARES:
            wanted = round(share * here.numel())
            while len(gone) < wanted:
                lost = torch.zeros_like(total)
                for part in parts:
                    part.add_losses(lost)
                lost[gone] = torch.inf
                step = max(1, min(wanted - len(gone), here.numel() // AT_ONCE))
                chosen = here[torch.argsort(lost[here], stable=True)[:step]]
                for part in parts:
                    part.take(chosen)
                gone += chosen.tolist()
            if wanted == points[-1][0]:
                continue
            for part in parts:
                part.write_()
            points.append((wanted, self._distance(model, before)))
            if points[-1][1] > ENOUGH:
                break
        for part in parts:
            part.restore_()
        # The rest is dearer than what was tried, and dearer the more of it has gone.
        marginal = rising(points)
        last = marginal[-1] if marginal else LEAST
        tried = set(gone)
        rest = [channel for channel in here.tolist() if channel not in tried]
        marginal += [last * (2 + place) for place in range(len(rest))]
        ordered = torch.tensor([*gone, *rest], dtype=torch.long, device="cpu")
        places = torch.arange(ordered.numel(), device="cpu")
        total[ordered] = torch.tensor(marginal, dtype=torch.float64, device="cpu") * (1 + APART * places)

    def _outputs(self, model: nn.Module) -> Iterator[list[Tensor]]:
        """The tensors that the network gives in each call."""
        kind = next(model.parameters()).device.type
        for call in self.calls:
            args, kwargs = map_tensors(call, torch.clone)  # a network may write to what it is given
            with torch.autocast(kind, self.precision) if self.precision is not None else nullcontext():
                leaves = tree_leaves(model(*args, **kwargs))
            numbers = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            yield [leaf.to(torch.promote_types(leaf.dtype, torch.float32)) for leaf in numbers]

    def _distance(self, model: nn.Module, before: list[list[Tensor]]) -> float:
        """How far the outputs are from those of before, averaged over images."""
        total, count = 0.0, 0
        for ones, others in zip(before, self._outputs(model), strict=True):
            if [one.shape for one in ones] != [other.shape for other in others]:
                wanted = "the same shapes whatever the weights are; use another score"
                raise InvalidModel("Measured cannot compare outputs whose shapes depend on their values", wanted=wanted)
            for one, other in zip(ones, others, strict=True):
                images = one.shape[0] if one.dim() else 1
                scores = self.classes and one.dim() > 1 and one.shape[1] > 1
                total += images * float(divergence(one, other) if scores else change(one, other))
                count += images
        return total / max(1, count) if total == total else torch.inf


def divergence(before: Tensor, after: Tensor) -> Tensor:
    """KL divergence of classes along axis 1, averaged over images and places."""
    wanted, found = before.log_softmax(1), after.log_softmax(1)
    likely = wanted.exp()
    return torch.where(likely > 0, likely * (wanted - found), 0).sum(1).mean()


def change(before: Tensor, after: Tensor) -> Tensor:
    """The mean square of the change, relative to the variance."""
    return (after - before).square().mean() / before.var(correction=0).clamp_min(1e-30)


def rising(points: list[tuple[int, float]]) -> list[float]:
    """What each channel adds along the largest convex curve below these points.

    >>> rising([(0, 0.0), (2, 3.0), (4, 2.0), (5, 5.0)])
    [0.5, 0.5, 0.5, 0.5, 3.0]
    """
    hull: list[tuple[int, float]] = []
    for point in points:
        while len(hull) > 1 and slope(hull[-2], hull[-1]) >= slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    return [max(LEAST, slope(one, other)) for one, other in pairwise(hull) for _ in range(one[0], other[0])]


def slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


class Part:
    """A layer that reads channels of a group, while they go one after another.

    reader: in the copy of the network.
    """

    def __init__(self, reader: Reader, moments: Tensor, importance: Tensor) -> None:
        self.reader, self.importance = reader, importance
        self.before = self.filters = reader.filters()
        self.inverse, self.ridge = inverse_of(moments)

    def add_losses(self, total: Tensor) -> None:
        """Add what is lost with each channel."""
        filters = weighted(self.filters, self.importance)
        for channels, lost in losses(self.inverse, self.ridge, filters, self.reader.channels):
            total[channels] += lost.cpu()

    def take(self, chosen: Tensor) -> None:
        """Take channels away: the other inputs make up for them as well as they can."""
        places = torch.isin(self.reader.channels, chosen).nonzero()[:, 0].to(self.inverse.device)
        if not places.numel():
            return
        share = torch.linalg.solve(self.inverse[:, places][:, :, places], self.inverse[:, places])
        self.filters = self.filters - torch.einsum("gopt,gpi->goit", self.filters[:, :, places], share)
        self.filters[:, :, places] = 0
        self.inverse = self.inverse - self.inverse[:, :, places] @ share
        # As if these inputs were alone, so that nothing else depends on them.
        self.inverse[:, places] = 0
        self.inverse[:, :, places] = 0
        self.inverse[:, places, places] = 1

    def write_(self) -> None:
        self.reader.put_(self.filters)

    def restore_(self) -> None:
        self.reader.put_(self.before)
