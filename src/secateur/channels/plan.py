"""A plan: which channels of each group are kept, as plain data that is checked against the graph."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secateur.channels.blocks import BlockCut
from secateur.channels.cost import Cost, is_kept
from secateur.channels.cuts import Cuts, Size, checked_indices
from secateur.channels.groups import Branch, ChannelGraph, ChannelGroup, check_graph
from secateur.errors import InvalidSetting
from secateur.words import counted

FORMAT, VERSION = "secateur-plan", 2
"""Of plans as JSON."""
WITH_BRANCHES = 3
"""The version of plans that remove branches, which older readers would overlook."""


class Kept(NamedTuple):
    """What is left of a group of that size."""

    size: int
    indices: list[int]


@dataclass(frozen=True)
class SavedPlan:
    """A plan as it was saved: checked for form, but not against a network."""

    groups: dict[str, Kept]
    branches: tuple[str, ...]
    """Those that are gone."""
    cuts: Cuts
    data: dict[str, Any]
    """All of it, with whatever else was saved along."""


def read_plan(source: str | bytes | dict[str, Any]) -> SavedPlan:
    """Read what `Plan.to_json` or `Plan.to_dict` has written; everything is checked."""
    try:
        data = source if isinstance(source, dict) else json.loads(source)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise InvalidSetting("this is not a plan", wanted=f'JSON with "format": "{FORMAT}"')
        if data.get("version") not in (VERSION, WITH_BRANCHES):
            raise InvalidSetting("this plan has another version", got=data.get("version"), wanted=VERSION)
        groups = {
            name: Kept(entry["size"], checked_indices(entry["kept"], entry["size"], f"group {name!r:.40}").tolist())
            for name, entry in data["groups"].items()
        }
        branches = data["branches"] if data["version"] == WITH_BRANCHES else []
        if not isinstance(branches, list) or not all(isinstance(name, str) for name in branches):
            raise ValueError(f"{branches!r:.40} is not a list of branches")
        return SavedPlan(groups, tuple(branches), Cuts.from_dict(data["cuts"]), data)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidSetting):
            raise
        raise InvalidSetting("the plan is damaged", got=f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, eq=False)
class Plan:
    """Which channels stay, and which branches go.

    Build it with `keep`, `random` or `from_json`, or from a boolean per channel.

    >>> import secateur, torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 2, 1))
    >>> graph = secateur.analyze(net, torch.randn(1, 3, 8, 8))
    >>> plan = Plan.keep(graph, {"0": [0, 1, 2]})
    >>> secateur.shrink(net, plan)[0]
    Conv2d(3, 3, kernel_size=(3, 3), stride=(1, 1))
    """

    graph: ChannelGraph
    kept: Tensor
    """A boolean per channel of the graph; False for channels within branches that go."""
    without: frozenset[str] = frozenset()
    """Names of the branches that go; a branch that keeps none of its channels goes too."""

    def __post_init__(self) -> None:
        check_graph(self.graph)
        # A copy, since the caller's may be on a GPU, and may change.
        object.__setattr__(self, "kept", self.kept.detach().cpu().clone())
        if self.kept.dtype != torch.bool or self.kept.shape != (self.graph.num_channels,):
            raise InvalidSetting(
                "a selection is one boolean per channel",
                got=f"{self.kept.dtype} of shape {tuple(self.kept.shape)}",
                wanted=f"{self.graph.num_channels} booleans",
            )
        object.__setattr__(self, "without", _checked_names(self.without) | self.graph.without(self.kept))
        for group in self.graph.groups:
            if group.name in self._inside:
                self.kept[group.span] = False
                continue
            least = min(group.at_least, group.size)
            if least > 1 and (left := int(self.kept[group.span].sum())) < least:
                raise InvalidSetting(
                    f"group {group.name!r} has too few channels, since the code drops axes of size one",
                    got=left,
                    wanted=f"at least {least}",
                )
        emptied = sorted({tensor for (tensor, _), indices in self.remaining.items() if not indices.numel()})
        if emptied:
            raise InvalidSetting(
                f"the plan leaves nothing of {', '.join(emptied)}", remedy="Keep at least one channel of each"
            )

    @cached_property
    def removed_branches(self) -> tuple[Branch, ...]:
        """The branches that go, in the graph's order."""
        chosen = {name: self.graph.branch(name) for name in self.without}
        return tuple(branch for branch in self.graph.branches if branch.name in chosen)

    @cached_property
    def gone(self) -> frozenset[str]:
        """The parameters and buffers that go as a whole."""
        return frozenset(tensor for branch in self.removed_branches for tensor in branch.cut.tensors)

    @cached_property
    def _inside(self) -> frozenset[str]:
        """The groups within branches that go."""
        return frozenset(name for branch in self.removed_branches for name in branch.groups)

    @cached_property
    def remaining(self) -> dict[tuple[str, int], Tensor]:
        """The indices that are left of every axis that loses some, of tensors that do not go as a whole."""
        parts = zip(self.graph.axes.items(), self._indices(True), strict=True)
        return {
            axis: part for (axis, whole), part in parts if part.numel() < whole.numel() and axis[0] not in self.gone
        }

    def _indices(self, stay: bool) -> tuple[Tensor, ...]:
        """Those of every axis that are left, or those that are not."""
        channels, number, place = self.graph.flat
        flags = is_kept(channels, self.kept) == stay
        counts = torch.bincount(number[flags], minlength=len(self.graph.axes))
        return place[flags].split(counts.tolist())

    def shape(self, tensor: str) -> tuple[int, ...]:
        """What is left of a tensor."""
        whole = enumerate(self.graph.shapes[tensor])
        return tuple(left.numel() if (left := self.remaining.get((tensor, d))) is not None else n for d, n in whole)

    @classmethod
    def keep(
        cls, graph: ChannelGraph, groups: Mapping[str, Iterable[int] | Tensor], without: Iterable[str] = ()
    ) -> Plan:
        """Keep these channels of these groups, and everything else whole.

        without: names of branches that go.
        """
        kept = check_graph(graph).all_kept()
        for name, indices in groups.items():
            group = graph.group(name)
            kept[group.span] = False
            kept[[group.start + index for index in _checked(group, indices)]] = True
        return cls(graph, kept, _checked_names(without))

    @classmethod
    def random(cls, graph: ChannelGraph, fraction: float = 0.3, seed: int = 0) -> Plan:
        """Remove this fraction of every group at random: rounded, at least one, never all."""
        if not isinstance(fraction, int | float) or not 0 <= fraction < 1:
            raise InvalidSetting("fraction is out of range", got=fraction, wanted="at least 0 and below 1")
        generator = torch.Generator().manual_seed(seed)
        kept = check_graph(graph).all_kept()
        for group in graph.groups:
            if group.size > group.at_least and fraction > 0:
                count = min(max(1, round(fraction * group.size)), group.size - group.at_least)
                chosen = torch.randperm(group.size, generator=generator, device="cpu")[:count]
                kept[group.start + chosen] = False
        return cls(graph, kept)

    @property
    def cost(self) -> Cost:
        return self.graph.cost(self.kept, self.without)

    @property
    def groups(self) -> dict[str, list[int]]:
        """Kept indices of every group that loses channels."""
        return {group.name: indices.nonzero()[:, 0].tolist() for group, indices in self._touched()}

    @property
    def exact(self) -> bool:
        """Whether masked and shrunk must agree: no group that was admitted as inexact is touched."""
        return all(group.exact for group, _ in self._touched())

    def _touched(self) -> Iterator[tuple[ChannelGroup, Tensor]]:
        """The groups that lose channels, branches that go aside, each with a boolean per channel."""
        for group in self.graph.groups:
            kept = self.kept[group.span]
            if group.name not in self._inside and not bool(kept.all()):
                yield group, kept

    def slices(self) -> Iterator[tuple[str, int, list[int], str]]:
        """Every cut as (tensor name, axis, removed indices, role), of tensors that do not go as a whole.

        The masked network has zeros where the role is "produces" or "passes"; "consumes" is untouched there.
        """
        for tensor, axis, removed, role in self.removed():
            yield tensor, axis, removed.tolist(), role

    def removed(self) -> Iterator[tuple[str, int, Tensor, str]]:
        """The same with indices as tensors."""
        for (tensor, axis), indices in zip(self.graph.axes, self._indices(False), strict=True):
            if indices.numel() and tensor not in self.gone:
                yield tensor, axis, indices, self.graph.roles[tensor, axis].word

    def cuts(self, since: Plan | None = None) -> Cuts:
        """What the plan takes out of the network, as plain data.

        since: the plan of the same graph by which the network has already been cut; this one must keep no more.
        """
        if since is None:
            return self._cuts
        if back := sorted(since.without - self.without):
            what = f"the plan keeps branches that were removed before: {', '.join(back)}"
            raise InvalidSetting(what, remedy="Start from the whole network")
        if since.graph is not self.graph or bool((self.kept & ~since.kept).any()):
            raise InvalidSetting("the plan keeps channels that were cut before", remedy="Start from the whole network")
        return self._cuts_since(since)

    @cached_property
    def _cuts(self) -> Cuts:
        return self._cuts_since(None)

    def _cuts_since(self, since: Plan | None) -> Cuts:
        kept: dict[str, dict[int, Tensor]] = {}
        for (name, axis), indices in self.remaining.items():
            before = since.remaining.get((name, axis)) if since is not None else None
            if before is None or before.numel() > indices.numel():
                here = indices if before is None else torch.searchsorted(before, indices)
                kept.setdefault(name, {})[axis] = here
        whole = self.graph.all_kept() if since is None else since.kept
        counts = [
            (a, *(int(is_kept(a.channels, mask).sum()) for mask in (whole, self.kept)))
            for a in self.graph.attributes
            if not any(branch.cut.takes(a.module) for branch in self.removed_branches)
        ]
        sizes = [Size(a.module, a.attribute, a.position, before, after) for a, before, after in counts]
        shapes = {name: since.shape(name) if since is not None else self.graph.shapes[name] for name in kept}
        return Cuts(shapes, kept, tuple(size for size in sizes if size.before != size.after), self._blocks(since))

    def _blocks(self, since: Plan | None) -> tuple[BlockCut, ...]:
        """The blocks that lose a branch now; not those that go with the branch of another."""
        before, gone = (since.without, since.gone) if since is not None else (frozenset(), frozenset())
        cuts = [branch.cut for branch in self.removed_branches if branch.name not in before]
        left = [
            cut for cut in cuts if not any(b.cut is not cut and b.cut.takes(cut.block) for b in self.removed_branches)
        ]
        return tuple(replace(cut, tensors=tuple(name for name in cut.tensors if name not in gone)) for cut in left)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON: the kept channels by group, and the cuts that need no graph."""
        groups = {
            group.name: {"size": group.size, "kept": indices.nonzero()[:, 0].tolist()}
            for group, indices in self._touched()
        }
        branches = {"branches": sorted(self.without)} if self.without else {}
        version = WITH_BRANCHES if branches else VERSION
        return {"format": FORMAT, "version": version, "groups": groups, **branches, "cuts": self.cuts().to_dict()}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, graph: ChannelGraph, source: str | bytes | dict[str, Any]) -> Plan:
        """Read a plan written by `to_json` or `to_dict` and check it against the graph."""
        check_graph(graph)
        kept: dict[str, list[int]] = {}
        saved = read_plan(source)
        for name, (size, indices) in saved.groups.items():
            here = graph.group(name).size
            if size != here:
                raise InvalidSetting(f"the plan is of another network: group {name!r}", got=size, wanted=here)
            kept[name] = indices
        return cls.keep(graph, kept, saved.branches)

    def __repr__(self) -> str:
        macs, params = self.cost.macs / max(1, self.graph.macs), self.cost.params / max(1, self.graph.params)
        channels = f"{int(self.kept.sum())} of {self.kept.numel()} channels"
        gone = f", {counted(len(self.without), 'branch', 'branches')} removed" if self.without else ""
        return f"Plan({channels}, {macs:.1%} of the MACs, {params:.1%} of the parameters{gone})"

    def __str__(self) -> str:
        gone = ", ".join(branch.name for branch in self.removed_branches)
        return f"{self!r}\nremoved branches: {gone}" if gone else repr(self)


def _checked_names(names: Any) -> frozenset[str]:
    listed = [] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    if not all(isinstance(name, str) for name in listed) or (not listed and names not in ((), [], set(), frozenset())):
        raise InvalidSetting("the branches to remove are not a list of names", got=f"{names!r:.80}")
    return frozenset(listed)


def _checked(group: ChannelGroup, indices: Any) -> list[int]:
    what = f"the channels to keep of group {group.name!r}"
    chosen = indices.tolist() if hasattr(indices, "tolist") else indices  # of torch or numpy
    if not isinstance(chosen, Iterable):
        raise InvalidSetting(f"{what} are not a list", got=chosen)
    chosen = list(chosen)
    if any(isinstance(index, bool) for index in chosen):
        raise InvalidSetting(f"{what} are a mask", wanted="indices", remedy="Pass mask.nonzero()[:, 0]")
    for index in chosen:
        if not hasattr(index, "__index__") or not 0 <= operator.index(index) < group.size:
            raise InvalidSetting(f"{what} do not exist", got=index, wanted=f"indices from 0 to {group.size - 1}")
    chosen = [operator.index(index) for index in chosen]
    if len(set(chosen)) < len(chosen):
        raise InvalidSetting(f"{what} are named twice", got=f"{chosen!r:.80}")
    if not chosen:
        layers = ", ".join(group.layers) or group.name
        raise InvalidSetting(f"the plan leaves nothing of {layers}", remedy="Keep at least one channel of each group")
    return chosen
