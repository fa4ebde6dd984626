"""Which channels go: one ranking over the whole network, with floors, until a quota or a budget is met."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from numbers import Real
from typing import Literal, get_args

import torch
from torch import Tensor

from secateur.channels.groups import ChannelGraph
from secateur.errors import InvalidSetting, UnreachableBudget, unknown_name
from secateur.pruning.latency import LatencyTable

Rank = Literal["score", "score_per_mac", "score_per_param", "score_per_microsecond"]
UNITS = {"macs": "MACs", "params": "parameters", "filters": "filters", "latency": "microseconds"}


@dataclass(frozen=True)
class Budget:
    """A share of the whole network's MACs, parameters, filters or latency to be kept."""

    kind: str
    share: float
    table: LatencyTable | None = None
    """What layers take, for a budget of latency."""

    def __post_init__(self) -> None:
        if self.kind not in UNITS:
            raise unknown_name("budget", self.kind, list(UNITS))
        if not 0 < self.share <= 1:
            raise InvalidSetting(f"keep_{self.kind} is a share, above 0 and at most 1, got {self.share}")
        if self.kind == "latency" and self.table is None:
            raise InvalidSetting("keep_latency needs to know what layers take: latency=measure_latency(model, example)")

    def value(self, graph: ChannelGraph, kept: Tensor) -> float:
        if self.kind == "filters":
            return graph.num_filters - int(filters_per_channel(graph)[~kept].sum())
        if self.table is not None:
            return self.table.value(graph, kept)
        return (graph.count_macs if self.kind == "macs" else graph.count_params)(kept)

    def whole(self, graph: ChannelGraph) -> float:
        return self.value(graph, graph.all_kept())

    def left(self, graph: ChannelGraph, kept: Tensor) -> float:
        return self.value(graph, kept) / max(1e-9, self.whole(graph))

    def met(self, graph: ChannelGraph, kept: Tensor) -> bool:
        """Whether no more than the share is left, but for rounding: 0.29 of 100 filters are 29."""
        return self.value(graph, kept) <= (self.share + 1e-9) * self.whole(graph)


@dataclass(frozen=True)
class Limits:
    """How narrow groups of channels may get."""

    min_channels: int = 1
    min_ratio: float = 0.1
    multiple_of: int = 1
    at_least: Mapping[str, float] = field(default_factory=dict)
    """By name of a layer, with wildcards: how many channels it keeps (8), or which share of them (0.5; 1.0 for all)."""

    def __post_init__(self) -> None:
        if self.min_channels < 1 or self.multiple_of < 1:
            raise InvalidSetting("min_channels and multiple_of are numbers of channels, 1 or more")
        if not 0 <= self.min_ratio <= 1:
            raise InvalidSetting(f"min_ratio is a share between 0 and 1, got {self.min_ratio}")

    def floors(self, graph: ChannelGraph) -> Tensor:
        """How many channels each group must keep; all of it where no gate can switch them off."""
        unused = set(self.at_least)
        floors = []
        for group, multiple in zip(graph.groups, multiples(graph, self.multiple_of).tolist(), strict=True):
            low = max(group.at_least, self.min_channels, math.floor(self.min_ratio * group.size + 1e-9))
            for pattern, wanted in self.at_least.items():
                if any(fnmatchcase(name, pattern) for name in (group.name, *group.layers)):
                    unused.discard(pattern)
                    low = max(low, _count(wanted, group.size))
            low = group.size if group.name in graph.ungated else min(low, group.size)
            floors.append(_aligned(low, group.size, multiple))
        if unused:
            known = [name for group in graph.groups for name in group.layers]
            raise unknown_name("layer with removable channels", sorted(unused)[0], known)
        return torch.tensor(floors, dtype=torch.long, device="cpu")


def _count(wanted: float, size: int) -> int:
    """A number of channels, from a share (a float up to 1.0) or from the number itself."""
    if not isinstance(wanted, Real) or not 0 <= wanted < math.inf or (wanted > 1 and wanted != int(wanted)):
        raise InvalidSetting(f"at_least takes a number of channels (8), or a share of them (0.5), got {wanted!r}")
    return math.ceil(wanted * size - 1e-9) if isinstance(wanted, float) and wanted <= 1 else int(wanted)


def _aligned(low: int, size: int, multiple: int) -> int:
    """The smallest width that is allowed: a multiple, or the whole."""
    return min(size, -(-low // multiple) * multiple)


def multiples(graph: ChannelGraph, of: int) -> Tensor:
    """Of what each group's number of channels must be a multiple, so that every layer's inputs and outputs are one.

    A channel of a grouped convolution has several: where they are four, every other number of channels will do for 8.
    """
    widths = [{m.indices.shape[1] for m in g.members if m.role != "passes"} for g in graph.groups]
    needed = [math.lcm(1, *(of // math.gcd(of, width) for width in each)) for each in widths]
    return torch.tensor(needed, dtype=torch.long, device="cpu")


def filters_per_channel(graph: ChannelGraph) -> Tensor:
    return torch.tensor([g.filters_per_channel for g in graph.groups], dtype=torch.long, device="cpu")[graph.group_of]


def check_reachable(graph: ChannelGraph, budget: Budget, floors: Tensor) -> None:
    """Raise if the budget cannot be met even with every group at its floor, and say which floors hold."""
    lowest = graph.all_kept()
    for group, floor in zip(graph.groups, floors.tolist(), strict=True):
        lowest[group.start + floor : group.start + group.size] = False
    if budget.met(graph, lowest):
        return
    whole, left = budget.whole(graph), budget.value(graph, lowest)
    held: list[tuple[float, str]] = []
    for group, floor in zip(graph.groups, floors.tolist(), strict=True):
        if floor > group.at_least:
            lower = lowest.clone()
            lower[group.start + group.at_least : group.start + group.size] = False
            why = f" because it {graph.ungated[group.name]}" if group.name in graph.ungated else ""
            held.append((left - budget.value(graph, lower), f"{group.name} keeps {floor} of {group.size}{why}"))
    listed = "; ".join(text for _, text in sorted(held, reverse=True)[:3])
    floors_text, remedy = "", "keep more; nothing else can be removed"
    if listed:
        floors_text = f" The floors that hold most: {listed}."
        remedy = "keep more, or lower min_channels, min_ratio, multiple_of or at_least"
    raise UnreachableBudget(
        f"keep_{budget.kind}={budget.share:g} cannot be reached: with every group at its floor {left / whole:.1%} of "
        f"the {UNITS[budget.kind]} are left.{floors_text} Remedy: {remedy}"
    )


def ranked(
    graph: ChannelGraph,
    kept: Tensor,
    scores: Tensor,
    rank: Rank,
    table: LatencyTable | None = None,
    power: float = 1.0,
) -> Tensor:
    """The scores, divided by (a power of) what each channel would save now if so asked."""
    if rank == "score":
        return scores.double()
    if rank not in get_args(Rank):
        raise unknown_name("rank", rank, list(get_args(Rank)))
    if bool((scores[kept] < 0).any()):
        raise InvalidSetting(
            f"rank={rank} divides scores by what a channel saves, which would favour the wrong ones among negative "
            f"scores, as {float(scores[kept].min()):.3g}: rank by score, or give none below zero"
        )
    if rank == "score_per_microsecond":
        if table is None:
            raise InvalidSetting(f"{rank} needs to know what layers take: latency=measure_latency(model, example)")
        return scores.double() / table.savings(graph, kept) ** power
    saved = graph.savings(kept)[0 if rank == "score_per_mac" else 1]
    return scores.double() / saved.double().clamp_min(1) ** power


def select(
    graph: ChannelGraph,
    kept: Tensor,
    worth: Tensor,
    floors: Tensor,
    *,
    multiple_of: int = 1,
    quota: int | None = None,
    budget: Budget | None = None,
) -> Tensor:
    """The channels to keep when the least worthy of `kept` go.

    quota: how many filters may go; at least one step is taken.
    budget: stop where it is met; the last channel taken is one it needed.
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
    if budget is not None:
        count = min(count, _fewest(graph, kept, here, ends, budget))
    result = kept.clone()
    if count:
        result[here[: int(ends[count - 1])]] = False
    return result


def _fewest(graph: ChannelGraph, kept: Tensor, order: Tensor, ends: Tensor, budget: Budget) -> int:
    """How many steps of this order are needed to meet the budget; all if that is not enough."""
    low, high = 0, ends.numel()
    while low < high:
        middle = (low + high) // 2
        trial = kept.clone()
        if middle:
            trial[order[: int(ends[middle - 1])]] = False
        if budget.met(graph, trial):
            high = middle
        else:
            low = middle + 1
    return low


def removed_by_group(graph: ChannelGraph, before: Tensor, after: Tensor) -> dict[str, int]:
    """How many channels each group has lost between the two."""
    gone = before & ~after
    return {group.name: count for group in graph.groups if (count := int(gone[group.span].sum()))}
