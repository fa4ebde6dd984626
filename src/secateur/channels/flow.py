"""What one forward pass computed from what: every operator call, every module call, and the values between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from secateur.channels.rules.call import tensors_in
from secateur.channels.rules.registry import Operator

COUNTER = itertools.count()


@dataclass(frozen=True, slots=True)
class Step:
    """One operator call. Values are numbers; a tensor that is written in place has another value afterwards."""

    name: str
    call: int
    """The innermost module call that it ran in, -1 outside of all."""
    reads: tuple[int, ...]
    leaves: tuple[str, ...]
    """Parameters and buffers among its arguments."""
    makes: tuple[int, ...]
    """The first is that of its first result."""
    written: frozenset[int]
    """Numbers of the memories that it writes to."""
    rows: range
    """The multiply-adds that were counted for it."""
    options: tuple[Any, ...]
    """Its arguments other than tensors."""
    looks: bool
    """Whether Python may go another way with other values."""
    is_sum: bool
    """Whether it adds two tensors of one shape and type, as they are."""


@dataclass(slots=True)
class ModuleCall:
    """One call of a module: the steps from `first` up to `last`."""

    module: str | None
    """Its name, None if it is no part of the model."""
    parent: int
    first: int
    given: int | None
    """The value of its only argument, None if it has others."""
    last: int = 0
    gives: int | None = None
    """The value of its result, None if that is not one tensor."""


@dataclass
class Flow:
    """Notes one forward pass while it runs."""

    leaves: Mapping[int, Any]
    """Parameters and buffers by identity, with their names."""
    steps: list[Step] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    outputs: set[int] = field(default_factory=set)
    """Values that the model returns."""

    def __post_init__(self) -> None:
        self._mark = f"_secateur_flow_{next(COUNTER)}"
        self._running = [-1]
        self._now: list[int] = []
        """The present value of each tensor that was seen."""
        self._memory: list[int] = []
        """The memory that each lies in: a number for all tensors that share it."""
        self._sharing: dict[int, list[int]] = {}
        self.memory_of: list[int] = []
        """The same for each value."""

    def _tensor(self, tensor: Tensor) -> int:
        """The number of a tensor."""
        number = tensor.__dict__.get(self._mark)
        if number is None:
            number = len(self._now)
            setattr(tensor, self._mark, number)
            self._memory.append(number)
            self._sharing[number] = [number]
            self._now.append(-1)
            self._renew(number)
        return number

    def _renew(self, number: int) -> int:
        self._now[number] = len(self.memory_of)
        self.memory_of.append(self._memory[number])
        return self._now[number]

    def value(self, tensor: Tensor) -> int:
        """The number of what the tensor holds now."""
        return self._now[self._tensor(tensor)]

    def read(self, tensors: Iterable[Tensor]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The values of these tensors, and the names of the parameters and buffers among them."""
        values, leaves = list[int](), list[str]()
        for tensor in tensors:
            leaf = self.leaves.get(id(tensor))
            if leaf is None:
                values.append(self.value(tensor))
            else:
                leaves.append(leaf.name)
        return tuple(values), tuple(leaves)

    def note(
        self,
        operator: Operator,
        read: tuple[tuple[int, ...], tuple[str, ...]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        rows: range,
        looks: bool,
    ) -> None:
        """An operator has run; `read` is what it was given before."""
        inputs, outputs = tensors_in(args), tensors_in(out if isinstance(out, (tuple, list)) else (out,))
        written = operator.written_tensors(args, kwargs)
        changed = {self._tensor(tensor) for tensor in written if id(tensor) not in self.leaves}
        memories = frozenset(self._memory[number] for number in changed)
        # Whatever lies in the same memory has changed too.
        others = [number for memory in memories for number in self._sharing[memory]]
        fresh = [t for t in outputs if id(t) not in self.leaves and self._mark not in t.__dict__]
        for tensor in fresh:
            self._tensor(tensor)
            if operator.shares_memory:
                self._share(tensor, inputs)
        renewed = {number: self._renew(number) for number in others}
        first = [self._now[self._tensor(t)] for t in outputs[:1] if id(t) not in self.leaves]
        makes = (*first, *renewed.values(), *(self.value(tensor) for tensor in fresh))
        makes = tuple(dict.fromkeys(value for value in makes if value not in read[0]))
        options = (*(a for a in args if not isinstance(a, Tensor)), *kwargs.values())
        self.steps.append(
            Step(
                operator.name, self._running[-1], *read, makes, memories, rows, options, looks,
                _is_sum(operator, args, kwargs, outputs) and len(set(read[0])) == 2,
            )
        )  # fmt: skip

    def note_read(self, tensor: Tensor, written: bool = False) -> None:
        """Python code reads the values of a tensor, or gives it others, without an operator."""
        read = self.read([tensor])
        makes = tuple(self._renew(self._tensor(tensor)) for _ in read[0]) if written else ()
        self.steps.append(
            Step("read", self._running[-1], *read, makes, frozenset(), range(0), (), looks=True, is_sum=False)
        )

    def _share(self, tensor: Tensor, inputs: list[Tensor]) -> None:
        """The tensor may be a view of one of these."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()._cdata
        for other in inputs:
            strided = other.layout is torch.strided and id(other) not in self.leaves
            if strided and other.untyped_storage()._cdata == storage:
                number, memory = self._tensor(tensor), self._memory[self._tensor(other)]
                self._memory[number] = self.memory_of[self._now[number]] = memory
                self._sharing[memory].append(number)
                return

    def enter(self, module: str | None, args: tuple[Any, ...]) -> None:
        """A module is called."""
        only = args[0] if len(args) == 1 and isinstance(args[0], Tensor) else None
        given = self.value(only) if only is not None and id(only) not in self.leaves else None
        self.calls.append(ModuleCall(module, self._running[-1], len(self.steps), given))
        self._running.append(len(self.calls) - 1)

    def leave(self, kwargs: dict[str, Any], output: Any) -> None:
        """The module that was called last returns."""
        call = self.calls[self._running.pop()]
        call.last = len(self.steps)
        if kwargs:
            call.given = None
        if isinstance(output, Tensor) and id(output) not in self.leaves:
            call.gives = self.value(output)

    def returns(self, tensors: Iterable[Tensor]) -> None:
        """The model returns these."""
        self.outputs = {self.value(tensor) for tensor in tensors if id(tensor) not in self.leaves}

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """For every value the steps that read it."""
        found: dict[int, list[int]] = {}
        for number, step in enumerate(self.steps):
            for value in step.reads:
                found.setdefault(value, []).append(number)
        return found

    @cached_property
    def users(self) -> dict[str, list[int]]:
        """For every parameter and buffer the steps that read or write it."""
        found: dict[str, list[int]] = {}
        for number, step in enumerate(self.steps):
            for name in step.leaves:
                found.setdefault(name, []).append(number)
        return found

    @cached_property
    def maker(self) -> dict[int, int]:
        """For every value that a step has made that step."""
        return {value: number for number, step in enumerate(self.steps) for value in step.makes}


def _is_sum(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> bool:
    if operator.name not in ("add", "add_") or len(args) != 2 or kwargs.get("alpha", 1) != 1:
        return False
    one, other = args
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return tensors and one.shape == other.shape and one.dtype == other.dtype == outputs[0].dtype
