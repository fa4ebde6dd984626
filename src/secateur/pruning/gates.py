"""Gates: a factor phi for every channel, folded into the parameters of the layer it belongs to.

The class of a gated module is a subclass of its own in which reading `weight` and `bias` gives them multiplied by
`phi * mask`; what is stored under these names has phi divided out. Activations are not multiplied. phi = 0, like
mask = 0, means "no filter".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from secateur.channels.cost import is_kept
from secateur.channels.groups import ChannelGraph, ChannelGroup, Member, check_graph
from secateur.channels.guard import check_module
from secateur.channels.labels import Role
from secateur.channels.plan import Plan
from secateur.channels.shrink import check_same_network, shrink_, tensors_of
from secateur.channels.sites import Site
from secateur.errors import InvalidModel

FilterScale = Literal["norm", "mean"]
"""phi of a filter without batch norm: its Frobenius norm, or the paper's Appendix B, the norm divided by its size."""

SHIFT = 10.0
"""The largest |beta / phi| of a gated batch norm."""


@dataclass(frozen=True)
class Fold:
    """How a gated module folds phi into its parameters, and what it was before."""

    weight: str | None
    bias: str | None
    axis: int
    dtype: torch.dtype
    """The type that the module computes in; phi and what it divides are at least single precision."""
    frozen: bool
    """Whether the weight does not train while it is gated, as that of a batch norm."""
    trained: bool
    """Whether it trained before."""
    penalty: float
    """The weight of |phi| in the L1 term."""


class Gated(nn.Module):
    """Mixed into the class of a module that carries a gate."""

    gate_phi: nn.Parameter
    gate_mask: Tensor
    gate_fold: Fold

    def gate_factor(self) -> Tensor:
        """What the parameters are multiplied with."""
        if self.gate_fold.weight is None:
            # There is no parameter to merge phi into: it stays 1 whatever an optimizer does, but has a gradient.
            return (1 + (self.gate_phi - self.gate_phi.detach())) * self.gate_mask
        return self.gate_phi * self.gate_mask

    def gate_apply(self, name: str) -> Tensor | None:
        fold = self.gate_fold
        ready = self.__dict__.get("gate_ready")
        if ready is not None:
            return ready[name]
        if fold.weight is None:
            factor = self.gate_factor()
            return (factor if name == "weight" else torch.zeros_like(factor)).to(fold.dtype)
        raw = self._parameters[name]
        if raw is None:
            return None
        factor = self.gate_factor()
        if name == fold.weight:
            factor = _along(factor, fold.axis, raw)
        return (raw * factor).to(fold.dtype)

    def gate_tensors(self) -> list[nn.Parameter]:
        """phi and the parameters it is folded into."""
        names = ("gate_phi", self.gate_fold.weight, self.gate_fold.bias)
        return [p for name in names if name is not None and (p := self._parameters[name]) is not None]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        wide = {id(t) for p in self.gate_tensors() for t in (p, p.grad) if t is not None}
        sample = fn(torch.empty(0, dtype=self.gate_fold.dtype, device=self.gate_phi.device))
        self.gate_fold = replace(self.gate_fold, dtype=sample.dtype)

        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) not in wide or moved.dtype == _wide(moved.dtype):
                return moved
            return torch.empty_like(moved, dtype=_wide(moved.dtype)).copy_(tensor)

        return super()._apply(keep_wide, recurse)


def _along(vector: Tensor, axis: int, tensor: Tensor) -> Tensor:
    """The vector, shaped to multiply the tensor along that axis."""
    return vector.view([-1 if dim == axis else 1 for dim in range(tensor.dim())])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@cache
def _gated_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of the module's class in which these attributes are computed when they are read."""

    def read(name: str) -> property:
        return property(lambda module: module.gate_apply(name))

    def forward(module: nn.Module, data: Tensor, *args: Any) -> Tensor:
        # On a CPU torch crashes in the backward pass if channels-last data need no gradient themselves.
        return base.forward(module, data if data.requires_grad else data.contiguous(), *args)

    def state_of(module: nn.RNNBase) -> dict[str, Any]:
        # A recurrent module keeps the weights that it has read, and computed ones cannot be copied.
        raw = [module._parameters[name] for name in module._flat_weights_names]
        return {**nn.RNNBase.__getstate__(module), "_flat_weights": raw}

    members: dict[str, Any] = {name: read(name) for name in names}
    members |= {"forward": forward} if issubclass(base, nn.GroupNorm) else {}
    members |= {"__getstate__": state_of} if issubclass(base, nn.RNNBase) else {}
    return type(f"Gated{base.__name__}", (Gated, base), {**members, "__module__": base.__module__})


@torch.no_grad()
def insert_gates_(model: nn.Module, graph: ChannelGraph, *, filter_scale: FilterScale = "norm") -> Gates:
    """Put a gate on every channel that can be removed. The function of the model does not change.

    >>> from secateur import analyze
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    >>> graph = analyze(net, torch.randn(1, 3, 8, 8))
    >>> gates = insert_gates_(net, graph)
    >>> [name for name, _ in net.named_parameters() if "gate" in name]
    ['1.gate_phi']
    >>> type(merge_gates_(net)[1]).__name__
    'BatchNorm2d'
    """
    check_module(model)
    for name, module in model.named_modules():
        if isinstance(module, Gated):
            raise InvalidModel(f"{name!r} already has a gate", remedy="Call merge_gates_(model) first")
        if any(hasattr(module, own) for own in Gated.__annotations__):
            raise InvalidModel(f"{name!r} has an attribute that begins with gate_", remedy="Rename it: gates need it")
    check_same_network(model, check_graph(graph))
    if not any(group.size > group.at_least and group.name not in graph.ungated for group in graph.groups):
        reasons = sorted({str(f.reason) for f in graph.frozen} | {str(reason) for reason in graph.ungated.values()})
        listed = "; or ".join(reasons) or "is the only one of its layer"
        what = "take a gate" if graph.ungated else "be removed"
        raise InvalidModel(f"no channel of this model can {what}: each {listed}")
    some = next(p for p in model.parameters() if p.is_floating_point())
    for site in graph.sites:
        _insert(model.get_submodule(site.module), site, some, filter_scale)
    return Gates(model, graph)


def _insert(module: nn.Module, site: Site, some: Tensor, filter_scale: FilterScale) -> None:
    weight = module._parameters[site.weight] if site.weight is not None else None
    bias = module._parameters[site.bias] if site.bias is not None else None
    some = weight if weight is not None else some
    fold = Fold(
        weight=site.weight,
        bias=site.bias,
        axis=site.axis,
        dtype=some.dtype,
        frozen=site.kind == "norm" and weight is not None,
        trained=weight is not None and weight.requires_grad,
        penalty=1.0 if site.kind == "norm" else _penalty(weight, site.axis, filter_scale),
    )
    phi = torch.ones(site.channels.numel(), dtype=_wide(some.dtype), device=some.device)
    if weight is not None:
        phi = _norm_phi(weight, bias) if site.kind == "norm" else _filter_phi(weight, bias, fold, filter_scale)
        phi = phi.to(_wide(some.dtype))
        divisor = torch.where(phi == 0, 1, phi)
        weight.grad = None
        weight.data = _quotient(weight, _along(divisor, site.axis, weight))
        if site.kind == "norm":
            weight.data[phi == 0] = 1
            weight.requires_grad_(False)
        if bias is not None:
            bias.grad = None
            bias.data = _quotient(bias, divisor)
    module.register_parameter("gate_phi", nn.Parameter(phi))
    module.register_buffer("gate_mask", torch.ones_like(phi))
    names = (site.weight, site.bias) if site.weight is not None else ("weight", "bias")
    vars(module)["gate_fold"] = fold
    module.__class__ = _gated_class(type(module), tuple(name for name in names if name is not None))


def _quotient(value: Tensor, divisor: Tensor) -> Tensor:
    """The quotient, rounded so that its product with the divisor does not overflow where the value does not."""
    result = value.to(divisor.dtype) / divisor
    return torch.where((result * divisor).isfinite(), result, torch.nextafter(result, torch.zeros_like(result)))


def _norm_phi(gamma: Tensor, beta: Tensor | None) -> Tensor:
    """Appendix A where |beta / gamma| <= 10; elsewhere the same function up to rounding."""
    tiny = torch.finfo(_wide(gamma.dtype)).tiny
    gamma = gamma.double()
    size = gamma.abs() if beta is None else torch.maximum(gamma.abs(), beta.double().abs() / SHIFT)
    size = torch.where(size > 0, size.clamp_min(tiny), 0)
    return torch.where(gamma < 0, -size, size)


def _filter_phi(weight: Tensor, bias: Tensor | None, fold: Fold, scale: FilterScale) -> Tensor:
    """Appendix B, with the norm of the filter itself unless the scale is the paper's."""
    rows = weight.double().movedim(fold.axis, 0).flatten(1)
    limits = torch.finfo(_wide(weight.dtype))
    phi = (rows.norm(dim=1) / (rows.shape[1] if scale == "mean" else 1)).clamp(max=limits.max)
    largest = rows.abs().amax(1)
    if bias is not None:
        largest = torch.maximum(largest, bias.double().abs())
    # A filter of zeros, or one too small to divide by, gets 1.
    return torch.where((phi < limits.tiny) | (largest / phi > limits.max), 1.0, phi)


def _penalty(weight: Tensor | None, axis: int, scale: FilterScale) -> float:
    assert weight is not None
    return 1.0 if scale == "mean" else weight.shape[axis] / weight.numel()


@torch.no_grad()
def merge_gates_(model: nn.Module) -> nn.Module:
    """Multiply every gate into its module and remove it; nothing of ours remains."""
    check_module(model)
    for name, module in model.named_modules():
        if isinstance(module, Gated) and module.gate_fold.weight is None and not bool(module.gate_mask.all()):
            raise InvalidModel(f"{name!r} has no parameters that could hold a mask", remedy="Cut the channels first")
    for module in list(model.modules()):
        if isinstance(module, Gated):
            _merge(module)
    return model


def _merge(module: Gated) -> None:
    fold = module.gate_fold
    for name in (fold.weight, fold.bias):
        parameter = module._parameters[name] if name is not None else None
        if name is not None and parameter is not None:
            value = module.gate_apply(name)
            assert value is not None
            parameter.grad = None
            parameter.data = value
    if fold.weight is not None:
        weight = module._parameters[fold.weight]
        assert weight is not None
        weight.requires_grad_(fold.trained)
    del module._parameters["gate_phi"], module._buffers["gate_mask"], vars(module)["gate_fold"]
    module.__class__ = type(module).__bases__[1]


class Gates:
    """The gates of a model as one list, and the channel of each entry."""

    def __init__(self, model: nn.Module, graph: ChannelGraph) -> None:
        self.model = model
        self.whole = graph
        self.graph = _with_gates(graph)
        """The same graph with the gates among its tensors, so that they are cut too."""
        self.present = Plan(self.graph, graph.all_kept())
        """What is left of the tensors."""
        self.kept = graph.all_kept()
        """What is not masked."""
        self.modules: list[Gated] = []
        for site in graph.sites:
            module = model.get_submodule(site.module)
            if not isinstance(module, Gated):
                raise InvalidModel(f"{site.module!r} has no gate", remedy="Call insert_gates_(model, graph) first")
            self.modules.append(module)

    @property
    def phis(self) -> list[nn.Parameter]:
        return [module.gate_phi for module in self.modules]

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The gates that train: not those of norms without parameters or of frozen weights."""
        return [module.gate_phi for module in self.modules if module.gate_fold.trained]

    @cached_property
    def removable(self) -> Tensor:
        """The channels of groups that gates can switch off."""
        gated = torch.tensor([group.name not in self.whole.ungated for group in self.whole.groups], device="cpu")
        return gated[self.whole.group_of]

    @cached_property
    def channels(self) -> list[Tensor]:
        """For every gate the channel number of each entry, -1 where none can be removed."""
        return [s.channels[is_kept(s.channels, self.present.kept)] for s in self.whole.sites]

    @cached_property
    def index(self) -> Tensor:
        """The channel of every entry of every gate; one past the last for entries that stay."""
        joined = torch.cat(self.channels)
        return torch.where(joined < 0, self.graph.num_channels, joined)

    @cached_property
    def _penalties(self) -> list[Tensor]:
        """The weight of each entry in the L1 term."""
        return [
            (module.gate_fold.penalty * (is_kept(on, self.removable) & (on >= 0))).to(module.gate_phi)
            for module, on in zip(self.modules, self.channels, strict=True)
        ]

    def products(self) -> Tensor:
        """The gradient of every entry times what it multiplies its channel with; a few kernels for all gates."""
        phis = [module.gate_phi for module in self.modules]
        gradients = [torch.zeros_like(phi) if phi.grad is None else phi.grad for phi in phis]
        masks = [module.gate_mask for module in self.modules]
        factors = [
            mask if m.gate_fold.weight is None else m.gate_phi for m, mask in zip(self.modules, masks, strict=True)
        ]
        return torch.cat(gradients) * torch.cat(factors) * torch.cat(masks)

    def per_channel(self, entries: Tensor) -> Tensor:
        """Sum what was computed for every entry of every gate by channel (Eq. 8); on the CPU, where sums round the same
        way each time.
        """
        total = torch.zeros(self.graph.num_channels + 1, dtype=entries.dtype, device="cpu")
        return total.index_add_(0, self.index, entries.cpu())[:-1]

    @torch.no_grad()
    def mask_(self, kept: Tensor) -> None:
        """Switch off every channel that is not kept; those with `loose` members must be cut as well."""
        self.kept = kept.clone()
        for module, channels in zip(self.modules, self.channels, strict=True):
            module.gate_mask.copy_(is_kept(channels, kept))

    @contextmanager
    def switched_off(self, channel: int) -> Iterator[None]:
        """Make one channel zero while the context lasts."""
        tensors = tensors_of(self.model)
        saved: list[tuple[Tensor, Tensor]] = []
        loose = {member.tensor for group in self.whole.groups for member in self.loose(group)}
        names = [(name, axis) for name, axis in self.graph.axes if name in loose or name.endswith("gate_mask")]
        with torch.no_grad():
            for name, axis in names:
                channels = self.graph.axes[name, axis]
                here = (channels[is_kept(channels, self.present.kept)] == channel).nonzero()[:, 0]
                if here.numel():
                    saved.append((tensors[name], tensors[name].clone()))
                    tensors[name].index_fill_(axis, here.to(tensors[name].device), 0)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in reversed(saved):
                    tensor.copy_(before)

    def loose(self, group: ChannelGroup) -> list[Member]:
        """Members behind the gates that no mask reaches, such as a learnt shift: they could make a channel non-zero."""
        return [m for m in group.members if m.role == "passes" and m.tensor not in self._held]

    @cached_property
    def _held(self) -> set[str]:
        """Tensors that a gate multiplies, and the statistics of its norm."""
        return {
            f"{site.module}.{part}" if site.module else part
            for site in self.whole.sites
            for part in (site.weight, site.bias, *(("running_mean", "running_var") if site.kind == "norm" else ()))
            if part is not None
        }

    @property
    def merged(self) -> bool:
        """Whether `merge_gates_` has taken them away."""
        return not isinstance(self.modules[0], Gated)

    def masked(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every gated parameter with masked channels, and a factor for it: 0 for these channels, 1 for the others."""
        for module, site, channels in zip(self.modules, self.whole.sites, self.channels, strict=True):
            kept = is_kept(channels, self.kept)
            for name, axis in ((site.weight, site.axis), (site.bias, 0)):
                parameter = module._parameters[name] if name is not None else None
                if parameter is not None and not bool(kept.all()):
                    yield parameter, _along(kept.to(parameter), axis, parameter)

    def cut_(self, kept: Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Cut the tensors, gates and optimizer state to these channels."""
        graph = self.whole if self.merged else self.graph
        since = self.present if self.present.graph is graph else Plan(graph, self.present.kept)
        plan = Plan(graph, kept.clone())
        shrink_(self.model, plan, optimizer, since=since)
        self.present = plan
        self.kept = self.kept & kept
        for name in ("channels", "index", "_penalties"):
            self.__dict__.pop(name, None)

    @torch.no_grad()
    def add_l1_(self, strength: float) -> None:
        """Add the subgradient of `strength * sum |phi|` to the gradients, over the channels that can be removed."""
        drawn = [
            (module.gate_phi, module.gate_phi.grad, module.gate_mask, penalty)
            for module, penalty in zip(self.modules, self._penalties, strict=True)
            if module.gate_fold.weight is not None and module.gate_phi.grad is not None
        ]
        if drawn:
            phis, gradients, masks, penalties = zip(*drawn, strict=True)
            signs = torch._foreach_sign(phis)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_mul_(signs, masks)  # pyright: ignore[reportPrivateImportUsage]
            weights = [penalty.to(sign) for penalty, sign in zip(penalties, signs, strict=True)]
            torch._foreach_mul_(signs, weights)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(gradients, signs, alpha=strength)  # pyright: ignore[reportPrivateImportUsage]


def _with_gates(graph: ChannelGraph) -> ChannelGraph:
    shapes, axes, roles = dict(graph.shapes), dict(graph.axes), dict(graph.roles)
    for site in graph.sites:
        for part in ("gate_phi", "gate_mask"):
            name = f"{site.module}.{part}" if site.module else part
            shapes[name] = (site.channels.numel(),)
            axes[name, 0] = site.channels
            roles[name, 0] = Role.PASSES
    return replace(graph, shapes=shapes, axes=axes, roles=roles)
