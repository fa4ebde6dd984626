"""What is left of a block without one of its branches: plain data, and the plain modules made from it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from secateur.errors import InvalidSetting

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU, "leaky_relu": nn.LeakyReLU, "hardtanh": nn.Hardtanh,
    "hardswish": nn.Hardswish, "hardsigmoid": nn.Hardsigmoid, "mish": nn.Mish, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh,
}  # fmt: skip
"""Operators that the code of a block may call, and the modules that stand for them."""
WORDS = "none", "tanh"
"""Options of activations that are not numbers."""


@dataclass(frozen=True)
class Link:
    """One module of what is left of a block."""

    name: str
    """The name of a child of the block, which stays, or of a new activation."""
    activation: str | None = None
    """The operator of a new activation."""
    options: tuple[float | str, ...] = ()
    """What its module is made with."""
    copied: bool = False
    """Whether the child is an activation that works in place, and is replaced by a copy that does not."""

    def module_of(self, block: nn.Module) -> nn.Module:
        """The module itself."""
        if self.activation is not None:
            made = ACTIVATIONS[self.activation](*self.options)
        elif self.copied:
            made = copy.deepcopy(block._modules[self.name])
            assert made is not None
            made.inplace = False  # pyright: ignore
        else:
            return block.get_submodule(self.name)
        return made.train(block.training)


@dataclass(frozen=True)
class BlockCut:
    """A block that loses a branch: its name, what is left of it, and the parameters and buffers that go."""

    block: str
    left: tuple[Link, ...]
    tensors: tuple[str, ...]

    def takes(self, module: str) -> bool:
        """Whether a module of that name goes with the branch, or with its block."""
        stay = tuple(f"{self.block}.{link.name}." for link in self.left if link.activation is None and not link.copied)
        return f"{module}.".startswith(f"{self.block}.") and not f"{module}.".startswith(stay)

    def check(self, modules: Mapping[str, nn.Module], tensors: Iterable[str]) -> None:
        """Raise if this is not a block of the model with these modules and tensors."""
        what = f"the plan is of another network: block {self.block!r:.80}"
        block = modules.get(self.block) if self.block else None
        if block is None:
            raise InvalidSetting(f"{what} is missing")
        kept = [link for link in self.left if link.activation is None]
        for link in kept:
            child = block._modules.get(link.name)
            if child is None or (link.copied and (not hasattr(child, "inplace") or any(child.parameters()))):
                raise InvalidSetting(f"{what} has no such child", got=f"{link.name!r:.80}")
        stay = tuple(f"{self.block}.{link.name}." for link in kept)
        gone = {name for name in tensors if name.startswith(f"{self.block}.") and not name.startswith(stay)}
        if gone != set(self.tensors):
            raise InvalidSetting(f"{what} has other tensors", got=sorted(gone ^ set(self.tensors))[:3])

    def apply_(self, model: nn.Module) -> None:
        """Put what is left in the place of the block."""
        block = model.get_submodule(self.block)
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        for link in self.left:
            name, number = link.name, 1
            while name in parts or (link.activation is not None and name in block._modules):
                number += 1
                name = f"{link.name}_{number}"
            parts[name] = link.module_of(block)
        left = nn.Sequential(parts) if parts else nn.Identity()
        left.training = block.training
        path, _, name = self.block.rpartition(".")
        model.get_submodule(path)._modules[name] = left

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        left = [[link.name, link.activation, list(link.options), link.copied] for link in self.left]
        return {"block": self.block, "left": left, "tensors": list(self.tensors)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> BlockCut:
        """Read what `to_dict` has written; raises `ValueError` or `TypeError` for anything else."""
        links = [Link(name, activation, tuple(options), copied) for name, activation, options, copied in data["left"]]
        texts = [data["block"], *data["tensors"], *(link.name for link in links)]
        if not isinstance(data["tensors"], list) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("the names of a block that loses a branch are damaged")
        for link in links:
            known = link.activation is None or link.activation in ACTIVATIONS
            plain = all(type(option) in (int, float) or option in WORDS for option in link.options)
            if not known or not plain or type(link.copied) is not bool or hasattr(nn.Sequential, link.name):
                raise ValueError(f"{data['block']!r:.40} keeps something unknown: {link!r:.80}")
            if link.activation is not None:
                ACTIVATIONS[link.activation](*link.options)
        return BlockCut(data["block"], tuple(links), tuple(data["tensors"]))


def outermost_last(blocks: Iterable[BlockCut]) -> list[BlockCut]:
    """In the order in which they can be applied: blocks before those that hold them."""
    return sorted(blocks, key=lambda block: -block.block.count("."))
