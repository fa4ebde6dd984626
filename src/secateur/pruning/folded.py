# pyright: reportPrivateImportUsage=false
"""The gates of all norms at once, for steps that are captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from secateur.pruning.gates import Gates


class Folded:
    """The products of all gated norms in a few kernels, instead of a dozen for each norm.

    `prepare` before the forward pass, `collect` after the backward pass: it hands the products' gradients on to phi and
    bias, as autograd would have.
    """

    def __init__(self, gates: Gates) -> None:
        self.modules = [
            module
            for module in gates.modules
            if module.gate_fold.frozen and module.gate_fold.bias and module.gate_fold.dtype == module.gate_phi.dtype
        ]
        self.phis: list[Tensor] = [module.gate_phi for module in self.modules]
        self.masks: list[Tensor] = [module.gate_mask for module in self.modules]
        raw = [module.gate_tensors()[1:] for module in self.modules]
        self.raw: list[list[Tensor]] = [[pair[i] for pair in raw] for i in (0, 1)]
        self.made = [[torch.empty_like(tensor).requires_grad_() for tensor in part] for part in self.raw]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the norms compute with these products."""
        for module, *products in zip(self.modules, *self.made, strict=True):
            names = (module.gate_fold.weight, module.gate_fold.bias)
            vars(module)["gate_ready"] = dict(zip(names, products, strict=True))
        try:
            yield
        finally:
            for module in self.modules:
                del vars(module)["gate_ready"]

    @torch.no_grad()
    def prepare(self) -> None:
        if not self.modules:
            return
        self.factors = torch._foreach_mul(self.phis, self.masks)
        for made, raw in zip(self.made, self.raw, strict=True):
            torch._foreach_copy_(made, torch._foreach_mul(self.factors, raw))
            for tensor in made:
                tensor.grad = None

    @torch.no_grad()
    def collect(self) -> None:
        parts: list[tuple[Tensor, ...]] = []
        for i, (by_weight, by_bias) in enumerate(zip(*self.made, strict=True)):
            if by_weight.grad is not None and by_bias.grad is not None:
                weight, bias = self.raw[0][i], self.raw[1][i]
                parts.append((by_weight.grad, by_bias.grad, weight, bias, self.masks[i], self.factors[i], self.phis[i]))
        if not parts:
            return
        by_weight, by_bias, weights, biases, masks, factors, phis = (list(part) for part in zip(*parts, strict=True))
        gradients = list(torch._foreach_mul(by_weight, weights))
        torch._foreach_addcmul_(gradients, by_bias, biases)
        torch._foreach_mul_(gradients, masks)
        for phi, bias, gradient, shift in zip(
            phis, biases, gradients, torch._foreach_mul(by_bias, factors), strict=True
        ):
            phi.grad = gradient
            if bias.requires_grad:
                bias.grad = shift
