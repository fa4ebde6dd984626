"""A plan: which channels of which group are kept. Plain data, checked against the graph."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from secateur.channels.cost import Cost, is_kept
from secateur.channels.groups import ChannelGraph, ChannelGroup, check_graph
from secateur.errors import InvalidPlan
from secateur.words import counted

VERSION = 2
"""Of plan.json. Version 1 had no cuts; its groups are read as before."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Which channels stay. Build it with `keep`, `drop` or `from_json`, or from a boolean per channel.

    >>> import secateur, torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 2, 1))
    >>> graph = secateur.analyze(net, torch.randn(1, 3, 8, 8))
    >>> plan = Plan.keep(graph, {"0": [0, 1, 2]})
    >>> secateur.shrink(net, plan)[0]
    Conv2d(3, 3, kernel_size=(3, 3), stride=(1, 1))
    """

    graph: ChannelGraph
    kept: Tensor
    """A boolean per channel of the graph."""

    def __post_init__(self) -> None:
        check_graph(self.graph)
        # A copy, since the caller's may be on a GPU, and may change.
        object.__setattr__(self, "kept", self.kept.detach().cpu().clone())
        if self.kept.dtype != torch.bool or self.kept.shape != (self.graph.num_channels,):
            raise InvalidPlan(
                f"a selection needs one boolean for each of the {self.graph.num_channels} channels, "
                f"got {tuple(self.kept.shape)} of {self.kept.dtype}"
            )
        for group in self.graph.groups:
            left = int(self.kept[group.span].sum()) if group.at_least > 1 else group.at_least
            if left < group.at_least < group.size:
                raise InvalidPlan(
                    f"the code drops axes of size one: keep at least {group.at_least} channels of group {group.name!r}"
                )
        emptied = sorted({tensor for (tensor, _), indices in self.remaining.items() if not indices.numel()})
        if emptied:
            raise InvalidPlan(
                f"the plan would leave nothing of {', '.join(emptied)}; keep at least one channel of each"
            )

    @cached_property
    def remaining(self) -> dict[tuple[str, int], Tensor]:
        """The indices that are left of every axis that loses some."""
        channels, number = self.graph.flat
        flags = is_kept(channels, self.kept)
        lengths = torch.bincount(number)
        lost = (lengths - torch.bincount(number[flags], minlength=lengths.numel())).tolist()
        parts = zip(self.graph.axes, flags.split(lengths.tolist()), lost, strict=True)
        return {axis: part.nonzero()[:, 0] for axis, part, count in parts if count}

    def shape(self, tensor: str) -> tuple[int, ...]:
        """What is left of a tensor."""
        whole = enumerate(self.graph.shapes[tensor])
        return tuple(left.numel() if (left := self.remaining.get((tensor, d))) is not None else n for d, n in whole)

    @classmethod
    def keep(cls, graph: ChannelGraph, groups: Mapping[str, Iterable[int] | Tensor]) -> Plan:
        """Keep these channels of these groups, and everything else whole."""
        kept = check_graph(graph).all_kept()
        for name, indices in groups.items():
            group = graph.group(name)
            kept[group.span] = False
            kept[[group.start + index for index in _checked(group, indices)]] = True
        return cls(graph, kept)

    @classmethod
    def random(cls, graph: ChannelGraph, fraction: float = 0.3, seed: int = 0) -> Plan:
        """Drop this fraction of every group at random: the nearest number, one at least, never all."""
        if not isinstance(fraction, int | float) or not 0 <= fraction < 1:
            raise InvalidPlan(f"fraction must be at least 0 and below 1, got {fraction!r}")
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
        return self.graph.cost(self.kept)

    @property
    def groups(self) -> dict[str, list[int]]:
        """Kept indices of every group that loses channels."""
        return {
            group.name: indices.nonzero()[:, 0].tolist()
            for group, indices in self._per_group()
            if not bool(indices.all())
        }

    @property
    def exact(self) -> bool:
        """Whether masked and shrunk must agree: no group that was admitted as inexact is touched."""
        return all(group.exact for group, indices in self._per_group() if not bool(indices.all()))

    def _per_group(self) -> Iterator[tuple[ChannelGroup, Tensor]]:
        for group in self.graph.groups:
            yield group, self.kept[group.span]

    def slices(self) -> Iterator[tuple[str, int, list[int], str]]:
        """Every cut as (tensor name, axis, removed indices, role).

        The masked network has zeros where the role is "produces" or "passes"; "consumes" is untouched there.
        """
        for (tensor, axis), indices in self.remaining.items():
            stays = torch.zeros(self.graph.shapes[tensor][axis], dtype=torch.bool, device="cpu")
            stays[indices] = True
            yield tensor, axis, (~stays).nonzero()[:, 0].tolist(), self.graph.roles[tensor, axis].word

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        groups = {
            group.name: {"size": group.size, "kept": indices.nonzero()[:, 0].tolist()}
            for group, indices in self._per_group()
            if not bool(indices.all())
        }
        return {"format": "secateur-plan", "version": VERSION, "groups": groups}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, graph: ChannelGraph, text: str) -> Plan:
        """Read a plan written by `to_json` and check it against the graph."""
        try:
            data: Any = json.loads(text)
        except (TypeError, ValueError) as error:
            raise InvalidPlan(f"a plan is JSON, but: {error}") from None
        if (
            not isinstance(data, dict)
            or data.get("format") != "secateur-plan"
            or not isinstance(data.get("groups"), dict)
        ):
            raise InvalidPlan('this is not a plan: it lacks "format": "secateur-plan" or its "groups"')
        if data.get("version") not in (1, VERSION):
            raise InvalidPlan(f"this plan has version {data.get('version')!r}; this Secateur reads up to {VERSION}")
        kept: dict[str, list[int]] = {}
        for name, entry in data["groups"].items():
            if not isinstance(entry, dict) or not isinstance(entry.get("kept"), list):
                raise InvalidPlan(f'group {name!r} of the plan needs "size" and "kept"')
            size = check_graph(graph).group(name).size
            if entry.get("size") != size:
                raise InvalidPlan(
                    f"group {name!r} has {counted(size, 'channel')} here and {entry.get('size')} in the plan: another "
                    "network?"
                )
            kept[name] = entry["kept"]
        return cls.keep(graph, kept)

    def __repr__(self) -> str:
        macs, params = self.cost.macs / max(1, self.graph.macs), self.cost.params / max(1, self.graph.params)
        channels = f"{int(self.kept.sum())} of {self.kept.numel()} channels"
        return f"Plan({channels}, {macs:.1%} of the MACs, {params:.1%} of the parameters)"


def _checked(group: ChannelGroup, indices: Any) -> list[int]:
    chosen = indices.tolist() if hasattr(indices, "tolist") else indices  # of torch or numpy
    if not isinstance(chosen, Iterable):
        raise InvalidPlan(f"the channels to keep of group {group.name!r} are a list of numbers, got {chosen!r}")
    chosen = list(chosen)
    if any(isinstance(index, bool) for index in chosen):
        raise InvalidPlan(
            f"the channels to keep of group {group.name!r} are numbers, got a mask: pass mask.nonzero()[:, 0]"
        )
    for index in chosen:
        if not hasattr(index, "__index__") or not 0 <= operator.index(index) < group.size:
            raise InvalidPlan(f"group {group.name!r} has channels 0 to {group.size - 1}, but the plan keeps {index!r}")
    chosen = [operator.index(index) for index in chosen]
    if len(set(chosen)) < len(chosen):
        raise InvalidPlan(f"the plan keeps a channel of group {group.name!r} twice: {chosen!r:.80}")
    if not chosen:
        layers = ", ".join(group.layers) or group.name
        raise InvalidPlan(
            f"the plan would leave nothing of {layers}; keep at least one channel of group {group.name!r}"
        )
    return chosen
