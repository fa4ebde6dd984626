"""The oracle: the network with channels zeroed and the network with channels cut are the same function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.example import Example, tensors_within
from secateur.channels.groups import ChannelGroup
from secateur.channels.guard import undisturbed
from secateur.channels.plan import Plan
from secateur.channels.shapes import EagerMode, has_mask
from secateur.channels.shrink import copy_model, shrink_
from secateur.errors import NotEquivalent

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of the difference relative to the largest output, by the precision of the comparison."""


@dataclass(frozen=True)
class Verification:
    """How far masked and shrunk are apart, relative to the largest output."""

    difference: float
    absolute: float
    outputs: int
    """How many numbers were compared."""
    modes: tuple[str, ...]
    precision: torch.dtype
    """Double, unless the model runs in single precision only."""
    exact: bool
    """False if the plan touches groups that were admitted as inexact."""
    chosen: bool = False
    """The outputs are picked by value, as boxes are, and near ties fell otherwise or nothing was picked: what led to
    them was compared, the sums over all channels of every convolution and matrix product."""

    @property
    def agrees(self) -> bool:
        """Whether the difference is rounding."""
        return self.difference <= TOLERANCES[self.precision]

    def __str__(self) -> str:
        where = ", ".join(self.modes) + ("" if self.exact else ", inexact by request")
        return f"masked and shrunk differ by {self.difference:.1e} over {self.outputs} outputs ({where})"


@torch.no_grad()
def mask_(model: nn.Module, plan: Plan) -> nn.Module:
    """Zero every slice that the plan removes, except those that only consume."""
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    for tensor, axis, removed, role in plan.slices():
        if role != "consumes":
            tensors[tensor].index_fill_(axis, torch.tensor(removed, device=tensors[tensor].device), 0)
    return model


def verify(model: nn.Module, plan: Plan, example: Any) -> Verification:
    """Run masked against shrunk in double precision, in evaluation and in training mode (dropout off), and compare.

    Raises `NotEquivalent`, naming the groups, if they differ by more than rounding, unless the plan touches groups that
    were admitted as inexact.
    """
    call = Example.of(example)
    result = compare(model, plan, call)
    if not result.outputs:
        raise NotEquivalent("this example gives no outputs to compare: pass one that does")
    if result.exact and not result.agrees:
        guilty = [group.name for group in plan.graph.groups if _is_guilty(model, plan, group, call)]
        where = f"group {', '.join(repr(name) for name in guilty)}" if guilty else "these groups taken together"
        raise NotEquivalent(
            f"masked and shrunk differ by {result.difference:.1e} (allowed: {TOLERANCES[result.precision]:.0e}) "
            f"because of {where}; leave it out with analyze(..., ignore=...) and please report the network"
        )
    return result


def _is_guilty(model: nn.Module, plan: Plan, group: ChannelGroup, example: Example) -> bool:
    part = slice(group.start, group.start + group.size)
    kept = plan.graph.all_kept()
    kept[part] = plan.kept[part]
    return not bool(kept.all()) and not compare(model, Plan(plan.graph, kept), example).agrees


def compare(
    model: nn.Module,
    plan: Plan,
    example: Example,
    *,
    precision: torch.dtype = torch.float64,
    prepare: Callable[[nn.Module], None] | None = None,
    modes: tuple[str, ...] = ("eval", "train"),
) -> Verification:
    """Masked against shrunk on a copy of the model, after `prepare`."""
    work = copy_model(model).to(precision)
    cast = example.to(precision)
    if prepare is not None:
        prepare(work)
    mask_(work, plan)
    masked: dict[str, Outcome] = {}
    for mode in modes:
        try:
            masked[mode] = run(work, cast, mode)
        except Exception:
            # Nothing has been cut yet: the model cannot run in double precision, or cannot train on this example.
            if mode == "eval":
                if precision == torch.float64:
                    return compare(model, plan, example, precision=torch.float32, prepare=prepare, modes=modes)
                raise
    shrink_(work, plan)
    gaps: list[tuple[float, float]] = []
    count = 0
    chosen = False
    for mode, expected in masked.items():
        got = run(work, cast, mode)
        compared = expected.outputs
        found = gaps_between(compared, got.outputs)
        wrong = found is None or any(relative > TOLERANCES[precision] for _, relative in found)
        if expected.chose and (wrong or not any(t.numel() for t in compared)):
            compared, chosen = expected.products, True
            found = gaps_between(compared, got.products)
        count += sum(t.numel() for t in compared)
        if found is None:
            shapes = [[tuple(t.shape) for t in outcome.outputs] for outcome in (expected, got)]
            raise NotEquivalent(f"the shrunk network's outputs have shapes {shapes[1]}, the masked one's {shapes[0]}")
        gaps += found
    return Verification(
        difference=max((relative for _, relative in gaps), default=0.0),
        absolute=max((absolute for absolute, _ in gaps), default=0.0),
        outputs=count,
        modes=tuple(masked),
        precision=precision,
        exact=plan.exact,
        chosen=chosen,
    )


def gaps_between(expected: list[Tensor], got: list[Tensor]) -> list[tuple[float, float]] | None:
    """For each tensor the largest absolute difference, also relative to its largest value; None for other shapes."""
    if [t.shape for t in got] != [t.shape for t in expected]:
        return None
    gaps = []
    for a, b in zip(expected, got, strict=True):
        differ = (a != b) & ~(a.isnan() & b.isnan())
        if bool(differ.any()):
            gap = float((a - b)[differ].abs().nan_to_num(float("inf"), float("inf")).max())
            gaps.append((gap, gap / max(float(a.abs().nan_to_num(0, 0, 0).max()), 1e-30)))
    return gaps


@dataclass(frozen=True)
class Outcome:
    """What a forward pass gave."""

    outputs: list[Tensor]
    products: list[Tensor]
    """Sum and sum of squares of every convolution and matrix product before the first choice by value."""
    chose: bool


class Record(EagerMode):
    """Sums up every product; removed channels give zeros there, so that masked and shrunk must agree."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Tensor] = []
        self.chose = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if (
            name in ("topk", "sort", "argmax", "argmin", "torchvision::nms")
            or torch.Tag.dynamic_output_shape in func.tags
        ):
            self.chose |= name != "index" or has_mask(args[1])
        elif name in ("convolution", "mm", "addmm", "bmm", "baddbmm") and not self.chose:
            self.products += [out.double().sum(), out.double().square().sum()]
        return out


@torch.no_grad()
def run(model: nn.Module, example: Example, mode: str) -> Outcome:
    """A forward pass; in training mode with a batch of two and without dropout."""
    with undisturbed(model), Record() as record:
        model.train(mode == "train")
        if mode == "train":
            example = example.repeated()
            for module in model.modules():
                if "drop" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth":
                    module.eval()
        torch.manual_seed(0)
        output = example.copied()(model)
    outputs = [torch.view_as_real(t) if t.is_complex() else t for t in tensors_within(output)]
    return Outcome([t.double() for t in outputs], record.products, record.chose)
