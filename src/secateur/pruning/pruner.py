"""Prune inside a training loop of your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.analyze import Ignore, analyze
from secateur.channels.cost import Cost
from secateur.channels.groups import ChannelGraph, check_graph
from secateur.channels.plan import Plan
from secateur.channels.shrink import check_optimizer
from secateur.channels.table import quantity
from secateur.errors import InvalidArgument, InvalidModel, InvalidOptimizer, InvalidSetting
from secateur.pruning.gates import FilterScale, Gates, insert_gates_, merge_gates_
from secateur.pruning.latency import LatencyTable
from secateur.pruning.scores import Score, Taylor, checked, make_score
from secateur.pruning.select import (
    Budget,
    Limits,
    Rank,
    check_reachable,
    filters_per_channel,
    multiples,
    ranked,
    removed_by_group,
    select,
)
from secateur.words import counted


@dataclass(frozen=True)
class Removal:
    """What one call of `Pruner.prune` has removed, and what is left.

    >>> left = Cost(macs=1_598_400, params=4690)
    >>> print(Removal({"conv1": 4}, filters=4, cost=left, met=True, scores=[], threshold=0.0))
    4 filters removed from 1 group, 1.60 M MACs and 4690 parameters left
    """

    removed: dict[str, int]
    """Channels by group."""
    filters: int
    """Filters removed."""
    cost: Cost
    """MACs and parameters left."""
    met: bool
    """Whether the budget is met; true without one."""
    scores: list[float]
    """Deciles of what the channels were ranked by before, from the smallest to the largest."""
    threshold: float
    """The largest of those that were removed."""

    def __str__(self) -> str:
        left = f"{quantity(self.cost.macs)} MACs and {quantity(self.cost.params)} parameters left"
        removed = f"{counted(self.filters, 'filter')} removed from {counted(len(self.removed), 'group')}"
        return f"{removed}, {left}{'' if self.met else '; the budget is not met'}"


class Pruner:
    """Gates on a model that you train yourself. The model is changed in place, and is yours again after `finish`.

    graph: the model's channel graph, if you have it; else it is analysed with the example.
    score: a name (taylor, fisher, slim, pcnn, l1, l2, fpgm, apoz, random) or a `Score`.
    rank: by score, or by score per MAC, parameter or microsecond that the channel's removal would save.
    rank_power: how much that saving counts: the score is divided by this power of it.
    latency: what layers take, from `measure_latency`; for ranks by microsecond and budgets of latency.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    >>> images = torch.randn(4, 3, 8, 8)
    >>> pruner = Pruner(net, images)
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    >>> net(images).square().mean().backward()
    >>> pruner.observe()
    >>> optimizer.step()
    >>> pruner.prune(fraction=0.5, optimizer=optimizer).removed
    {'0': 4}
    >>> pruner.finish()[0]
    Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1))
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        *,
        graph: ChannelGraph | None = None,
        score: str | Score = "taylor",
        rank: Rank = "score",
        rank_power: float = 1.0,
        min_channels: int = 1,
        min_ratio: float = 0.1,
        multiple_of: int = 1,
        at_least: Mapping[str, float] | None = None,
        ignore: Ignore = (),
        filter_scale: FilterScale = "norm",
        latency: LatencyTable | None = None,
    ) -> None:
        if isinstance(example, ChannelGraph):
            raise InvalidArgument("the example is a channel graph: pass that by its name, Pruner(model, graph=graph)")
        if graph is None:
            if example is None:
                raise InvalidSetting("a Pruner needs an example input of the model, or its channel graph")
            graph = analyze(model, example, ignore=ignore)
        self.score = make_score(score)
        self.rank: Rank = rank
        self.rank_power = rank_power
        self.limits = Limits(min_channels, min_ratio, multiple_of, at_least or {})
        self.graph = check_graph(graph)
        self.floors = self.limits.floors(graph)
        self.latency = latency
        if latency is not None:
            latency.check(graph)
        ranked(graph, graph.all_kept(), torch.zeros(graph.num_channels), rank, latency)
        self.gates: Gates = insert_gates_(model, graph, filter_scale=filter_scale)
        self.model = model
        self.kept = graph.all_kept()
        """Which channels have not been removed."""
        self.agree: Callable[[Tensor], Tensor] = lambda scores: scores
        """With many processes: makes them take the same decision."""
        self.held: list[tuple[nn.Parameter, Tensor]] = []
        """Merged parameters with masked channels, and the factors that hold those at zero."""
        self.score.begin(self.gates)

    def observe(self) -> None:
        """Note the gradients: once per optimizer step, after `backward` and `scaler.unscale_`, before clipping."""
        self._check_open()
        if all(phi.grad is None for phi in self.gates.phis):
            raise InvalidSetting(
                "no gate has a gradient: call observe() after loss.backward(), before zero_grad(), of a loss that is "
                "computed from the model's output"
            )
        self.score.observe()

    def add_l1_(self, strength: float) -> None:
        """Add the subgradient of `strength * sum |phi|` to the gradients; after `observe`, before the step."""
        self._check_open()
        self.gates.add_l1_(strength)

    @property
    def observed(self) -> int:
        """How many backward passes the score has seen since the last removal, where it counts them."""
        return int(self.score.seen) if isinstance(self.score, Taylor) else 0

    @property
    def skipped(self) -> int:
        """How many passes since the last removal had a gradient that was not finite and were left out."""
        return int(self.score.skipped) if isinstance(self.score, Taylor) else 0

    @property
    def cost(self) -> Cost:
        """MACs and parameters of what is left."""
        return self.graph.cost(self.kept)

    @property
    def filters(self) -> int:
        """How many filters are left."""
        return self.graph.num_filters - int(filters_per_channel(self.graph)[~self.kept].sum())

    @property
    def plan(self) -> Plan:
        """What is left, as a plan for the whole network."""
        return Plan(self.graph, self.kept.clone())

    def prune(
        self,
        fraction: float | None = None,
        *,
        keep_macs: float | None = None,
        keep_params: float | None = None,
        keep_filters: float | None = None,
        keep_latency: float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        cut: bool = True,
    ) -> Removal:
        """Remove the channels that score least, and begin a new score.

        fraction: this share of the filters that remain, at most; without it, as many as the budget needs.
        keep_macs, keep_params, keep_filters, keep_latency: stop where the network has come down to this share.
        optimizer: the one that trains the model, so that its state is cut along.
        cut: cut the tensors now; else the channels are only masked until `cut_`, unless a learnt shift behind the gate
            could wake them up.
        """
        self._check_open()
        if fraction is not None and not 0 < fraction <= 1:
            raise InvalidSetting(f"fraction is a share of the remaining filters, above 0 and at most 1, got {fraction}")
        budget = make_budget(keep_macs, keep_params, keep_filters, keep_latency, self.latency)
        if fraction is None and budget is None:
            raise InvalidSetting("say how much to prune: a fraction, or a budget such as keep_macs=0.4")
        if optimizer is not None:
            self._check_optimizer(optimizer)
        if budget is not None:
            check_reachable(self.graph, budget, self.floors)
        observed = self.observed
        if isinstance(self.score, Taylor) and not observed:
            raise InvalidSetting("the score has seen no gradient: call observe() after loss.backward()")
        if observed and self.skipped == observed:
            raise InvalidSetting(f"the score has seen {counted(observed, 'gradient')}, and none was finite")
        scores = checked(self.score, self.agree(self.score.end()), self.kept)
        worth = ranked(self.graph, self.kept, scores, self.rank, self.latency, self.rank_power)
        quota = None
        if fraction is not None:
            gated = filters_per_channel(self.graph)[self.kept & self.gates.removable]
            quota = max(1, round(fraction * int(gated.sum())))
        before, multiple_of = self.kept, self.limits.multiple_of
        after = select(self.graph, before, worth, self.floors, multiple_of=multiple_of, quota=quota, budget=budget)
        removed = removed_by_group(self.graph, before, after)
        loose = [name for name in removed if self.gates.loose(self.graph.group(name))]
        if loose and not cut and optimizer is None:
            raise InvalidSetting(
                f"what follows the gates of {loose[0]!r} could wake its channels up: pass the optimizer"
            )
        self.kept = after
        self.gates.mask_(after)
        if cut or loose:
            self.cut_(optimizer)
        self.score.begin(self.gates)
        gone = before & ~self.kept
        return Removal(
            removed=removed,
            filters=int(filters_per_channel(self.graph)[gone].sum()),
            cost=self.cost,
            met=budget is None or budget.met(self.graph, self.kept),
            scores=_deciles(worth[before & self.gates.removable]),
            threshold=float(worth[gone].max()) if bool(gone.any()) else 0.0,
        )

    def cut_(self, optimizer: torch.optim.Optimizer | None = None, multiple_of: int = 1) -> None:
        """Cut the tensors to what is kept, and begin a new score.

        multiple_of: only down to widths that are multiples, with the rest left masked.
        """
        present = self.widened(multiple_of) if multiple_of > 1 else self.kept
        if bool((self.gates.present.kept & ~present).any()):
            self.gates.cut_(present, optimizer)
            if not self.gates.merged:
                self.score.begin(self.gates)

    def widened(self, multiple_of: int) -> Tensor:
        """What is kept, and beside it as many masked channels as make every layer's width a multiple."""
        present = self.kept.clone()
        for group, multiple in zip(self.graph.groups, multiples(self.graph, multiple_of).tolist(), strict=True):
            if not group.exact:
                continue  # a mask is not the same as a cut
            part = group.span
            spare = (self.gates.present.kept[part] & ~self.kept[part]).nonzero()[:, 0]
            present[group.start + spare[: -int(self.kept[part].sum()) % multiple]] = True
        return present

    def merge_(self) -> None:
        """Merge the gates, and leave channels that are only masked as zeros until `finish`; `hold_` keeps them so."""
        if any(module.gate_fold.weight is None for module in self.gates.modules):
            self.cut_()  # nothing would hold the mask
        self.score.close()
        merge_gates_(self.model)
        self.held = list(self.gates.masked())

    def hold_(self) -> None:
        """Take the gradients from channels that `merge_` has left as zeros; after `backward`, before clipping."""
        held = [(parameter.grad, factor) for parameter, factor in self.held if parameter.grad is not None]
        if held:
            gradients, factors = zip(*held, strict=True)
            torch._foreach_mul_(gradients, factors)  # pyright: ignore[reportPrivateImportUsage]

    def finish(self) -> nn.Module:
        """Cut what is still masked, merge the gates, and give the model back with nothing of ours in it."""
        if not self.gates.merged:
            self.cut_()
            self.merge_()
        if any(bool(parameter.masked_select(factor == 0).any()) for parameter, factor in self.held):
            raise InvalidModel("training has woken channels that were removed: call hold_() before every step")
        self.held = []
        self.cut_()
        return self.model

    def _check_open(self) -> None:
        if self.gates.merged:
            raise InvalidSetting("this Pruner has merged its gates: make a new one of the model to prune it further")

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(optimizer, dict(self.model.named_parameters()))
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = {id(p): name for name, p in self.model.named_parameters()}
        missing = [names[id(phi)] for phi in self.gates.trainable if id(phi) not in held]
        if missing:
            raise InvalidOptimizer(
                f"the optimizer lacks {counted(len(missing), 'gate')}, {missing[0]!r} first: make it from "
                "model.parameters() after the Pruner, not before"
            )


def make_budget(
    keep_macs: float | None,
    keep_params: float | None,
    keep_filters: float | None,
    keep_latency: float | None,
    table: LatencyTable | None,
) -> Budget | None:
    """The one budget among these; None without any."""
    given = {"macs": keep_macs, "params": keep_params, "filters": keep_filters, "latency": keep_latency}
    chosen = [
        Budget(kind, share, table if kind == "latency" else None) for kind, share in given.items() if share is not None
    ]
    if len(chosen) > 1:
        raise InvalidSetting(f"one budget at a time: got {' and '.join(f'keep_{b.kind}' for b in chosen)}")
    return chosen[0] if chosen else None


def _deciles(values: Tensor) -> list[float]:
    if not values.numel():
        return []
    ordered = values.double().sort().values
    places = [round(tenth * (ordered.numel() - 1) / 10) for tenth in range(11)]
    return ordered[places].tolist()
