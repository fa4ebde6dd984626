"""The oracle: the network with channels zeroed and the network with channels cut are the same function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.example import Example, tensors_within
from secateur.channels.guard import undisturbed
from secateur.channels.plan import Plan
from secateur.channels.shrink import copy_model, shrink_
from secateur.errors import NotEquivalent

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Verification:
    """How far masked and shrunk are apart, relative to the largest output."""

    difference: float
    absolute: float
    outputs: int
    """How many numbers were compared."""
    modes: tuple[str, ...]
    exact: bool
    """False if the plan touches groups that were admitted as inexact."""

    def __str__(self) -> str:
        kind = "" if self.exact else ", inexact by request"
        where = ", ".join(self.modes) + kind
        return f"masked and shrunk differ by {self.difference:.1e} over {self.outputs} outputs ({where})"


@torch.no_grad()
def mask_(model: nn.Module, plan: Plan) -> nn.Module:
    """Zero every slice that the plan removes, except those that only consume."""
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for tensor, axis, removed, role in plan.slices():
        if role != "consumes":
            tensors[tensor].index_fill_(axis, torch.tensor(removed, device=tensors[tensor].device), 0)
    return model


def verify(
    model: nn.Module, plan: Plan, example: Any, *, tolerance: float = TOLERANCE, double: bool = True
) -> Verification:
    """Run masked against shrunk, in evaluation and in training mode (dropout off), and compare.

    Raises `NotEquivalent`, naming the groups, if they differ by more than `tolerance` relative to the largest output,
    unless the plan touches groups that were admitted as inexact.
    """
    call = Example.of(example)
    result = compare(model, plan, call, double=double)
    if result.exact and not result.difference <= tolerance:
        guilty = [
            group.name
            for group in plan.graph.groups
            if not bool((part := plan.kept[group.start : group.start + group.size]).all())
            and not compare(model, _only(plan, group.start, part), call, double=double).difference <= tolerance
        ]
        where = f"group {', '.join(repr(name) for name in guilty)}" if guilty else "these groups taken together"
        raise NotEquivalent(
            f"masked and shrunk differ by {result.difference:.1e} (tolerance {tolerance:.0e}) because of {where}; "
            "leave it out with analyze(..., ignore=...) and please report the network"
        )
    return result


def _only(plan: Plan, start: int, part: Tensor) -> Plan:
    kept = plan.graph.all_kept()
    kept[start : start + part.numel()] = part
    return Plan(plan.graph, kept)


def compare(
    model: nn.Module,
    plan: Plan,
    example: Example,
    *,
    double: bool = True,
    prepare: Callable[[nn.Module], None] | None = None,
    modes: tuple[str, ...] = ("eval", "train"),
    values: bool = True,
) -> Verification:
    """Masked against shrunk on a copy of the model, after `prepare`; without `values` only shapes are compared."""
    work = copy_model(model)
    if double:
        work, example = work.double(), example.double()
    if prepare is not None:
        prepare(work)
    mask_(work, plan)
    masked = {}
    for mode in modes:
        try:
            masked[mode] = run(work, example, mode)
        except Exception:
            # A network that cannot train on this example alone is compared in evaluation mode.
            if mode == "eval":
                raise
    shrink_(work, plan)
    absolute = difference = 0.0
    count = 0
    for mode, expected in masked.items():
        got = run(work, example, mode)
        if [t.shape for t in got] != [t.shape for t in expected]:
            shapes = [tuple(t.shape) for t in expected], [tuple(t.shape) for t in got]
            raise NotEquivalent(f"the shrunk network's outputs have shapes {shapes[1]}, the masked one's {shapes[0]}")
        for a, b in zip(expected, got, strict=True):
            if a.numel() and values:
                gap = _gap(a, b)
                absolute = max(absolute, gap)
                difference = max(difference, gap / max(float(a.abs().nan_to_num(0, 0, 0).max()), 1e-30) if gap else 0.0)
                count += a.numel()
    return Verification(difference, absolute, count, tuple(masked), plan.exact)


def _gap(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    differ = (a != b) & ~(a.isnan() & b.isnan())
    if not bool(differ.any()):
        return 0.0
    gap = (a - b)[differ].abs()
    return float(gap.nan_to_num(float("inf"), float("inf")).max())


@torch.no_grad()
def run(model: nn.Module, example: Example, mode: str) -> list[Tensor]:
    """All output tensors, as real numbers; in training mode with a batch of two and without dropout."""
    with undisturbed(model):
        model.train(mode == "train")
        if mode == "train":
            example = example.repeated()
            for module in model.modules():
                if "drop" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth":
                    module.eval()
        torch.manual_seed(0)
        output = example.copied()(model)
    return [
        torch.view_as_real(t) if t.is_complex() else t.double() if t.is_floating_point() else t.long()
        for t in tensors_within(output)
    ]
