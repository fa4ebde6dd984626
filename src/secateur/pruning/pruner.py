"""Prune inside a training loop of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.analyze import analyze
from secateur.channels.cost import Cost
from secateur.channels.example import Example
from secateur.channels.groups import Branch, ChannelGraph, check_graph
from secateur.channels.guard import check_module
from secateur.channels.plan import Plan
from secateur.channels.shrink import check_optimizer, copy_model, shrink_
from secateur.channels.table import quantity
from secateur.errors import InvalidModel, InvalidSetting
from secateur.pruning.filter_scores import FilterScore as FilterScore  # registers its subclasses
from secateur.pruning.gated import FilterScale
from secateur.pruning.gates import Gates, insert_gates_, merge_gates_
from secateur.pruning.latency import LatencyTable
from secateur.pruning.measured import Measured as Measured  # registers it
from secateur.pruning.output_scores import OutputScore as OutputScore  # registers its subclasses
from secateur.pruning.plain import plain_copy, take_weights_
from secateur.pruning.repair import gather, repair_
from secateur.pruning.residual import Residual as Residual  # registers it
from secateur.pruning.scores import Score, Taylor, checked, make_score
from secateur.pruning.selection import (
    Target,
    best_widths,
    check_reachable,
    count_filters,
    filters_per_channel,
    multiples,
    ranked,
    ranked_branches,
    removed_by_group,
    select,
    without_branches,
)
from secateur.pruning.settings import Budget, Limits, Rank
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
    """The largest of those that were removed one by one."""
    branches: list[str] = field(default_factory=list)
    """Branches removed as a whole."""

    def __str__(self) -> str:
        left = f"{quantity(self.cost.macs)} MACs and {quantity(self.cost.params)} parameters left"
        removed = f"{counted(self.filters, 'filter')} removed from {counted(len(self.removed), 'group')}"
        if self.branches:
            removed += f", with {counted(len(self.branches), 'whole branch', 'whole branches')}"
        return f"{removed}, {left}{'' if self.met else '; the budget is not met'}"


class Pruner:
    """Gates on a model that you train yourself. The model is changed in place, and is yours again after `finish`.

    graph: the channel graph of the model, if you have it; otherwise the model is analysed with the example.
    score: a name (taylor, fisher, slim, pcnn, l1, l2, fpgm, apoz, residual, measured, random) or a `Score`.
    rank: by score, or by score per MAC, parameter or microsecond that the removal of the channel saves.
    rank_power: the score is divided by this power of that saving.
    latency: the times of the layers, from `measure_latency`; for ranks by microsecond and budgets of latency.

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
        limits: Limits | None = None,
        filter_scale: FilterScale = "norm",
        latency: LatencyTable | None = None,
    ) -> None:
        if isinstance(example, ChannelGraph):
            raise InvalidSetting("the example is a channel graph", remedy="Pass it by name: Pruner(model, graph=graph)")
        if graph is None:
            if example is None:
                raise InvalidSetting("a Pruner needs an example input of the model, or its channel graph")
            graph = analyze(model, example)
        self.score = make_score(score)
        self.rank: Rank = rank
        self.rank_power = rank_power
        check_module(model)
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        self.limits = (limits or Limits()).on(device)
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
        """With several processes: makes them take the same decision."""
        self.held: list[tuple[nn.Parameter, Tensor]] = []
        """Merged parameters with masked channels, and the factors that hold those at zero."""
        self._begin_score()

    def _begin_score(self) -> None:
        if self.gates.modules:  # none if all have gone with their branches
            self.score.begin(self.gates)

    def state_dict(self) -> dict[str, Any]:
        """What a new Pruner of the same model needs to continue, beside the tensors of the model."""
        return {
            "kept": self.kept,
            "present": self.gates.present.kept,
            "merged": self.gates.merged,
            "score": {} if self.gates.merged else self.score.state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Bring a new Pruner, its model and the optimizer to the shapes of another one; then load the tensors."""
        if state["kept"].shape != self.kept.shape:
            got, wanted = (counted(kept.numel(), "channel") for kept in (state["kept"], self.kept))
            raise InvalidSetting("the state is of another network", got=got, wanted=wanted)
        if bool((state["present"] & ~self.gates.present.kept).any()) or self.gates.merged:
            remedy = "Load it into a new Pruner of the whole network"
            raise InvalidSetting("this Pruner has removed channels that the state has", remedy=remedy)
        self.kept = state["kept"].clone()
        self.gates.mask_(self.kept)
        self.gates.cut_(state["present"], optimizer)
        if state["merged"]:
            self.merge_()
            return
        self._begin_score()
        own, given = self.score.state(), state["score"]
        if not given or not self.gates.modules:
            return  # a run that continues another begins a new score; without gates there is none
        if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in given.items()}:
            raise InvalidSetting("the state is of another score", wanted=f"one of {type(self.score).__name__}")
        for name, tensor in own.items():
            tensor.copy_(given[name])

    def observe(self) -> None:
        """Note the gradients: once per optimizer step, after `backward` and `scaler.unscale_`, before clipping."""
        self._check_open()
        if all(phi.grad is None for phi in self.gates.phis):
            remedy = "Call observe() after loss.backward(), before zero_grad(), with a loss that the gated layers reach"
            raise InvalidSetting("no gate has a gradient", remedy=remedy)
        self.score.observe()
        for module in self.gates.modules:
            if not module.gate_fold.trained:
                module.gate_phi.grad = None  # of a frozen weight: scored, but no optimizer is to train it

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
        return count_filters(self.graph, self.kept)

    @property
    def plan(self) -> Plan:
        """What is left, as a plan for the whole network."""
        return Plan(self.graph, self.kept.clone())

    def prune(
        self,
        fraction: float | None = None,
        budget: Budget | None = None,
        *,
        step: float = 1.0,
        optimizer: torch.optim.Optimizer | None = None,
        cut: bool = True,
        repair: Iterable[Any] | None = None,
        images: int = 512,
        reference: nn.Module | None = None,
    ) -> Removal:
        """Remove the channels with the lowest scores, and begin a new score.

        fraction: at most this share of the filters that remain, or one branch, or as many channels as `multiple_of`
            says; without it, as many as the budget needs.
        budget: where to stop, such as Budget(macs=0.4).
        step: at most this share of what the budget counts.
        optimizer: the one that trains the model, so that its state is cut too.
        cut: cut the tensors now; otherwise the channels are only masked until `cut_`, unless a learnt shift behind the
            gate could make them non-zero again. Branches are always cut.
        repair: batches of images, whose labels are ignored: what is left is re-fitted to give what it gave before, as
            `secateur.repair` does. So many `images` are used. The optimizer's momentum is cut and otherwise kept.
        reference: the whole network, to re-fit to its outputs instead.
        """
        self._check_open()
        if fraction is not None and not 0 < fraction <= 1:
            raise InvalidSetting("fraction is out of range", got=fraction, wanted="a share above 0 and at most 1")
        if fraction is None and budget is None:
            raise InvalidSetting("nothing says how much to prune", wanted="a fraction, or a budget as Budget(macs=0.4)")
        if optimizer is not None:
            self.check_optimizer(optimizer)
        target = Target(budget, self.graph, self.latency) if budget is not None else None
        branches = self.limits.removable(self.graph, budget)
        if target is not None:
            check_reachable(target, self.floors, self.limits.multiple, branches)
        observed = self.observed
        if isinstance(self.score, Taylor) and not observed:
            raise InvalidSetting("the score has seen no gradient", remedy="Call observe() after loss.backward()")
        if observed and self.skipped == observed:
            raise InvalidSetting("the score has seen no finite gradient", got=counted(observed, "gradient"))
        scores = checked(self.score, self.agree(self.score.end()), self.kept)
        worth = ranked(self.graph, self.kept, scores, self.rank, self.latency, self.rank_power)
        by_branch = self._branch_worth(scores, branches)
        quota = None
        if fraction is not None:
            gated = filters_per_channel(self.graph)[self.kept & self.gates.removable]
            quota = max(1, round(fraction * int(gated.sum())))
        before, multiple_of, floors, stop = self.kept, self.limits.multiple, self.floors, target
        if target is not None:
            if target.budget.counts == "latency" and self.rank == "score_per_microsecond":
                lost = {name: score for name, (score, _) in by_branch.items()}
                floors, go = best_widths(target, before, scores, floors, multiple_of, lost)
                by_branch, stop = {name: by_branch[name] for name in go}, None
            if (share := target.left(before) - step) > target.budget.share:
                stop = target.at(share)
        after = select(
            self.graph, before, worth, floors, multiple_of=multiple_of, quota=quota, target=stop,
            branches={name: per_unit for name, (_, per_unit) in by_branch.items()},
        )  # fmt: skip
        removed = removed_by_group(self.graph, before, after)
        went = sorted(self.graph.without(after) - self.graph.without(before))
        inside = {name for branch in went for name in self.graph.branch(branch).groups}
        loose = [name for name in removed if name not in inside and self.gates.loose(self.graph.group(name))]
        if loose and not cut and optimizer is None:
            what = f"a learnt shift behind the gates of {loose[0]!r} could make removed channels non-zero"
            raise InvalidSetting(what, remedy="Pass the optimizer, so that they can be cut")
        fitted = None
        if repair is not None:
            self.score.close()
            fitted = self._repaired(after, gather(repair, self.graph.calls["eval"][0], images), reference)
        self.kept = after
        self.gates.mask_(after)
        if cut or loose:
            self.cut_(optimizer)
        elif went:
            # A branch is never masked: its modules go at once.
            present = without_branches(self.graph, self.gates.present.kept, map(self.graph.branch, went))
            self.gates.cut_(present, optimizer)
        if fitted is not None:
            take_weights_(self.gates, *fitted)
        self._begin_score()
        alone = torch.tensor([group.name not in inside for group in self.graph.groups], device="cpu")
        gone = before & ~self.kept & alone[self.graph.group_of]
        return Removal(
            removed=removed,
            filters=count_filters(self.graph, before) - self.filters,
            cost=self.cost,
            met=target is None or target.met(self.kept),
            scores=_deciles(worth[before & self.gates.removable]),
            threshold=float(worth[gone].max()) if bool(gone.any()) else 0.0,
            branches=went,
        )

    def _branch_worth(self, scores: Tensor, branches: list[Branch]) -> dict[str, tuple[float, float]]:
        """The score of each of these branches that is left, and the same divided by what it saves."""
        if not branches:
            return {}
        found = self.agree(self.score.branches(scores, self.kept))
        worth = ranked_branches(self.graph, self.kept, found, branches, self.rank, self.latency, self.rank_power)
        by_name = {branch.name: score for branch, score in zip(self.graph.branches, found.tolist(), strict=True)}
        return {name: (by_name[name], per_unit) for name, per_unit in worth.items()}

    def _repaired(
        self, kept: Tensor, inputs: list[Example], reference: nn.Module | None
    ) -> tuple[nn.Module, list[str]]:
        """A plain copy that keeps these channels and is re-fitted, and the names of the weights that were."""
        before, since, plan = plain_copy(self.gates), self.plan, Plan(self.graph, kept)
        after = shrink_(copy_model(before), plan, since=since)
        whole, cut_by = (before, since) if reference is None else (reference, None)
        return after, repair_(after, whole, plan, inputs, since=cut_by, average=self.agree)

    def cut_(self, optimizer: torch.optim.Optimizer | None = None, multiple_of: int = 1) -> None:
        """Cut the tensors to what is kept, and begin a new score.

        multiple_of: only down to widths that are multiples, with the rest left masked.
        """
        present = self.widened(multiple_of) if multiple_of > 1 else self.kept
        if bool((self.gates.present.kept & ~present).any()):
            self.gates.cut_(present, optimizer)
            if not self.gates.merged:
                self._begin_score()

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
            raise InvalidModel("training has changed removed channels", remedy="Call hold_() before every step")
        self.held = []
        self.cut_()
        return self.model

    def _check_open(self) -> None:
        if self.gates.merged:
            raise InvalidSetting("this Pruner has merged its gates", remedy="Make a new Pruner to prune further")

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if its state cannot be cut, or if it does not train the gates."""
        check_optimizer(optimizer, dict(self.model.named_parameters()))
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = {id(p): name for name, p in self.model.named_parameters()}
        missing = [names[id(phi)] for phi in self.gates.trainable if id(phi) not in held]
        if missing:
            what = f"the optimizer lacks {counted(len(missing), 'gate')}, {missing[0]!r} first"
            raise InvalidSetting(what, remedy="Make it from model.parameters() after the Pruner, not before")


def _deciles(values: Tensor) -> list[float]:
    if not values.numel():
        return []
    ordered = values.double().sort().values
    places = [round(tenth * (ordered.numel() - 1) / 10) for tenth in range(11)]
    return ordered[places].tolist()
