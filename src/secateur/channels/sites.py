"""Where a factor per channel can sit: on the batch norm behind a filter, or on the filter itself.

A filter whose every way to a consumer passes a batch norm needs none of its own: there its scale would cancel. One
that reaches a consumer otherwise, the output of the model aside, is *exposed* and must carry the factor itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from secateur.channels.reasons import Kind, Reason
from secateur.channels.rules.call import Axis

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
    """A layer that ran, with the codes of its channels, and why it cannot carry a factor, if so."""

    site: Site
    codes: Axis
    parameters: tuple[str, ...]
    trains: bool
    obstacle: Reason | None = None


@dataclass
class Layers:
    """The layers that ran, and how their channels reach the layers that read them."""

    model: nn.Module
    names: dict[int, str]
    """Modules' names by identity."""
    filters: dict[str, Candidate] = field(default_factory=dict)
    norms: list[Candidate] = field(default_factory=list)
    exposed: set[str] = field(default_factory=set)
    """Filters that reach a consumer without passing a batch norm."""
    final: set[str] = field(default_factory=set)
    """Filters that make the model's output."""

    def __post_init__(self) -> None:
        self._computed: list[Tensor] = []
        self._holders: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.model.modules():
            for attribute, tensor in module._parameters.items():
                if tensor is not None:
                    self._holders.setdefault(id(tensor), []).append((module, attribute))

    def add_filters(
        self, running: nn.Module, leaf: Leaf | None, trains: bool, codes: Axis, bias: Tensor | None, along: bool
    ) -> str:
        """Remember the filters of a layer; the name under which they are known.

        along: the codes are those of the axis of the weight along which the filters lie.
        """
        name = self.names.get(id(running), "")
        axis = _axis(leaf, codes) if leaf is not None and along else None
        key = f"{leaf.name} along {axis}" if leaf is not None else f"{name} (computed {self._number_of(codes)})"
        if key not in self.filters:
            found = Candidate(_site("filter", name), codes, (), trains)
            if leaf is None:
                inside = tuple(n for n, _ in self.model.named_parameters() if name and n.startswith(f"{name}."))
                found = replace(found, parameters=inside, obstacle=Reason(Kind.COMPUTED_WEIGHT))
            else:
                found = self._at_home(found, leaf, axis, bias)
            self.filters[key] = found
        return key

    def _number_of(self, codes: Axis) -> int:
        """Computed weights have no name: they are told apart by their channels."""
        known = (i for i, c in enumerate(self._computed) if isinstance(codes, Tensor) and torch.equal(c, codes))
        number = next(known, len(self._computed))
        if number == len(self._computed):
            self._computed.append(codes if isinstance(codes, Tensor) else torch.empty(0))
        return number

    def add_norm(self, running: nn.Module, leaf: Leaf | None, codes: Axis, bias: Tensor | None, bare: bool) -> None:
        """Remember a norm that cancels the scale of its input.

        bare: it has neither weight nor bias.
        """
        name = self.names.get(id(running), "")
        found = Candidate(_site("norm", name), codes, (), True)
        if leaf is not None:
            axis = 0 if leaf.tensor.dim() == 1 else None
            found = self._at_home(replace(found, codes=leaf.state.axes[0]), leaf, axis, bias)
        elif not bare or not isinstance(running, (_BatchNorm, _InstanceNorm)) or running.affine:
            found = replace(found, obstacle=Reason(Kind.NORM_WITHOUT_WEIGHT))
        elif isinstance(codes, Tensor):
            # Instance norm sees the channels of every image one after another.
            found = replace(found, codes=codes[: running.num_features])
        self.norms.append(found)

    def _at_home(self, found: Candidate, weight: Leaf, axis: int | None, bias: Tensor | None) -> Candidate:
        """The candidate with the module and the attributes that hold its weight and bias."""
        holders = self._holders.get(id(weight.tensor), [])
        if not holders:
            return replace(found, obstacle=Reason(Kind.NO_WEIGHT))
        module, attribute = holders[0]
        if bias is None and isinstance(module, (_ConvNd, nn.Linear)) and axis == _axis_of_bias(module):
            bias = module._parameters.get("bias")
        bias_holders = self._holders.get(id(bias), []) if bias is not None else []
        name = self.names[id(module)]
        prefix = f"{name}." if name else ""
        parameters = (weight.name, *(f"{prefix}{a}" for m, a in bias_holders if m is module))
        found = replace(found, parameters=parameters)
        if len(holders) > 1 or len(bias_holders) > 1:
            return replace(found, obstacle=Reason(Kind.SHARED_WEIGHT))
        if bias is not None and [m for m, _ in bias_holders] != [module]:
            return replace(found, obstacle=Reason(Kind.SHARED_WEIGHT))
        if axis is None or (bias is not None and bias.dim() != 1):
            return replace(found, obstacle=Reason(Kind.NO_WEIGHT))
        held = bias_holders[0][1] if bias_holders else None
        return replace(found, site=replace(found.site, module=name, weight=attribute, bias=held, axis=axis))

    def settled(self, unused: set[str], written: set[str]) -> tuple[list[Candidate], list[Candidate]]:
        """The candidates that will carry factors (all norms that can, filters that must), and those that cannot.

        unused: parameters that no operator saw.
        written: those that the forward pass changes; with a factor they would be computed, and the change lost.
        """
        carry: dict[str, Candidate] = {}
        barred: list[Candidate] = []
        for found in [*self.norms, *(found for name, found in self.filters.items() if name in self.exposed)]:
            first = carry.get(found.site.module)
            if not written.isdisjoint(found.parameters):
                found = replace(found, obstacle=Reason(Kind.WRITTEN_WEIGHT))
            if found.obstacle is not None:
                barred.append(found)
            elif first is None:
                prefix = f"{found.site.module}." if found.site.module else ""
                if f"{prefix}{found.site.bias}" in unused:
                    found = replace(found, site=replace(found.site, bias=None))
                carry[found.site.module] = found
            elif first.site.weight != found.site.weight or not _same(first.codes, found.codes):
                obstacle = Reason(Kind.SHARED_WEIGHT)
                barred.append(replace(found, obstacle=obstacle))
                if first.site.weight is None:
                    # One factor for two sets of channels can serve neither.
                    barred.append(replace(first, obstacle=obstacle))
        shared = {id(found.site) for found in barred}
        return [found for found in carry.values() if id(found.site) not in shared], barred


def _site(kind: str, module: str) -> Site:
    return Site(kind, module, None, None, 0, torch.empty(0, dtype=torch.long, device="cpu"))


def _axis_of_bias(module: _ConvNd | nn.Linear) -> int:
    """The axis of the weight along which the bias lies; a call of another function may make channels along another."""
    return int(isinstance(module, _ConvNd) and module.transposed and module.groups == 1)


def _axis(leaf: Leaf, codes: Axis) -> int | None:
    """The axis of the weight that has these codes."""
    return next((axis for axis, own in enumerate(leaf.state.axes) if _same(own, codes)), None)


def _same(codes: Axis, others: Axis) -> bool:
    if not isinstance(codes, Tensor) or not isinstance(others, Tensor):
        return False
    return codes.shape == others.shape and torch.equal(codes >> 1, others >> 1)
