"""What the tests believe instead of Secateur: masking, running, comparing and counting, written down once more."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import secateur
from secateur import Plan

TOLERANCE = 1e-9


def randomize_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights, biases, scales and running statistics in double precision: nothing is zero or one by chance."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        uniform = torch.rand(tensor.shape, generator=generator)
        if name.endswith("running_var"):
            values = 0.5 + uniform
        elif tensor.dim() > 1:
            values = (2 * uniform - 1) * (3 / max(1, tensor.numel() // max(1, len(tensor)))) ** 0.5
        else:
            values = (0.3 + uniform) * torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, -1.0, 1.0)
        tensor.data = values.double()
    return model.double()


def masked(model: nn.Module, plan: Plan) -> nn.Module:
    """A full copy in which everything that the plan removes is zero, except where it is only consumed."""
    model = copy.deepcopy(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, axis, removed, role in plan.slices():
        assert role in ("produces", "passes", "consumes")
        if role != "consumes":
            tensors[name].data[(slice(None),) * axis + (removed,)] = 0
    return model


def outputs(model: nn.Module, inputs: tuple[Any, ...], mode: str) -> list[Tensor]:
    """All tensors that the model gives, without dropout."""
    set_mode(model, mode)
    with torch.no_grad():
        return tensors_of(model(*(t.clone() if isinstance(t, Tensor) else t for t in inputs)))


def set_mode(model: nn.Module, mode: str) -> None:
    """Without dropout."""
    model.train(mode == "train")
    for module in model.modules():
        if "Drop" in type(module).__name__:
            module.eval()


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_of(item)]


def assert_exact(model: nn.Module, plan: Plan, inputs: tuple[Any, ...], *, cost: bool = True) -> None:
    """Masked equals shrunk in both modes, and the shrunk model costs what the plan says."""
    full, small = masked(model, plan), secateur.shrink(model, plan)
    for mode in ("eval", "train"):
        expected, got = outputs(full, inputs, mode), outputs(small, inputs, mode)
        assert expected, "nothing to compare"
        assert [t.shape for t in got] == [t.shape for t in expected]
        for a, b in zip(expected, got, strict=True):
            gap = float((a - b).abs().max())
            scale = float(a.abs().max())
            assert gap <= TOLERANCE * max(scale, 1e-3), (
                f"masked and shrunk differ by {gap:.1e} of {scale:.1e} in {mode}"
            )
    if cost:
        assert (plan.cost.macs, plan.cost.params) == real_cost(small, inputs)


def real_cost(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[int, int]:
    """Multiply-adds as torch counts them, and parameters."""
    with FlopCounterMode(display=False) as counter:
        outputs(model, inputs, "eval")
    return counter.get_total_flops() // 2, sum(p.numel() for p in model.parameters())


def random_plan(graph: secateur.ChannelGraph, seed: int, share: float) -> Plan:
    """Each channel is dropped with this probability; as many of every group stay as must."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(graph.num_channels, generator=generator) >= share
    for group in graph.groups:
        kept[group.start + torch.randperm(group.size, generator=generator)[: group.at_least]] = True
    return Plan(graph, kept)
