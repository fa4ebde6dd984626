"""Which widths and branches keep the most importance within a budget of time: a knapsack whose items share layers.

The time of a layer depends on the widths of two groups or more, so what a channel saves depends on the widths of its
neighbours. For a price of time, each group in turn takes the width that is best beside the others, and each branch
stays or goes, until none changes. The price is searched until the budget is met; what is left of the budget is filled,
and widths and branches are traded.

A choice is a list of places: for each group that of its width among those allowed, then for each branch 1 if it stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from secateur.channels.groups import Branch, ChannelGraph
from secateur.pruning.latency import LatencyTable

PRICES = 40
"""Prices of time that are tried."""
SWEEPS = 20
"""Times that all groups and branches may change for one price."""
TRADES = 200
"""Times that one or two groups may change their widths at the end."""
NEAR = 8
"""Widths on either side that count for that."""


class Times:
    """The time of a network from the widths of its groups and the branches that stay, for many choices at once."""

    def __init__(self, table: LatencyTable, graph: ChannelGraph, branches: Sequence[Branch] = ()) -> None:
        layers, groups = table.layers, len(graph.groups)
        sizes = torch.tensor([group.size for group in graph.groups], dtype=torch.float64, device="cpu")
        self.constant = torch.zeros(2, len(layers), dtype=torch.float64, device="cpu")
        self.each = torch.zeros(2, len(layers), groups, dtype=torch.float64, device="cpu")
        """How many inputs and outputs of a layer are a channel of each group."""
        points = max((len(grid) for layer in layers for grid in (layer.inputs, layer.outputs)), default=1)
        self.grids = torch.zeros(2, len(layers), points, dtype=torch.float64, device="cpu")
        self.times = torch.zeros(len(layers), points, points, dtype=torch.float64, device="cpu")
        self.last = torch.zeros(2, len(layers), dtype=torch.long, device="cpu")
        for number, layer in enumerate(layers):
            for side, (axis, grid) in enumerate(zip(layer.axes, (layer.inputs, layer.outputs), strict=True)):
                channels = graph.axes.get((layer.name, axis)) if axis is not None else None
                if channels is None:
                    self.constant[side, number] = grid[-1]
                else:
                    self.constant[side, number] = int((channels < 0).sum())
                    here = graph.group_of[channels[channels >= 0]]
                    self.each[side, number] = torch.bincount(here, minlength=groups) / sizes
                padded = [*grid, *(grid[-1] + 1 + i for i in range(points - len(grid)))]
                self.grids[side, number] = torch.tensor(padded, dtype=torch.float64)
                self.last[side, number] = max(0, len(grid) - 2)
            rows = torch.tensor(layer.microseconds, dtype=torch.float64)
            rows = torch.cat([rows, rows[-1:].expand(points - rows.shape[0], -1)])
            self.times[number] = torch.cat([rows, rows[:, -1:].expand(-1, points - rows.shape[1])], 1)
        names = [{*branch.cut.tensors} for branch in branches]
        self.branch_of = torch.tensor(
            [next((n for n, own in enumerate(names) if layer.name in own), -1) for layer in layers],
            dtype=torch.long, device="cpu",
        )  # fmt: skip
        """The branch that each layer is part of, or -1."""
        numbers = {group.name: number for number, group in enumerate(graph.groups)}
        self.inside = [[numbers[name] for name in branch.groups] for branch in branches]
        """The groups of each branch."""
        self.home = {group: number for number, inside in enumerate(self.inside) for group in inside}
        """The branch of each group within one."""
        self.touched = [self._of_layers(self.each[:, :, group].sum(0).nonzero()[:, 0]) for group in range(groups)]
        """The layers that each group changes."""
        self.parts = [self._of_layers((self.branch_of == n).nonzero()[:, 0]) for n in range(len(branches))]
        """The layers of each branch."""

    def _of_layers(self, layers: Tensor) -> tuple[Tensor, ...]:
        parts = (part[:, layers] for part in (self.each, self.constant, self.grids, self.last))
        return (layers, *parts, self.times[layers].flatten(1))

    def __call__(self, widths: Tensor, stays: Tensor) -> float:
        """Microseconds of the network with these widths of its groups and these branches."""
        values = self.each @ widths.double() + self.constant
        each = _interpolated(values[..., None], self.grids, self.last, self.times.flatten(1))
        return float(each[:, 0] @ self._weights(stays))

    def _weights(self, stays: Tensor) -> Tensor:
        """For every layer 1, or 0 if its branch is gone."""
        return torch.cat([stays.double(), torch.ones(1, dtype=torch.float64, device="cpu")])[self.branch_of]

    def along(self, group: int, widths: Tensor, stays: Tensor, choices: Tensor) -> Tensor:
        """Microseconds of the layers that the group changes, for each choice of its width beside the other widths.

        Its own branch counts as one that stays.
        """
        layers, each, constant, *table = self.touched[group]
        if group in self.home:
            stays = stays.clone()
            stays[self.home[group]] = 1
        values = each @ widths.double() + constant
        times = _interpolated(values[..., None] + each[:, :, group, None] * (choices - widths[group]), *table)
        return self._weights(stays)[layers] @ times

    def of_branch(self, branch: int, widths: Tensor) -> float:
        """Microseconds of the layers of a branch."""
        _, each, constant, *table = self.parts[branch]
        return float(_interpolated((each @ widths.double() + constant)[..., None], *table).sum())


def _interpolated(values: Tensor, grids: Tensor, last: Tensor, times: Tensor) -> Tensor:
    """The times of layers, each between the four nearest points of its grids.

    values: inputs or outputs x layer x choice.
    """
    place = torch.searchsorted(grids, values, right=True).sub_(1)
    place = torch.minimum(place.clamp_min_(0), last[..., None])
    points = grids.shape[2]
    following = (place + 1).clamp_max_(points - 1)
    low, high = grids.gather(2, place), grids.gather(2, following)
    down, right = ((values - low) / (high - low).clamp_min_(1e-12)).unbind(0)
    upper, lower = points * place[0], points * following[0]
    at = [times.gather(1, row + column) for row in (upper, lower) for column in (place[1], following[1])]
    first, second = torch.lerp(at[0], at[1], right), torch.lerp(at[2], at[3], right)
    return torch.lerp(first, second, down)


class Knapsack:
    """Groups of channels with the widths that each may have, and branches that may go."""

    def __init__(
        self, times: Times, gains: Sequence[Tensor], widths: Sequence[Tensor], branches: Sequence[float] = ()
    ) -> None:
        """gains: for each group the importance kept at each of its `widths`, which are in rising order.

        branches: the importance that is lost with each of the branches of `times`.
        """
        self.times, self.gains, self.widths = times, gains, widths
        self.padded = nn.utils.rnn.pad_sequence([each.double() for each in widths], batch_first=True)
        self.rest = [
            sum(float(gains[group][-1]) for group in inside) - lost
            for inside, lost in zip(times.inside, branches, strict=True)
        ]
        """What counts as kept of the importance within each branch once it is gone."""

    def kept(self, places: Tensor) -> float:
        """The importance that a choice keeps."""
        groups, stays = self._split(places)
        gone = {branch for branch, here in enumerate(stays.tolist()) if not here}
        within = sum(
            float(self.gains[group][place])
            for group, place in enumerate(groups.tolist())
            if self.times.home.get(group, -1) not in gone
        )
        return within + sum(self.rest[branch] for branch in gone)

    def time(self, places: Tensor) -> float:
        return self.times(self._widths_of(places), self._split(places)[1])

    def _split(self, places: Tensor) -> tuple[Tensor, Tensor]:
        return places[: len(self.widths)], places[len(self.widths) :]

    def _widths_of(self, places: Tensor) -> Tensor:
        groups, _ = self._split(places)
        return self.padded[torch.arange(groups.numel(), device="cpu"), groups]

    @property
    def narrowest(self) -> Tensor:
        return torch.zeros(len(self.widths) + len(self.rest), dtype=torch.long, device="cpu")

    @property
    def widest(self) -> Tensor:
        last = [widths.numel() - 1 for widths in self.widths]
        return torch.tensor([*last, *(1 for _ in self.rest)], dtype=torch.long, device="cpu")

    def fastest(self) -> Tensor:
        """The choice that takes the least time, as far as changes of one item lead to it."""
        return self._best_at(1e30, self.narrowest)

    def solve(self, budget: float, start: Tensor | None = None) -> Tensor:
        """The best choice found whose time is within the budget, never worse than `start` if that is."""
        if self.time(self.widest) <= budget:
            return self.widest
        found = [self._priced(budget, begin) for begin in (self.widest, self.narrowest)]
        found += [start] if start is not None else []
        feasible = sorted((each for each in found if self.time(each) <= budget), key=self.kept)
        improved = [self._traded(each, budget) for each in feasible[-2:]]
        return max(improved, key=self.kept, default=self.fastest())

    def _priced(self, budget: float, begin: Tensor) -> Tensor:
        """The choice at the lowest price of time that meets the budget, with all groups starting from `begin`."""
        low, high, best = 0.0, 1.0, self.fastest()
        while self.time(self._best_at(high, begin)) > budget and high < 1e30:
            low, high = high, 8 * high
        for _ in range(PRICES):
            middle = (low * high) ** 0.5 if low else high / 8
            found = self._best_at(middle, begin)
            if self.time(found) <= budget:
                high, best = middle, max(best, found, key=self.kept)
            else:
                low = middle
            if high <= low * 1.001:
                break
        return best

    def _best_at(self, price: float, begin: Tensor) -> Tensor:
        """Where no group or branch alone does better at this price of a microsecond."""
        places = begin.clone()
        widths, stays = self._widths_of(places), self._split(places)[1]
        for _ in range(SWEEPS):
            before = places.clone()
            for group in range(len(self.widths)):
                choices = self.widths[group]
                if choices.numel() > 1:
                    value = self.gains[group] - price * self.times.along(group, widths, stays, choices)
                    places[group] = value.argmax()
                    widths[group] = choices[places[group]]
            for branch, rest in enumerate(self.rest):
                stays[branch] = self._within(branch, places) - price * self.times.of_branch(branch, widths) > rest
            if torch.equal(places, before):
                break
        return places

    def _within(self, branch: int, places: Tensor) -> float:
        """The importance within a branch, if it stays."""
        return sum(float(self.gains[group][places[group]]) for group in self.times.inside[branch])

    def _traded(self, places: Tensor, budget: float) -> Tensor:
        """Some item gains, or one gains and another loses, as long as that gains within the budget."""
        places = places.clone()
        for _ in range(TRADES):
            left = budget - self.time(places)
            changes = [self._changes(item, places) for item in range(places.numel())]
            gain, time, group, place = (torch.cat(parts) for parts in zip(*changes, strict=True))
            order = torch.argsort(gain / time.clamp_min(1e-9), descending=True)
            single = order[(gain[order] > 0) & (time[order] <= left)][:1].tolist()
            trades = [[each] for each in single] or self._pairs(gain, time, group, left)
            for trade in trades:
                trial = places.clone()
                trial[group[trade]] = place[trade]
                if self.time(trial) <= budget:
                    places = trial
                    break
            else:
                break
        return places

    def _changes(self, group: int, places: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For the places next to its present one, what a group or branch gains and takes, its number, and the places.

        Of a group in a branch that is gone there are none.
        """
        now, groups = int(places[group]), len(self.widths)
        stays = self._split(places)[1]
        if group >= groups:
            branch, sign = group - groups, 1 - 2 * now
            gain = sign * (self._within(branch, places) - self.rest[branch])
            time = sign * self.times.of_branch(branch, self._widths_of(places))
            gained, taken = torch.tensor([[gain], [time]], dtype=torch.float64, device="cpu")
            return gained, taken, torch.full((1,), group, device="cpu"), torch.full((1,), 1 - now, device="cpu")
        near = torch.arange(max(0, now - NEAR), min(self.widths[group].numel(), now + NEAR + 1), device="cpu")
        home = self.times.home.get(group)
        near = near[near != now] if home is None or bool(stays[home]) else near[:0]
        gain, widths = self.gains[group], self._widths_of(places)
        choices = self.widths[group][torch.cat([near, places[group : group + 1]])]
        time = self.times.along(group, widths, stays, choices)
        return gain[near] - gain[now], time[:-1] - time[-1], torch.full_like(near, group), near

    def _pairs(self, gain: Tensor, time: Tensor, group: Tensor, left: float) -> list[list[int]]:
        """Pairs of changes that gain most, if they did not change each other's times."""
        # Two that share layers take less time together than apart.
        slack = 0.02 * float(time.abs().max())
        narrower, wider = (gain <= 0).nonzero()[:, 0], (gain > 0).nonzero()[:, 0]
        gained = gain[narrower, None] + gain[wider]
        allowed = (time[narrower, None] + time[wider] <= left + slack) & (group[narrower, None] != group[wider])
        gained = torch.where(allowed, gained, 0.0).flatten()
        best = gained.topk(min(16, gained.numel())).indices
        best = best[gained[best] > 1e-12 * gain.abs().sum()]
        return [[int(narrower[pair // wider.numel()]), int(wider[pair % wider.numel()])] for pair in best.tolist()]
