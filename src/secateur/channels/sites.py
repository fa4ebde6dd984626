"""Where a factor per channel can sit: on the batch norm behind a filter, or on the filter itself.

A filter whose every way to a consumer passes a batch norm needs none of its own: there its scale would cancel. One
that reaches a consumer otherwise, the output of the model aside, is *exposed* and must carry the factor itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from secateur.channels.rules.registry import Axis

if TYPE_CHECKING:
    from secateur.channels.trace import Leaf


@dataclass(frozen=True)
class Site:
    """A module whose weight and bias can take up a factor per channel."""

    kind: str
    """"norm" or "filter"."""
    module: str
    weight: str | None
    """The attribute that holds it; None for a batch norm without parameters."""
    bias: str | None
    axis: int
    """The axis of the weight along which the channels lie."""
    channels: Tensor
    """Channel number at each index, -1 where none can be removed."""


@dataclass(frozen=True)
class Candidate:
    """A layer that was seen to run, with the codes of its channels, and why it can't carry a factor if so."""

    site: Site
    codes: Axis
    parameters: tuple[str, ...]
    trains: bool
    obstacle: str | None = None


@dataclass
class Layers:
    """The layers that ran, and how what they make reaches its consumers."""

    model: nn.Module
    names: dict[int, str]
    """Modules' names by identity."""
    filters: dict[str, Candidate] = field(default_factory=dict)
    norms: dict[str, Candidate] = field(default_factory=dict)
    exposed: set[str] = field(default_factory=set)
    """Filters that reach a consumer without passing a batch norm."""
    final: set[str] = field(default_factory=set)
    """Filters whose result is the model's."""

    def __post_init__(self) -> None:
        self._holders: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.model.modules():
            for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    self._holders.setdefault(id(tensor), []).append((module, attribute))

    def add_filters(
        self, running: nn.Module, leaf: Leaf | None, trains: bool, codes: Axis, bias: Tensor | None, along: bool
    ) -> str:
        """Remember the filters of a layer; the name under which they are known.

        along: the codes are those of the axis of the weight along which the filters lie.
        """
        name = self.names.get(id(running), "")
        key = leaf.name if leaf is not None else f"{name} (computed)"
        if key not in self.filters:
            found = Candidate(_site("filter", name), codes, (), trains)
            if leaf is None:
                inside = tuple(n for n, p in self.model.named_parameters() if name and n.startswith(f"{name}."))
                found = replace(found, parameters=inside, obstacle="has weights that are computed from others")
            elif not along:
                found = replace(found, parameters=(leaf.name,), obstacle="does not lie along one axis of a weight")
            else:
                found = self._at_home(found, leaf, bias)
            self.filters[key] = found
        return key

    def add_norm(self, running: nn.Module, leaf: Leaf | None, codes: Axis, bias: Tensor | None) -> bool:
        """Remember a batch norm; whether it can carry factors."""
        name = self.names.get(id(running), "")
        found = Candidate(_site("norm", name), codes, (), True)
        if leaf is not None:
            found = self._at_home(replace(found, codes=leaf.state.axes[0]), leaf, bias)
        elif bias is not None or not isinstance(running, _NormBase) or running.affine:
            return False
        if found.obstacle is None:
            self.norms.setdefault(found.site.module, found)
        return found.obstacle is None

    def _at_home(self, found: Candidate, weight: Leaf, bias: Tensor | None) -> Candidate:
        """The candidate with the module and the attributes that hold its weight and bias."""
        holders = self._holders[id(weight.tensor)]
        module, attribute = holders[0]
        if bias is None and isinstance(module, (_ConvNd, nn.Linear)):
            bias = module._parameters.get("bias")
        bias_holders = self._holders.get(id(bias), [])
        name = self.names[id(module)]
        prefix = f"{name}." if name else ""
        parameters = (weight.name, *(f"{prefix}{a}" for m, a in bias_holders if m is module))
        found = replace(found, parameters=parameters)
        if len(holders) > 1 or len(bias_holders) > 1:
            return replace(found, obstacle="has weights that another module has too")
        if bias is not None and [m for m, _ in bias_holders] != [module]:
            return replace(found, obstacle="has a bias that belongs to another module than the weight")
        for axis, codes in enumerate(weight.state.axes):
            if isinstance(codes, Tensor) and isinstance(found.codes, Tensor) and _same(codes, found.codes):
                held = bias_holders[0][1] if bias_holders else None
                return replace(found, site=replace(found.site, module=name, weight=attribute, bias=held, axis=axis))
        return replace(found, obstacle="does not lie along one axis of a weight")

    @property
    def chosen(self) -> list[Candidate]:
        """Every batch norm that can carry factors, and the filters that need their own and can."""
        exposed = [found for name, found in self.filters.items() if name in self.exposed and found.obstacle is None]
        return [*self.norms.values(), *exposed]

    @property
    def barred(self) -> list[Candidate]:
        """Filters that need factors of their own and cannot carry them."""
        return [found for name, found in self.filters.items() if name in self.exposed and found.obstacle is not None]


def _site(kind: str, module: str) -> Site:
    return Site(kind, module, None, None, 0, torch.empty(0, dtype=torch.long, device="cpu"))


def _same(codes: Tensor, others: Tensor) -> bool:
    return codes.shape == others.shape and torch.equal(codes >> 1, others >> 1)
