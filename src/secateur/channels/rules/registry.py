"""The registry of operator rules: which function follows which operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur.channels.rules.call import Call, tensors_in

Rule = Callable[[Call], None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register how the operators of these names carry labels; a name without `::` is aten's.

    Names, not operators: some exist in certain versions of torch only, or come with a package that is not imported yet.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            full = name if "::" in name else f"aten::{name}"
            if full in RULES:
                raise ValueError(f"{full} already has a rule: {RULES[full].__name__}")
            RULES[full] = function
        return function

    return register


@dataclass(frozen=True)
class Operator:
    """What is known of an operator before it is called."""

    func: Any
    name: str
    rule: Rule | None
    arguments: dict[str, tuple[int, Any]]
    """Position and default of every argument by name."""
    written: tuple[str, ...]
    """The arguments it writes to."""
    shares_memory: bool
    """Whether results may be views of arguments."""
    looks_at_values: bool
    """Whether a result's shape, or what Python does next, depends on values."""

    def written_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        values = []
        for name in self.written:
            position = self.arguments[name][0]
            values.append(args[position] if position < len(args) else kwargs.get(name))
        return tensors_in(values)

    @staticmethod
    def of(func: Any, fallback: Rule) -> Operator:
        """Look the operator up; `fallback` is the rule for operators that torch tags as pointwise."""
        schema = func._schema
        written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        rule = RULES.get(schema.name, fallback if _is_pointwise(func) else None)
        if any(a.kwarg_only and a.name in written for a in schema.arguments):
            rule = None
        arguments = {a.name: (i, a.default_value) for i, a in enumerate(schema.arguments)}
        shares = any(a.alias_info is not None for a in schema.arguments)
        namespace, _, name = schema.name.partition("::")
        tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        looks = namespace != "aten" or any(tag in func.tags for tag in tags)
        return Operator(func, name, rule, arguments, written, shares, looks)


def _is_pointwise(func: Any) -> bool:
    """Whether torch tags the operator as pointwise, or, if it works in place, the one that does not."""
    plain = getattr(torch.ops.aten, func.overloadpacket.__name__.rstrip("_"), None)
    plain = getattr(plain, func._overloadname, None)
    return torch.Tag.pointwise in func.tags or (plain is not None and torch.Tag.pointwise in plain.tags)
