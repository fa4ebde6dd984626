"""A module with a factor phi for every channel, folded into the parameters that make the channel.

The class of a gated module is a subclass of its own in which reading `weight` and `bias` gives them multiplied by
`phi * mask`; what is stored under these names has phi divided out. Activations are not multiplied. phi = 0, like
mask = 0, means "no filter".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from secateur.channels.sites import Site

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

    @property
    def computed(self) -> tuple[str, ...]:
        """The attributes that are computed when they are read."""
        names = ("weight", "bias") if self.weight is None else (self.weight, self.bias)
        return tuple(name for name in names if name is not None)


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
            factor = along(factor, fold.axis, raw)
        return (raw * factor).to(fold.dtype)

    def gate_tensors(self) -> list[nn.Parameter]:
        """phi and the parameters it is folded into."""
        names = ("gate_phi", self.gate_fold.weight, self.gate_fold.bias)
        return [p for name in names if name is not None and (p := self._parameters[name]) is not None]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Its class has no name that a file could hold.
        return _empty, (type(self).__bases__[1], self.gate_fold.computed), self.__getstate__()

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


def along(vector: Tensor, axis: int, tensor: Tensor) -> Tensor:
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


def _empty(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """A gated module without its state, as copies and pickles begin with."""
    kind = _gated_class(base, names)
    return kind.__new__(kind)


def put_gate_(module: nn.Module, site: Site, some: Tensor, filter_scale: FilterScale) -> None:
    """Make this module a gated one.

    some: a parameter of the model, for the type and device of a gate on a norm without parameters.
    """
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
        weight.data = _quotient(weight, along(divisor, site.axis, weight))
        if site.kind == "norm":
            weight.data[phi == 0] = 1
            weight.requires_grad_(False)
        if bias is not None:
            bias.grad = None
            bias.data = _quotient(bias, divisor)
    module.register_parameter("gate_phi", nn.Parameter(phi))
    module.register_buffer("gate_mask", torch.ones_like(phi))
    vars(module)["gate_fold"] = fold
    module.__class__ = _gated_class(type(module), fold.computed)


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


def merge_gate_(module: Gated) -> None:
    """Multiply the gate into the module, and remove it."""
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
