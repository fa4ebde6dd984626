"""Which channels go: one ranking over the whole network, with floors, until a quota or a budget is met."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from secateur.channels.cost import is_kept
from secateur.channels.groups import Branch, ChannelGraph
from secateur.channels.labels import Role
from secateur.errors import InvalidSetting, UnreachableBudget, unknown_name
from secateur.pruning.latency import SMALLEST_SAVING, LatencyTable
from secateur.pruning.settings import Budget, Limits, Rank
from secateur.pruning.widths import Knapsack, Times
from secateur.words import counted


class Target:
    """A budget of one network: what it counts there, and whether it is met.

    table: the times of the layers, for a budget of latency.
    """

    def __init__(self, budget: Budget, graph: ChannelGraph, table: LatencyTable | None = None) -> None:
        if budget.counts == "latency" and table is None:
            raise InvalidSetting(
                "a budget of latency needs the times of the layers",
                remedy="Pass latency=measure_latency(model, example)",
            )
        self.budget, self.graph, self.table = budget, graph, table
        self.whole = self.value(graph.all_kept())

    def value(self, kept: Tensor) -> float:
        """What is counted when these channels are kept."""
        match self.budget.counts:
            case "filters":
                return count_filters(self.graph, kept)
            case "macs":
                return self.graph.cost(kept).macs
            case "params":
                return self.graph.cost(kept).params
        assert self.table is not None
        return self.table.value(self.graph, kept)

    def at(self, share: float) -> Target:
        """The same with another share, at most 1: what is left may take longer than the whole."""
        return Target(Budget(**{self.budget.counts: min(1.0, share)}), self.graph, self.table)

    def left(self, kept: Tensor) -> float:
        """The share that is left."""
        return self.value(kept) / max(1e-9, self.whole)

    def met(self, kept: Tensor) -> bool:
        """Whether no more than the budget is left, but for rounding: 0.29 of 100 filters are 29."""
        return self.value(kept) <= (self.budget.share + 1e-9) * self.whole


def multiples(graph: ChannelGraph, of: int) -> Tensor:
    """Of what each group's number of channels must be a multiple, so that every layer's inputs and outputs are one.

    A channel of a grouped convolution has several: where they are four, every other number of channels will do for 8.
    """
    widths = [{m.indices.shape[1] for m in g.members if m.role != "passes"} for g in graph.groups]
    needed = [math.lcm(1, *(of // math.gcd(of, width) for width in each)) for each in widths]
    return torch.tensor(needed, dtype=torch.long, device="cpu")


def count_filters(graph: ChannelGraph, kept: Tensor, without: Iterable[str] = ()) -> int:
    """Filters of the network when these channels are kept, with those that always stay.

    without: names of branches that are gone, beside those that keep none of their channels.
    """
    gone = graph.tensors_of({*without, *graph.without(kept)})
    ends = sum(
        int(is_kept(channels, kept).sum())
        for (tensor, axis), channels in graph.axes.items()
        if tensor in gone and graph.roles[tensor, axis] == Role.PRODUCES and len(graph.shapes[tensor]) > 1
    )
    stay = sum(f.size for f in graph.frozen if f.tensor in gone and (f.tensor, f.axis) not in graph.axes)
    return graph.num_filters - int(filters_per_channel(graph)[~kept].sum()) - ends - stay


def filters_per_channel(graph: ChannelGraph) -> Tensor:
    return torch.tensor([g.filters_per_channel for g in graph.groups], dtype=torch.long, device="cpu")[graph.group_of]


def decided(limits: Limits, target: Target, device: str) -> Limits:
    """Limits for that type of device; an alignment that it was free to choose never puts the budget out of reach."""
    graph, found = target.graph, limits.on(device)
    branches = limits.removable(graph, target.budget)
    while (
        found is not limits
        and found.multiple > 1
        and not target.met(least(target, found.floors(graph), found.multiple, branches))
    ):
        found = replace(found, multiple_of=found.multiple // 2)
    return found


def first_channels(graph: ChannelGraph, widths: Tensor) -> Tensor:
    """What is kept when each group keeps so many of its channels: the first ones, where only their number counts."""
    kept = graph.all_kept()
    for group, width in zip(graph.groups, widths.tolist(), strict=True):
        kept[group.start + width : group.start + group.size] = False
    return kept


def without_branches(graph: ChannelGraph, kept: Tensor, branches: Iterable[Branch]) -> Tensor:
    """What is kept when these branches go too."""
    for branch in branches:
        kept = kept & ~graph.within(branch)
    return kept


def least(target: Target, floors: Tensor, multiple_of: int, branches: Sequence[Branch] = ()) -> Tensor:
    """What is kept when as little as can be is left of what the budget counts."""
    graph = target.graph
    narrowest = without_branches(graph, first_channels(graph, floors), branches)
    if target.table is None or target.budget.counts != "latency":
        return narrowest
    # A narrower layer may take more time.
    choices = _widths(graph, graph.all_kept(), floors, multiple_of)
    gains = [torch.zeros_like(each, dtype=torch.float64) for each in choices]
    found = Knapsack(Times(target.table, graph, branches), gains, choices, [0.0] * len(branches)).fastest()
    widths = torch.stack([each[place] for each, place in zip(choices, found.tolist(), strict=False)])
    fastest = without_branches(graph, first_channels(graph, widths), branches)
    return min(narrowest, fastest, key=target.value)


def check_reachable(target: Target, floors: Tensor, multiple_of: int = 1, branches: Sequence[Branch] = ()) -> None:
    """Raise if the budget cannot be met even with every group at its floor, and name the floors that matter most.

    branches: those that may go.
    """
    graph, lowest = target.graph, least(target, floors, multiple_of, branches)
    if target.met(lowest):
        return
    left = target.value(lowest)
    held: list[tuple[float, str]] = []
    for group, floor in zip(graph.groups, floors.tolist(), strict=True):
        if floor > group.at_least and bool(lowest[group.span].any()):
            lower = lowest.clone()
            lower[group.start + group.at_least : group.start + group.size] = False
            why = f" because it {graph.ungated[group.name]}" if group.name in graph.ungated else ""
            held.append((left - target.value(lower), f"{group.name} keeps {floor} of {group.size}{why}"))
    largest = [text for _, text in sorted(held, reverse=True)[:3]]
    without = f" and without {counted(len(branches), 'branch', 'branches')}" if branches else ""
    remedy = "Keep more; nothing else can be removed"
    if largest:
        remedy = f"Keep more, or lower min_channels, min_ratio, multiple_of or at_least: {'; '.join(largest)}"
    raise UnreachableBudget(
        f"keep_{target.budget.counts}={target.budget.share:g} cannot be reached",
        got=f"{left / target.whole:.1%} of the {target.budget.unit} with every group at its floor{without}",
        remedy=remedy,
    )


def ranked(
    graph: ChannelGraph,
    kept: Tensor,
    scores: Tensor,
    rank: Rank,
    table: LatencyTable | None = None,
    power: float = 1.0,
) -> Tensor:
    """The scores, or the scores divided by a power of what the removal of each channel would save now."""
    if rank in ("auto", "score"):
        return scores.double()
    if rank not in get_args(Rank):
        raise unknown_name("rank", rank, list(get_args(Rank)))
    if bool((scores[kept] < 0).any()):
        raise InvalidSetting(
            f"rank={rank} divides scores by what a channel saves, which is wrong for negative scores",
            got=f"{float(scores[kept].min()):.3g}",
            remedy='Use rank="score", or a score that is never negative',
        )
    if rank == "score_per_microsecond":
        if table is None:
            raise InvalidSetting(
                f"rank={rank} needs the times of the layers", remedy="Pass latency=measure_latency(model, example)"
            )
        return scores.double() / table.savings(graph, kept) ** power
    saved = graph.savings(kept)[0 if rank == "score_per_mac" else 1]
    return scores.double() / saved.double().clamp_min(1) ** power


def ranked_branches(
    graph: ChannelGraph,
    kept: Tensor,
    scores: Tensor,
    branches: Collection[Branch],
    rank: Rank,
    table: LatencyTable | None = None,
    power: float = 1.0,
) -> dict[str, float]:
    """The score of each of these branches, divided by what its removal saves: channels, or what channels are ranked by.

    scores: of all branches of the graph.
    """
    worth = {}
    for branch, score in zip(graph.branches, scores.tolist(), strict=True):
        rest = kept & ~graph.within(branch)
        if branch not in branches or torch.equal(rest, kept):
            continue
        if rank == "score_per_microsecond":
            assert table is not None
            saved = max(SMALLEST_SAVING, table.value(graph, kept) - table.value(graph, rest))
        elif rank in ("auto", "score"):
            saved = float((kept & ~rest).sum())
        else:
            before, after = graph.cost(kept), graph.cost(rest)
            saved = before.macs - after.macs if rank == "score_per_mac" else before.params - after.params
        worth[branch.name] = score / max(1e-9, saved) ** (power if rank not in ("auto", "score") else 1)
    return worth


def best_widths(
    target: Target,
    kept: Tensor,
    scores: Tensor,
    floors: Tensor,
    multiple_of: int,
    branches: Mapping[str, float] | None = None,
) -> tuple[Tensor, list[str]]:
    """For a budget of time: how many channels each group keeps, and which branches go, to keep the most importance.

    branches: the scores of those that may go.
    """
    graph, table = target.graph, target.table
    assert table is not None
    # What must stay has an infinite score, which sums and differences cannot have.
    finite = [*scores[scores.isfinite()].abs().tolist(), *(abs(s) for s in (branches or {}).values() if s < math.inf)]
    most = 1e3 * (1 + sum(finite))
    scores = scores.double().clamp_max(most)
    branches = {name: min(score, most * len(scores)) for name, score in (branches or {}).items()}
    choices, gains = _widths(graph, kept, floors, multiple_of), list[Tensor]()
    for group, widths in zip(graph.groups, choices, strict=True):
        here = scores[group.span][kept[group.span]].sort(descending=True).values
        gains.append(torch.cat([here.new_zeros(1), here.cumsum(0)])[widths])
    named = [branch for branch in graph.branches if branch.name in branches]
    before = graph.tensors_of(graph.without(kept))
    table = replace(table, layers=tuple(layer for layer in table.layers if layer.name not in before))
    knapsack = Knapsack(Times(table, graph, named), gains, choices, [branches[branch.name] for branch in named])
    rank = "score_per_microsecond"
    of_branches = torch.tensor([branches.get(branch.name, 0.0) for branch in graph.branches], dtype=torch.float64)
    worth = ranked(graph, kept, scores, rank, table)
    greedy = select(
        graph, kept, worth, floors, multiple_of=multiple_of, target=target,
        branches=ranked_branches(graph, kept, of_branches, named, rank, table),
    )  # fmt: skip
    counts = torch.bincount(graph.group_of[greedy], minlength=len(graph.groups))
    start = [int(torch.searchsorted(widths, count)) for widths, count in zip(choices, counts, strict=True)]
    start += [int(branch.name not in graph.without(greedy)) for branch in named]
    found = knapsack.solve(target.budget.share * target.whole, torch.tensor(start, dtype=torch.long, device="cpu"))
    gone = [branch.name for branch, stays in zip(named, found[len(choices) :].tolist(), strict=True) if not stays]
    # Channels of a branch that goes are not removed one by one.
    held = without_branches(graph, graph.all_kept(), (graph.branch(name) for name in gone))
    widths = [
        choice[place if bool(held[group.start]) else -1]
        for group, choice, place in zip(graph.groups, choices, found.tolist(), strict=False)
    ]
    return torch.stack(widths), gone


def _widths(graph: ChannelGraph, kept: Tensor, floors: Tensor, multiple_of: int) -> list[Tensor]:
    """The widths that each group may have: what is left of it, and narrower multiples down to its floor."""
    found = []
    counts = torch.bincount(graph.group_of[kept], minlength=len(graph.groups)).tolist()
    for count, each, floor in zip(counts, multiples(graph, multiple_of).tolist(), floors.tolist(), strict=True):
        narrower = range(-(-max(1, floor) // each) * each, count, each)
        found.append(torch.tensor([*narrower, count], dtype=torch.long, device="cpu"))
    return found


def select(
    graph: ChannelGraph,
    kept: Tensor,
    worth: Tensor,
    floors: Tensor,
    *,
    multiple_of: int = 1,
    quota: int | None = None,
    target: Target | None = None,
    branches: Mapping[str, float] | None = None,
) -> Tensor:
    """The channels to keep when those of `kept` with the lowest scores go.

    quota: how many filters may go; at least one step is made, which may be a branch.
    target: stop where the budget is met; the last channel removed is one that it needed.
    multiple_of: groups get narrower in steps that end at a multiple, ranked by the mean worth of the step.
    branches: the worth of those that may go, each in one step with all its channels.
    """
    group_of = graph.group_of
    here = kept.nonzero()[:, 0]
    here = here[torch.argsort(worth[here], stable=True)]
    here = here[torch.argsort(group_of[here], stable=True)]
    group = group_of[here]
    widths = torch.bincount(group, minlength=len(graph.groups))
    place = torch.arange(here.numel(), device="cpu") - (torch.cumsum(widths, 0) - widths)[group]
    each = multiples(graph, multiple_of)[group]
    first = (widths - 1)[group] % each + 1
    step = torch.where(place < first, 0, 1 + (place - first).div(each, rounding_mode="floor"))
    after = widths[group] - first - step * each
    allowed = after >= floors[group]
    here, group, step = here[allowed], group[allowed], step[allowed]
    whole = {name: (kept & graph.within(graph.branch(name))).nonzero()[:, 0] for name in branches or {}}
    if not here.numel() and not whole:
        return kept.clone()

    pairs = group * (int(step.max()) + 1 if step.numel() else 1) + step
    _, number, sizes = torch.unique_consecutive(pairs, return_inverse=True, return_counts=True)
    mean = (
        torch.zeros(sizes.numel(), dtype=torch.float64, device="cpu").index_add_(0, number, worth[here].double())
        / sizes
    )
    if multiple_of > 1 and mean.numel():
        # Rounding must not put a later step of a group before an earlier one.
        per_group = torch.bincount(group[torch.cumsum(sizes, 0) - 1])
        mean = torch.cat([part.cummax(0).values for part in mean.split(per_group.tolist()) if part.numel()])
    for name, own in whole.items():
        here, number = torch.cat([here, own]), torch.cat([number, torch.full_like(own, mean.numel())])
        mean = torch.cat([mean, mean.new_tensor([(branches or {})[name]])])
    order = torch.argsort(mean[number], stable=True)
    if whole:
        order = order[_first_of_each(here[order])]
    here, number = here[order], number[order]
    ends = torch.cumsum(torch.unique_consecutive(number, return_counts=True)[1], 0)

    count = ends.numel()
    if quota is not None:
        filters = torch.cumsum(filters_per_channel(graph)[here], 0)[ends - 1]
        count = max(1, int((filters <= quota).sum()))
    if target is not None:
        count = min(count, _fewest(target, kept, here, ends))
    result = kept.clone()
    if count:
        result[here[: int(ends[count - 1])]] = False
    return result


def _first_of_each(values: Tensor) -> Tensor:
    """Whether each of the values is the first of its kind."""
    order = torch.argsort(values, stable=True)
    first = torch.ones_like(values, dtype=torch.bool)
    first[order[1:]] = values[order[1:]] != values[order[:-1]]
    return first


def _fewest(target: Target, kept: Tensor, order: Tensor, ends: Tensor) -> int:
    """How many steps of this order are needed to meet the budget; all if that is not enough."""
    low, high = 0, ends.numel()
    while low < high:
        middle = (low + high) // 2
        trial = kept.clone()
        if middle:
            trial[order[: int(ends[middle - 1])]] = False
        if target.met(trial):
            high = middle
        else:
            low = middle + 1
    return low


def removed_by_group(graph: ChannelGraph, before: Tensor, after: Tensor) -> dict[str, int]:
    """How many channels each group has lost between the two."""
    gone = before & ~after
    return {group.name: count for group in graph.groups if (count := int(gone[group.span].sum()))}
