"""Scores of the weights of filters alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from secateur.channels.cost import is_kept
from secateur.channels.labels import Role
from secateur.channels.plan import Plan
from secateur.channels.shrink import cut
from secateur.pruning.scores import Score, register


class FilterScore(Score):
    """A score computed from the weights of the filters alone."""

    capturable = True

    @torch.no_grad()
    def end(self) -> Tensor:
        total = torch.zeros(self.gates.graph.num_channels, dtype=torch.float64, device="cpu")
        for rows, channels in self._filters():
            worth, removable = self.worth(rows).cpu(), channels >= 0
            total.index_add_(0, channels[removable], worth[removable])
        return total

    def worth(self, rows: Tensor) -> Tensor:
        """One number per row; the rows are the filters of one layer."""
        raise NotImplementedError

    def _filters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The filters of each layer as rows, and the channel of each; masked filters are left out, as if cut."""
        graph, gates = self.gates.whole, self.gates
        masked = Plan(gates.graph, gates.kept).cuts(gates.present).kept
        for (tensor, axis), channels in graph.axes.items():
            if tensor in gates.present.gone:
                continue
            if graph.roles[tensor, axis] == Role.PRODUCES and len(graph.shapes[tensor]) > 1:
                path, _, attribute = tensor.rpartition(".")
                weight = getattr(gates.model.get_submodule(path), attribute).detach()
                weight = cut(weight, weight.shape, masked.get(tensor, {}))
                yield weight.double().movedim(axis, 0).flatten(1), channels[is_kept(channels, gates.kept)]


@register("l1")
class L1Norm(FilterScore):
    """Li et al.: the sum of the filter's absolute weights."""

    def worth(self, rows: Tensor) -> Tensor:
        return rows.abs().sum(1)


@register("l2")
class L2Norm(FilterScore):
    """The filter's Euclidean norm."""

    def worth(self, rows: Tensor) -> Tensor:
        return rows.norm(dim=1)


@register("fpgm")
class FPGM(FilterScore):
    """He et al.: the sum of distances to all filters of the layer; near the geometric median is redundant."""

    def worth(self, rows: Tensor) -> Tensor:
        return torch.cdist(rows, rows).sum(1)
