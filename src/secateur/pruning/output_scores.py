"""Scores of the outputs of gated modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from secateur.errors import InvalidModel
from secateur.pruning.gates import Gates
from secateur.pruning.hook import Hook
from secateur.pruning.scores import Score, register, zero_


class OutputScore(Score):
    """A score computed from the outputs of the gated modules."""

    capturable = True

    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.sums: list[Tensor] = []
        self.counts = torch.zeros(0)

    def begin(self, gates: Gates) -> None:
        super().begin(gates)
        self.close()
        for site, module in zip(gates.sites, gates.modules, strict=True):
            if site.kind != "norm" and not isinstance(module, nn.Linear | _ConvNd):
                raise InvalidModel(
                    f"{type(self).__name__} needs the outputs of the weight {site.weight!r} of {site.module!r}",
                    got="those of a module that may do more than apply it",
                    remedy="Use a score of gradients or weights, such as taylor, or leave the module whole by `ignore`",
                )
        phis = [module.gate_phi for module in gates.modules]
        if [(s.shape, s.device) for s in self.sums] == [(phi.shape, phi.device) for phi in phis]:
            zero_(self.state())
        else:
            self.sums = [torch.zeros_like(phi, dtype=torch.float64, requires_grad=False) for phi in phis]
            self.counts = torch.zeros(len(phis), dtype=torch.long, device=phis[0].device)
        self.handles = [m.register_forward_hook(Hook(self._hook(i))) for i, m in enumerate(gates.modules)]

    def _hook(self, number: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if not torch.is_grad_enabled():
                return  # a validation
            # (batch, channels, space) for any number of axes of space; the channels of a linear layer come last.
            channel_axis = -1 if isinstance(module, nn.Linear) else min(1, output.dim() - 1)
            self.see(
                number, output, lambda t: t.movedim(channel_axis, -1).reshape(t.shape[0], -1, t.shape[channel_axis])
            )

        return hook

    @property
    def resumable(self) -> bool:
        return type(self).begin is OutputScore.begin or type(self).state is not OutputScore.state

    def see(self, number: int, output: Tensor, shape: Callable[[Tensor], Tensor]) -> None:
        """`shape` brings it to (batch, places, channels)."""
        raise NotImplementedError

    def add(self, number: int, value: Tensor) -> None:
        self.sums[number] = self.sums[number].to(value.device)
        self.sums[number] += value

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def means(self) -> list[Tensor]:
        """The mean of each entry of each gate."""
        result = []
        for total, count, site in zip(self.sums, self.counts.tolist(), self.gates.sites, strict=True):
            if not count:
                raise InvalidModel(f"{site.module!r} was never called, and {type(self).__name__} needs its output")
            result.append(total / count)
        self.close()
        return result

    def state(self) -> dict[str, Tensor]:
        return {"counts": self.counts, **{str(number): total for number, total in enumerate(self.sums)}}


@register("pcnn")
class PCNN(OutputScore):
    """Molchanov et al.: |mean over places of z * dL/dz|, averaged over images, each layer scaled to unit L2 norm."""

    def see(self, number: int, output: Tensor, shape: Callable[[Tensor], Tensor]) -> None:
        if not output.requires_grad:
            return
        wide = torch.promote_types(output.dtype, torch.float32)
        seen = output.detach().to(wide, copy=True)  # what follows may work in place

        def backward(gradient: Tensor) -> None:
            found = shape(seen * gradient).mean(1, dtype=torch.float64).abs().sum(0)
            # Scaled gradients that overflow are left out. Their number does not matter: a layer has norm 1.
            self.add(number, torch.where(found.isfinite().all(), found, 0.0))
            self.counts[number] += seen.shape[0]

        output.register_hook(backward)

    def entries(self) -> Tensor:
        return torch.cat([mean / mean.norm().clamp_min(1e-300) for mean in self.means()])


@register("apoz")
class APoZ(OutputScore):
    """Hu et al.: the share of places where the response is positive, which is what a ReLU lets pass."""

    def see(self, number: int, output: Tensor, shape: Callable[[Tensor], Tensor]) -> None:
        positive = shape(output.detach()) > 0
        self.add(number, positive.mean(1, dtype=torch.float64).sum(0))
        self.counts[number] += positive.shape[0]

    def entries(self) -> Tensor:
        return torch.cat(self.means())
