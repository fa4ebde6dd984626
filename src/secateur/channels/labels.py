"""Labels: which slices of which tensors must go together.

Every index of every axis of every parameter and buffer has an integer *label*. While the network runs, each axis of
each activation carries a vector of *codes*, one per index: `2 * label + alive`. The label says which slice the element
came from; `alive` is 1 if the element may be non-zero although its channel has been zeroed at the source.
Operators tie labels (they go together) or freeze them (they stay, for a reason). A *channel* is one
connected component of the ties.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from secateur.channels.reasons import Reason


class Role(IntEnum):
    """What a slice does for its channel; the masked model zeroes all but the consumers."""

    UNUSED = 0
    CONSUMES = 1
    PASSES = 2
    PRODUCES = 3

    @property
    def word(self) -> str:
        """The name in plans and members; slices without a role pass."""
        return "passes" if self is Role.UNUSED else self.name.lower()


def labels_of(codes: Tensor) -> Tensor:
    return codes >> 1


def is_alive(codes: Tensor) -> Tensor:
    return (codes & 1).bool()


def any_alive(codes: Tensor) -> bool:
    return bool((codes & 1).any())


def with_alive(codes: Tensor, alive: Tensor | bool) -> Tensor:
    """The same labels with this alive bit."""
    return (codes & ~1) | (alive.long() if isinstance(alive, Tensor) else int(alive))


@dataclass
class LabelTable:
    """Allocates labels, and records ties, roles and reasons, which are evaluated once at the end."""

    size: int = 0
    num_slices: int = 0
    """The first labels are those of slices of parameters and buffers, the others of what the forward pass makes."""
    frozen: list[tuple[Tensor, Reason]] = field(default_factory=list)
    inexact: list[tuple[Tensor, Reason]] = field(default_factory=list)
    zeros: list[Tensor] = field(default_factory=list)
    """Blocks of zeros that the code puts next to channels."""
    _ties: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _roles: dict[Role, list[Tensor]] = field(default_factory=dict)

    def allocate(self, count: int) -> Tensor:
        """Codes of `count` new labels, zero when removed."""
        start, self.size = self.size, self.size + count
        return torch.arange(2 * start, 2 * self.size, 2, device="cpu")

    def tie(self, codes: Tensor, others: Tensor) -> None:
        """Index by index, these go together; `others` may be a column or a row that is repeated."""
        if codes is not others:
            self._ties.append((codes.reshape(-1), others.expand_as(codes).reshape(-1)))

    def freeze(self, codes: Tensor, reason: Reason) -> None:
        self.frozen.append((codes, reason))

    def admit(self, codes: Tensor, reason: Reason) -> None:
        """These may be cut although masked and shrunk differ, for this reason."""
        self.inexact.append((codes, reason))

    def has_slices(self, codes: Any) -> bool:
        """Whether any of these is a slice of a parameter or buffer."""
        return isinstance(codes, Tensor) and bool((labels_of(codes) < self.num_slices).any())

    def zeros_among(self, codes: Tensor) -> list[Tensor]:
        """The blocks of `zeros` that are among these."""
        return [block for block in self.zeros if bool(torch.isin(labels_of(block), labels_of(codes)).any())]

    def mark(self, codes: Tensor, role: Role) -> None:
        self._roles.setdefault(role, []).append(codes)

    def roles(self) -> Tensor:
        """The strongest role of every label."""
        roles = torch.zeros(self.size, dtype=torch.int8, device="cpu")
        for role in sorted(self._roles):
            roles[labels_of(torch.cat([codes.reshape(-1) for codes in self._roles[role]]))] = int(role)
        return roles

    def channels(self, ties: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """For every label the number of its channel, counted from 0 in order of first appearance.

        ties: pairs of codes that go together besides those that are remembered.
        """
        parent = connect(self.size, [*self._ties, *ties])
        number = torch.cumsum(parent == torch.arange(self.size, device="cpu"), 0) - 1
        return number[parent]


def connect(size: int, ties: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The smallest member of each label's connected component; ties are pairs of codes.

    >>> connect(4, [(torch.tensor([0, 6]), torch.tensor([4, 2]))])
    tensor([0, 1, 0, 1])
    """
    parent = torch.arange(size, device="cpu")
    pairs = list(ties)
    if not pairs:
        return parent
    a, b = (labels_of(torch.cat(side)) for side in zip(*pairs, strict=True))
    while True:
        root_a, root_b = parent[a], parent[b]
        differ = root_a != root_b
        if not bool(differ.any()):
            return parent
        a, b, root_a, root_b = a[differ], b[differ], root_a[differ], root_b[differ]
        low, high = torch.minimum(root_a, root_b), torch.maximum(root_a, root_b)
        parent.scatter_reduce_(0, high, low, "amin")
        while True:
            jumped = parent[parent]
            if torch.equal(jumped, parent):
                break
            parent = jumped
