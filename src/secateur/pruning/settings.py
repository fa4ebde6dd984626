"""How small the network gets, and how narrow its layers may become. No torch at import."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from secateur.errors import InvalidSetting, unknown_name
from secateur.settings import Settings, is_share

if TYPE_CHECKING:
    from torch import Tensor

    from secateur.channels.groups import Branch, ChannelGraph

Rank = Literal["auto", "score", "score_per_mac", "score_per_param", "score_per_microsecond"]
Multiple = int | Literal["auto"]
ALIGNED = 8
"""The multiple of channels that hardware likes: tensor cores take eight numbers of 16 bits at a time, and onnxruntime
computes 8 or 16 channels at a time on x86."""
UNITS = {"macs": "MACs", "params": "parameters", "filters": "filters", "latency": "microseconds"}


@dataclass(frozen=True, kw_only=True)
class Budget(Settings):
    """What is counted, and which share of it stays: one of these.

    >>> Budget(macs=0.4).counts, Budget(macs=0.4).share
    ('macs', 0.4)
    """

    macs: float | None = None
    """Share of the MACs (multiply-adds) that stays."""

    params: float | None = None
    """Share of the parameters that stays."""

    filters: float | None = None
    """Share of the filters that stays."""

    latency: float | None = None
    """Share of the time that stays, by a table of layer times that is measured once on this device."""

    def check(self) -> None:
        given = {name: share for name, share in vars(self).items() if share is not None}
        if len(given) > 1:
            raise InvalidSetting("there is more than one budget", got=" and ".join(given))
        for name in given:
            self.require("a share above 0 and at most 1", name, holds=is_share)

    def but(self, **values: Any) -> Budget:
        """Another budget takes the place of this one."""
        unknown = sorted(set(values) - set(UNITS))
        if unknown:
            raise unknown_name("budget", unknown[0], list(UNITS))
        return Budget(**values)

    @property
    def counts(self) -> str:
        """What is counted."""
        for name, share in vars(self).items():
            if share is not None:
                return name
        wanted = ", ".join(f"keep_{each.name}" for each in fields(self))
        raise InvalidSetting("there is no budget", wanted=f"one of {wanted}")

    @property
    def share(self) -> float:
        return getattr(self, self.counts)

    @property
    def unit(self) -> str:
        return UNITS[self.counts]


@dataclass(frozen=True, kw_only=True)
class Limits(Settings):
    """How narrow groups of channels may get."""

    min_channels: int = 1
    """Every group keeps at least this many channels, unless its branch goes as a whole."""

    min_ratio: float = 0.1
    """Every group keeps at least this share of its channels, rounded down as in the code of the paper's authors."""

    multiple_of: Multiple = "auto"
    """Keep the widths of layers at multiples of this; auto: of 8 on GPUs and x86, which are slow at odd widths."""

    branches: Literal["auto", "always", "never"] = "auto"
    """Whether whole branches of residual blocks may go; auto: for a budget of latency."""

    at_least: dict[str, int | float] = field(default_factory=dict)
    """By layer name, with wildcards: how many channels to keep (2), or which share (0.5; 1.0 for all)."""

    def check(self) -> None:
        self.require("1 or more", "min_channels", holds=lambda value: value >= 1)
        self.require('"auto", or 1 or more', "multiple_of", holds=_is_multiple)
        self.require("a share between 0 and 1", "min_ratio", holds=lambda value: 0 <= value <= 1)

    def on(self, device: str) -> Limits:
        """The same with "auto" decided for this type of device.

        >>> Limits().on("cuda").multiple, Limits(multiple_of=4).on("cuda").multiple
        (8, 4)
        """
        if self.multiple_of != "auto":
            return self
        return replace(self, multiple_of=ALIGNED if device == "cuda" or is_x86() else 1)

    @property
    def multiple(self) -> int:
        """`multiple_of` as a number; 1 if it is not decided."""
        return 1 if self.multiple_of == "auto" else self.multiple_of

    def removable(self, graph: ChannelGraph, budget: Budget | None) -> list[Branch]:
        """The branches that may go: those with channels of their own, none of which is named in `at_least`."""
        if self.branches == "never" or (self.branches == "auto" and (budget is None or budget.counts != "latency")):
            return []
        found: list[Branch] = []
        for branch in sorted(graph.branches, key=lambda branch: len(branch.groups)):
            names = {*branch.groups, *branch.modules, *(n for name in branch.groups for n in graph.group(name).layers)}
            held = any(fnmatchcase(name, pattern) for name in names for pattern in self.at_least)
            inner = any(not set(branch.groups).isdisjoint(other.groups) for other in found)
            if branch.name in graph.marked and not held and not inner:
                found.append(branch)
        return found

    def floors(self, graph: ChannelGraph) -> Tensor:
        """How many channels each group must keep; all of it where no gate can switch them off."""
        import torch

        from secateur.pruning.selection import multiples

        unused = set(self.at_least)
        floors = []
        for group, multiple in zip(graph.groups, multiples(graph, self.multiple).tolist(), strict=True):
            low = max(group.at_least, self.min_channels, math.floor(self.min_ratio * group.size + 1e-9))
            for pattern, wanted in self.at_least.items():
                if any(fnmatchcase(name, pattern) for name in (group.name, *group.layers)):
                    unused.discard(pattern)
                    low = max(low, _count(wanted, group.size))
            low = group.size if group.name in graph.ungated else min(low, group.size)
            floors.append(min(group.size, -(-low // multiple) * multiple))
        if unused:
            known = [name for group in graph.groups for name in group.layers]
            raise unknown_name("layer with removable channels", sorted(unused)[0], known)
        return torch.tensor(floors, dtype=torch.long, device="cpu")


def is_x86() -> bool:
    """Whether this machine's CPU is one."""
    return platform.machine() in ("x86_64", "AMD64")


def _is_multiple(value: Any) -> bool:
    return value == "auto" or (isinstance(value, int) and value >= 1)


def _count(wanted: float, size: int) -> int:
    """A number of channels, from a share (a float up to 1.0) or from the number itself."""
    if not isinstance(wanted, Real) or not 0 <= wanted < math.inf or (wanted > 1 and wanted != int(wanted)):
        wants = "a number of channels (8), or a share of them (0.5)"
        raise InvalidSetting("at_least is out of range", got=repr(wanted), wanted=wants)
    return math.ceil(wanted * size - 1e-9) if isinstance(wanted, float) and wanted <= 1 else int(wanted)
