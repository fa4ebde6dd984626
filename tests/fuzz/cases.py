"""A random network with its example, and how two networks are compared on it."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sizes  # noqa: F401  # registers its steps, and those of strange
import torch
from grammar import Network, inputs, numbers_of
from oracle import TOLERANCE, randomize_
from torch import Tensor, nn

from secateur.nested import map_tensors
from secateur.randomness import random_state


class Found(AssertionError):
    """Something that must hold does not."""


def bits(tensor: Tensor) -> Any:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tuple(tensor.shape), tensor.dtype, plain.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def plain(value: Any) -> Any:
    """What can be compared of an attribute."""
    if isinstance(value, Tensor):
        return id(value), bits(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def state_of(model: nn.Module) -> dict[str, Any]:
    """All of a model, and of the random generators: attributes, hooks and flags too."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state |= {f"{name}:{key}": plain(value) for key, value in vars(module).items()}
    state |= {f"flags of {n}": (p.requires_grad, p.grad is None, p._version) for n, p in model.named_parameters()}
    state["keys"] = list(model.state_dict())
    state["random"] = map_tensors(random_state(), bits)
    return state


def assert_unchanged(model: nn.Module, before: dict[str, Any], what: str) -> None:
    after = state_of(model)
    changed = sorted((before.keys() ^ after.keys()) - {"random"})
    changed += [key for key, value in before.items() if key in after and after[key] != value]
    if changed:
        raise Found(f"{what} {changed[:3]}")


def outputs(model: nn.Module, example: Sequence[Tensor], mode: str) -> list[Tensor]:
    model.train(mode == "train")
    for module in model.modules():
        if "Dropout" in type(module).__name__:
            module.eval()
    torch.manual_seed(0)
    random.seed(0)
    with torch.no_grad():
        return flat(model(*(t.clone() for t in example)))


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [tensor for item in values for tensor in flat(item)]


@dataclass
class Case:
    """A network with its example, and what is allowed for it."""

    seed: int
    network: nn.Module
    example: tuple[Tensor, ...]
    flags: set[str]

    def __post_init__(self) -> None:
        self.precise = copy.deepcopy(self.network).double()
        """What masked and cut are compared on."""
        self.precise_example = tuple(t.double() for t in self.example)

    @property
    def tolerance(self) -> float:
        return 1e-4 if "single" in self.flags else TOLERANCE

    def same(self, one: nn.Module, other: nn.Module, what: str, modes: Sequence[str] = ("eval", "train")) -> None:
        """Equal up to rounding; what rounding does is measured where they differ. The networks run, and may change."""
        if "noisy" in self.flags:
            modes = [mode for mode in modes if mode == "eval"]
        for mode in modes:
            try:
                expected = outputs(one, self.precise_example, mode)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue  # the masked network cannot run in this mode, e.g. training with one value
            got = outputs(other, self.precise_example, mode)
            if [t.shape for t in got] != [t.shape for t in expected]:
                raise Found(f"{what}: other shapes in {mode}")
            for a, b in zip(expected, got, strict=True):
                gap, scale = gap_of(a, b), float(a.abs().nan_to_num(0, 0, 0).max()) if a.numel() else 0.0
                if gap > self.tolerance * max(scale, 1e-3) and gap > 100 * self.rounding(one, mode):
                    raise Found(f"{what}: differ by {gap:.1e} of {scale:.1e} in {mode}")

    def rounding(self, model: nn.Module, mode: str) -> float:
        """How far the last places of the inputs move the outputs."""
        moved = 0.0
        base = outputs(copy.deepcopy(model), self.precise_example, mode)
        for sign in (1, -1):
            nudged = tuple(t * (1 + sign * 4e-16) + sign * 1e-16 for t in self.precise_example)
            other = outputs(copy.deepcopy(model), nudged, mode)
            moved = max([moved, *(gap_of(a, b) for a, b in zip(base, other, strict=True))])
        return moved


def gap_of(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    if bool((a.isnan() != b.isnan()).any()):
        return float("inf")
    return float(torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(0.0, float("inf"), 0).max())


def case_of(seed: int, steps: Sequence[str], numbers: Sequence[int] | None = None) -> Case:
    torch.manual_seed(seed)
    random.seed(seed)
    numbers = numbers_of(seed) if numbers is None else numbers
    network = Network(numbers, steps)
    own = random.Random(sum(numbers) + seed)
    orthogonal = any("parametrizations" in n for n, _ in network.named_modules())
    if not orthogonal:
        randomize_(network, seed)
    example = inputs(seed)
    treatment = own.choice(["none"] * 6 + ["channels last", "single", "half"])
    if treatment == "channels last":
        for tensor in network.state_dict().values():
            if tensor.dim() == 4:
                tensor.data = tensor.to(memory_format=torch.channels_last)
        example = tuple(t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in example)
    elif treatment != "none":
        dtype = torch.float32 if treatment == "single" else torch.bfloat16
        network.to(dtype)
        example = tuple(t.to(dtype) for t in example)
    if own.random() < 0.2:
        for parameter in own.sample(list(network.parameters()), 2):
            parameter.requires_grad_(False)
    network.train(own.random() < 0.5)
    for module in network.modules():
        if own.random() < 0.05:
            module.eval()
    return Case(seed, network, example, network.flags)
