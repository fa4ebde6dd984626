"""Which channels go: one ranking over the whole network, with floors, until a quota or a budget is met."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from secateur.channels.groups import ChannelGraph
from secateur.errors import InvalidSetting, UnreachableBudget, unknown_name
from secateur.pruning.latency import LatencyTable
from secateur.pruning.settings import Budget, Limits, Rank
from secateur.pruning.widths import Knapsack, Times


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
                return self.graph.count_macs(kept)
            case "params":
                return self.graph.count_params(kept)
        assert self.table is not None
        return self.table.value(self.graph, kept)

    def at(self, share: float) -> Target:
        """The same with another share."""
        return Target(Budget(**{self.budget.counts: share}), self.graph, self.table)

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


def count_filters(graph: ChannelGraph, kept: Tensor) -> int:
    """Filters of the network when these channels are kept, with those that always stay."""
    return graph.num_filters - int(filters_per_channel(graph)[~kept].sum())


def filters_per_channel(graph: ChannelGraph) -> Tensor:
    return torch.tensor([g.filters_per_channel for g in graph.groups], dtype=torch.long, device="cpu")[graph.group_of]


def decided(limits: Limits, target: Target, device: str) -> Limits:
    """Limits for that type of device; an alignment that it was free to choose never puts the budget out of reach."""
    graph, found = target.graph, limits.on(device)
    while found is not limits and found.multiple > 1 and not target.met(first_channels(graph, found.floors(graph))):
        found = replace(found, multiple_of=found.multiple // 2)
    return found


def first_channels(graph: ChannelGraph, widths: Tensor) -> Tensor:
    """What is kept when each group keeps so many of its channels: the first ones, where only their number counts."""
    kept = graph.all_kept()
    for group, width in zip(graph.groups, widths.tolist(), strict=True):
        kept[group.start + width : group.start + group.size] = False
    return kept


def check_reachable(target: Target, floors: Tensor) -> None:
    """Raise if the budget cannot be met even with every group at its floor, and name the floors that matter most."""
    graph, lowest = target.graph, first_channels(target.graph, floors)
    if target.met(lowest):
        return
    left = target.value(lowest)
    held: list[tuple[float, str]] = []
    for group, floor in zip(graph.groups, floors.tolist(), strict=True):
        if floor > group.at_least:
            lower = lowest.clone()
            lower[group.start + group.at_least : group.start + group.size] = False
            why = f" because it {graph.ungated[group.name]}" if group.name in graph.ungated else ""
            held.append((left - target.value(lower), f"{group.name} keeps {floor} of {group.size}{why}"))
    largest = [text for _, text in sorted(held, reverse=True)[:3]]
    remedy = "Keep more; nothing else can be removed"
    if largest:
        remedy = f"Keep more, or lower min_channels, min_ratio, multiple_of or at_least: {'; '.join(largest)}"
    raise UnreachableBudget(
        f"keep_{target.budget.counts}={target.budget.share:g} cannot be reached",
        got=f"{left / target.whole:.1%} of the {target.budget.unit} with every group at its floor",
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


def best_widths(target: Target, kept: Tensor, scores: Tensor, floors: Tensor, multiple_of: int) -> Tensor:
    """For a budget of time: how many channels of each group are kept to keep the most importance within it."""
    graph = target.graph
    assert target.table is not None
    gains, choices = list[Tensor](), list[Tensor]()
    for group, each, floor in zip(graph.groups, multiples(graph, multiple_of).tolist(), floors.tolist(), strict=True):
        here = scores[group.span][kept[group.span]].double().sort(descending=True).values
        multiple = range(-(-max(1, floor) // each) * each, here.numel(), each)
        choices.append(torch.tensor([*multiple, here.numel()], dtype=torch.long, device="cpu"))
        gains.append(torch.cat([here.new_zeros(1), here.cumsum(0)])[choices[-1]])
    knapsack = Knapsack(Times(target.table, graph), gains, choices)
    worth = ranked(graph, kept, scores, "score_per_microsecond", target.table)
    greedy = select(graph, kept, worth, floors, multiple_of=multiple_of, target=target)
    counts = torch.bincount(graph.group_of[greedy], minlength=len(graph.groups))
    start = [int(torch.searchsorted(widths, count)) for widths, count in zip(choices, counts, strict=True)]
    found = knapsack.solve(target.budget.share * target.whole, torch.tensor(start, dtype=torch.long, device="cpu"))
    return torch.stack([widths[place] for widths, place in zip(choices, found.tolist(), strict=True)])


def select(
    graph: ChannelGraph,
    kept: Tensor,
    worth: Tensor,
    floors: Tensor,
    *,
    multiple_of: int = 1,
    quota: int | None = None,
    target: Target | None = None,
) -> Tensor:
    """The channels to keep when those of `kept` with the lowest scores go.

    quota: how many filters may go; at least one step is made.
    target: stop where the budget is met; the last channel removed is one that it needed.
    multiple_of: groups get narrower in steps that end at a multiple, ranked by the mean worth of the step.
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
    if not here.numel():
        return kept.clone()

    pairs = group * (int(step.max()) + 1) + step
    _, number, sizes = torch.unique_consecutive(pairs, return_inverse=True, return_counts=True)
    mean = (
        torch.zeros(sizes.numel(), dtype=torch.float64, device="cpu").index_add_(0, number, worth[here].double())
        / sizes
    )
    if multiple_of > 1:
        # Rounding must not put a later step of a group before an earlier one.
        per_group = torch.bincount(group[torch.cumsum(sizes, 0) - 1])
        mean = torch.cat([part.cummax(0).values for part in mean.split(per_group.tolist()) if part.numel()])
    order = torch.argsort(mean[number], stable=True)
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
