"""Channels, groups of channels, and what stays: the result of the analysis."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from secateur.channels.blocks import BlockCut
from secateur.channels.cost import Cost, CostRow, Formula, savings
from secateur.channels.example import Calls
from secateur.channels.labels import Role, labels_of
from secateur.channels.reasons import Reason
from secateur.channels.sites import Site
from secateur.errors import InvalidSetting, unknown_name
from secateur.words import counted


@dataclass(frozen=True)
class Member:
    """The slices of one tensor along one axis that belong to a group."""

    tensor: str
    axis: int
    role: str
    """"produces", "passes" or "consumes"."""
    indices: Tensor
    """Row c: the indices that belong to channel c of the group."""


@dataclass(frozen=True)
class ChannelGroup:
    """Channels with the same members; any of them can be removed, each with all its slices."""

    name: str
    start: int
    """Number of the group's first channel in the graph's one list of channels."""
    size: int
    members: tuple[Member, ...]
    at_least: int
    """The fewest channels that can be kept: one, or two where the code drops axes of size one."""
    filters_per_channel: int
    """How many filters (rows of convolutions and linear layers) one channel removes."""
    inexact: Reason | None
    """Why the masked and the shrunk network differ here, if they do."""

    @property
    def exact(self) -> bool:
        return self.inexact is None

    @property
    def span(self) -> slice:
        """Where its channels are in the graph's one list."""
        return slice(self.start, self.start + self.size)

    def has_any(self, channels: Tensor) -> bool:
        """Whether any of these, by their numbers in the graph, is a channel of this group."""
        return bool(((channels >= self.start) & (channels < self.start + self.size)).any())

    @property
    def layers(self) -> list[str]:
        """The layers whose filters these are."""
        return [owner(m.tensor) for m in self.members if m.role == "produces" and m.tensor.endswith("weight")]


@dataclass(frozen=True)
class FrozenChannels:
    """Filters of one layer that must stay, and why."""

    name: str
    tensor: str
    axis: int
    indices: Tensor
    reason: Reason

    @property
    def size(self) -> int:
        return self.indices.numel()


@dataclass(frozen=True)
class SizeAttribute:
    """A number of channels that a module keeps in an attribute."""

    module: str
    attribute: str
    position: int | None
    size: int
    channels: Tensor


@dataclass(frozen=True)
class Branch:
    """An addend of a sum that can go, as a whole, with all that only serves to compute it."""

    name: str
    """That of its block."""
    cut: BlockCut
    """What is left of the block, and which parameters and buffers go."""
    addend: str | None
    """The module whose output is the addend, None if the code of the block computes it."""
    rows: tuple[int, ...]
    """Its multiply-adds: positions in the graph's `layers`."""
    groups: tuple[str, ...]
    """The groups of channels that lie wholly within it."""
    gate: str | None = None
    """The module whose gates multiply the addend, None if there is none: their scores add up to that of the branch."""

    @property
    def block(self) -> str:
        """The module that encloses the branch and the sum."""
        return self.cut.block

    @property
    def left(self) -> list[str]:
        """What is left of the block: names of its children, or of activations."""
        return [link.name for link in self.cut.left]

    @property
    def modules(self) -> list[str]:
        """The modules whose parameters and buffers go."""
        return list(dict.fromkeys(owner(tensor) for tensor in self.cut.tensors))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"name": self.name, "addend": self.addend, "groups": list(self.groups), **self.cut.to_dict()}


def owner(tensor: str) -> str:
    """The module that a parameter or buffer belongs to.

    >>> owner("layer1.0.conv1.weight")
    'layer1.0.conv1'
    """
    return tensor.rpartition(".")[0] or tensor


@dataclass(frozen=True, eq=False)
class ChannelGraph:
    """Which channels of a network are coupled, and which must stay. `print` it; `to_dict` is its JSON form."""

    groups: tuple[ChannelGroup, ...]
    frozen: tuple[FrozenChannels, ...]
    shapes: dict[str, tuple[int, ...]]
    """Every parameter and buffer by name (tied ones once)."""
    axes: dict[tuple[str, int], Tensor]
    """For each axis that can lose channels the channel number at each index, -1 where it always stays."""
    roles: dict[tuple[str, int], Role]
    attributes: tuple[SizeAttribute, ...]
    layers: tuple[CostRow, ...]
    """Multiply-adds, one row per operator call."""
    sizes: tuple[CostRow, ...]
    """Parameters, one row per parameter."""
    sites: tuple[Site, ...]
    """Where factors per channel can be inserted."""
    ungated: dict[str, Reason]
    """Groups that cannot take a factor per channel, with the reason."""
    final: tuple[str, ...]
    """Parameters of the layers whose output is the model's."""
    input: str
    """The shapes of the example, as text."""
    notes: tuple[str, ...] = ()
    calls: Calls = field(default_factory=dict, repr=False)
    partial: bool = False
    """Whether a forward pass may leave parts of the model out, as this one did or other values might."""
    channel_of: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long), repr=False)
    """For every label of the analysis its channel, or -1."""
    padded: tuple[str, ...] = ()
    """Groups that the forward pass pads with zeros, whose number its code computes."""
    branches: tuple[Branch, ...] = ()
    """Branches that can go."""
    bound: dict[str, Reason] = field(default_factory=dict)
    """Branches that must stay, by the module that adds, with the reason."""
    unused: tuple[str, ...] = ()
    """The outermost modules with parameters that never ran, in evaluation or training mode."""

    @property
    def num_channels(self) -> int:
        return self.groups[-1].start + self.groups[-1].size if self.groups else 0

    @cached_property
    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """The channels of all axes one after another, and at each place the number of its axis and the index there."""
        lengths = torch.tensor([channels.numel() for channels in self.axes.values()], dtype=torch.long, device="cpu")
        number = torch.repeat_interleave(torch.arange(lengths.numel(), device="cpu"), lengths)
        starts = (lengths.cumsum(0) - lengths)[number]
        return torch.cat([*self.axes.values(), lengths[:0]]), number, torch.arange(len(number), device="cpu") - starts

    def channels_at(self, axes: Iterable[Tensor]) -> Tensor:
        """The channels on axes of the analysis, given by their codes."""
        return self.channel_of[labels_of(torch.cat([self.channel_of[:0], *(codes.reshape(-1) for codes in axes)]))]

    def all_kept(self) -> Tensor:
        return torch.ones(self.num_channels, dtype=torch.bool, device="cpu")

    @cached_property
    def group_of(self) -> Tensor:
        """For every channel the number of its group."""
        sizes = torch.tensor([group.size for group in self.groups], dtype=torch.long, device="cpu")
        return torch.repeat_interleave(sizes)

    @cached_property
    def count_macs(self) -> Formula:
        """MACs from a boolean per channel."""
        return Formula(self.layers, self.group_of)

    @cached_property
    def count_params(self) -> Formula:
        """Parameters from a boolean per channel."""
        return Formula(self.sizes, self.group_of)

    @cached_property
    def macs(self) -> int:
        return sum(row.whole for row in self.layers)

    @cached_property
    def params(self) -> int:
        return sum(row.whole for row in self.sizes)

    def cost(self, keep: Tensor | None = None, without: Iterable[str] = ()) -> Cost:
        """MACs and parameters when only the channels of this boolean mask are kept.

        without: names of branches that are gone, beside those that keep none of their channels.
        """
        keep = self.all_kept() if keep is None else keep
        gone, tensors = self._rows_and_tensors({*without, *self.without(keep)})
        macs = self.count_macs(keep) - sum(self.layers[row].value(keep) for row in gone)
        params = self.count_params(keep) - sum(row.value(keep) for row in self.sizes if tensors and row.name in tensors)
        return Cost(macs, params)

    @cached_property
    def marked(self) -> dict[str, Branch]:
        """The branches with a group that no branch within them has: channels can say that these are gone."""
        found = {}
        for branch in self.branches:
            within = [b for b in self.branches if b is not branch and branch.cut.takes(b.block)]
            if not {name for each in within for name in each.groups}.issuperset(branch.groups):
                found[branch.name] = branch
        return found

    def without(self, keep: Tensor) -> frozenset[str]:
        """The branches that go when only these channels are kept: those that keep none of their own."""
        if not self.branches or bool(keep.all()):
            return frozenset()
        empty = torch.bincount(self.group_of[keep], minlength=len(self.groups)) == 0
        names = {group.name for group, is_empty in zip(self.groups, empty.tolist(), strict=True) if is_empty}
        return frozenset(name for name, branch in self.marked.items() if names.issuperset(branch.groups))

    def tensors_of(self, branches: Iterable[str]) -> set[str]:
        """The parameters and buffers of these branches."""
        return {tensor for name in branches for tensor in self.branch(name).cut.tensors}

    def _rows_and_tensors(self, branches: Collection[str]) -> tuple[set[int], set[str]]:
        return {row for name in branches for row in self.branch(name).rows}, self.tensors_of(branches)

    def within(self, branch: Branch) -> Tensor:
        """A boolean per channel: whether it is one of the branch's own."""
        inside = torch.tensor([group.name in branch.groups for group in self.groups], dtype=torch.bool, device="cpu")
        return inside[self.group_of]

    def savings(self, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """MACs and parameters that the removal of each channel alone would save, as the network stands."""
        keep = self.all_kept() if keep is None else keep
        rows, tensors = self._rows_and_tensors(self.without(keep))
        layers = [row for number, row in enumerate(self.layers) if number not in rows]
        return savings(layers, keep), savings([row for row in self.sizes if row.name not in tensors], keep)

    @cached_property
    def widths(self) -> tuple[tuple[str, int, dict[str, int]], ...]:
        """Every layer that can lose filters: its name, its filters, and how many of them a channel of each group is."""
        found = []
        for (tensor, axis), channels in self.axes.items():
            if self.roles[tensor, axis].word != "produces" or len(self.shapes[tensor]) < 2:
                continue
            numbers, counts = torch.unique(self.group_of[channels[channels >= 0]], return_counts=True)
            pairs = zip(numbers.tolist(), counts.tolist(), strict=True)
            each = {self.groups[number].name: count // self.groups[number].size for number, count in pairs}
            found.append((owner(tensor), self.shapes[tensor][axis], each))
        return tuple(found)

    @property
    def num_filters(self) -> int:
        """Filters of the whole network, removable or not."""
        return self.num_free_filters + sum(f.size for f in self.frozen)

    @property
    def num_free_filters(self) -> int:
        return sum(g.size * g.filters_per_channel for g in self.groups)

    def group(self, name: str) -> ChannelGroup:
        for group in self.groups:
            if group.name == name:
                return group
        frozen = [f for f in self.frozen if f.name == name]
        if frozen:
            raise InvalidSetting(f"the channels of {name!r} must stay", got=frozen[0].reason)
        raise unknown_name("group", name, [g.name for g in self.groups])

    def branch(self, name: str) -> Branch:
        for branch in self.branches:
            if branch.name == name:
                return branch
        if name in self.bound:
            raise InvalidSetting(f"the branch of {name!r} must stay", got=self.bound[name])
        raise unknown_name("branch", name, [branch.name for branch in self.branches])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "version": 1,
            "input": self.input,
            "macs": self.macs,
            "params": self.params,
            "channels": self.num_channels,
            "groups": [
                {
                    "name": g.name,
                    "size": g.size,
                    "filters_per_channel": g.filters_per_channel,
                    "exact": g.exact,
                    "inexact": g.inexact.to_dict() if g.inexact else None,
                    "members": [
                        {"tensor": m.tensor, "axis": m.axis, "role": m.role, "indices": m.indices.tolist()}
                        for m in g.members
                    ],
                }
                for g in self.groups
            ],
            "frozen": [
                {
                    "name": f.name,
                    "tensor": f.tensor,
                    "axis": f.axis,
                    "indices": f.indices.tolist(),
                    "reason": f.reason.to_dict(),
                }
                for f in self.frozen
            ],
            "ungated": {name: reason.to_dict() for name, reason in self.ungated.items()},
            "layers": [{"name": r.name, "kind": r.kind, "macs": r.value(self.all_kept())} for r in self.layers],
            "branches": [branch.to_dict() for branch in self.branches],
            "bound": {name: reason.to_dict() for name, reason in self.bound.items()},
            "unused": list(self.unused),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from secateur.channels.table import describe

        return describe(self)

    def __repr__(self) -> str:
        return (
            f"ChannelGraph({counted(len(self.groups), 'group')}, {counted(self.num_channels, 'channel')}, "
            f"{counted(len(self.frozen), 'frozen layer')})"
        )


def check_graph(graph: Any) -> ChannelGraph:
    """Raise for anything that is not a graph."""
    if not isinstance(graph, ChannelGraph):
        remedy = "Make one with secateur.analyze(model, example)"
        raise InvalidSetting("this is not a channel graph", got=type(graph).__name__, remedy=remedy)
    return graph
