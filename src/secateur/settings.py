"""Settings are data: frozen groups of fields, checked when they are made. No torch.

A settings class may hold groups, each with a prefix. Files and the command line know every field by one flat name, the
prefix and the field's own name: `TickTock.ticks.removes` is `tick_removes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields, replace
from functools import cache
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from secateur.errors import InvalidSetting, unknown_name

TYPES = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("True or False", (bool,)),
    "str": ("text", (str,)),
    "tuple[float, ...]": ("numbers", (tuple,)),
    "dict[str, int | float]": ("numbers by layer name", (dict,)),
}
"""What an annotation means, in text and in types. Of other annotations only Literals are checked."""


LARGEST = 2**63 - 1
"""Torch holds no larger integer."""


class InvalidField(InvalidSetting):
    """A field of settings has a wrong value; `name` is the field's, with its group's prefix where that is known."""

    def __init__(self, name: str, problem: str, *, got: Any, wanted: str) -> None:
        super().__init__(f"{name} {problem}", got=got, wanted=wanted)
        self.name, self.problem = name, problem

    def within(self, prefix: str) -> InvalidField:
        return InvalidField(prefix + self.name, self.problem, got=self.got, wanted=str(self.wanted))


def group(kind: Callable[[], Any], prefix: str = "") -> Any:
    """A field that holds a group of settings, whose flat names begin with the prefix."""
    return field(default_factory=kind, metadata={"prefix": prefix})


class Settings:
    """Base of the settings classes: checks, flat names, and copies with other values."""

    def __post_init__(self) -> None:
        for each in fields(self):  # pyright: ignore
            value = getattr(self, each.name)
            if hasattr(value, "item"):
                object.__setattr__(self, each.name, value.item())  # a number of numpy or torch
            elif isinstance(value, list):
                object.__setattr__(self, each.name, tuple(value))
        check_types(self)
        for each in fields(self):  # pyright: ignore
            if isinstance(value := getattr(self, each.name), int) and value > LARGEST:
                raise InvalidField(each.name, "is too large", got=value, wanted=f"{LARGEST:,} at most")
        self.check()

    def check(self) -> None:
        """Raise for values that are out of range."""

    def require(self, wanted: str, *names: str, holds: Callable[[Any], bool]) -> None:
        """Raise for the first of these fields whose value is not as wanted."""
        for name in names:
            value = getattr(self, name)
            if not holds(value):
                raise InvalidField(name, "is out of range", got=value, wanted=wanted)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Settings from flat names; what is not named has its default.

        >>> from secateur import Training
        >>> Training.of(epochs=3, weight_decay=0.0).schedule.epochs
        3
        """
        return cls(**_arguments(cls, None, values))

    def but(self, **values: Any) -> Self:
        """A copy with other values, by flat name.

        >>> from secateur import Training
        >>> Training.of(epochs=3).but(momentum=0.5).learning.momentum
        0.5
        """
        return replace(self, **_arguments(type(self), self, values))  # pyright: ignore

    def to_dict(self) -> dict[str, Any]:
        """Every value by its flat name, ready for JSON."""
        result: dict[str, Any] = {}
        for name, (path, _) in flat_fields(type(self)).items():
            value: Any = self
            for part in path:
                value = getattr(value, part)
            result[name] = list(value) if isinstance(value, tuple) else value
        return result


def _arguments(kind: type, base: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """What to make settings with so that they have these values, and otherwise those of `base`."""
    known = flat_fields(kind)
    if unknown := sorted(set(values) - set(known)):
        raise unknown_name("setting", unknown[0], list(known))
    arguments: dict[str, Any] = {}
    for each in fields(kind):  # pyright: ignore
        prefix = each.metadata.get("prefix")
        if prefix is None:
            arguments |= {each.name: values[each.name]} if each.name in values else {}
            continue
        inner: Any = each.default_factory
        given = {name: values[prefix + name] for name in flat_fields(inner) if prefix + name in values}
        if given:
            make = getattr(base, each.name).but if base is not None else inner.of
            try:
                arguments[each.name] = make(**given)
            except InvalidField as error:
                raise error.within(prefix) from None
    return arguments


@cache
def flat_fields(kind: type) -> dict[str, tuple[tuple[str, ...], Field[Any]]]:
    """Every field of a settings class and of its groups: flat name, path of attributes, and the field."""
    found: dict[str, tuple[tuple[str, ...], Field[Any]]] = {}
    for each in fields(kind):
        prefix = each.metadata.get("prefix")
        if prefix is None:
            found[each.name] = (each.name,), each
        else:
            inner: Any = each.default_factory
            for name, (path, leaf) in flat_fields(inner).items():
                found[prefix + name] = (each.name, *path), leaf
    return found


def defaults_of(kind: type) -> dict[str, Any]:
    """The defaults by flat name, ready for JSON."""
    found: dict[str, Any] = {}
    for name, (_, each) in flat_fields(kind).items():
        value = each.default if each.default_factory is MISSING else each.default_factory()
        found[name] = list(value) if isinstance(value, tuple) else value
    return found


@cache
def choices_of(kind: type) -> dict[str, tuple[str, ...]]:
    """The values that a Literal admits, by field."""
    return {name: get_args(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal}


def check_types(settings: Any) -> None:
    """Raise for the first field of a dataclass whose value is not of its annotated type."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        what, types = TYPES.get(str(each.type).removesuffix(" | None"), ("", ()))
        absent = value is None and each.default is None
        fits = type(value) in types and (type(value) is not float or math.isfinite(value))
        if types and not fits and not absent:
            raise InvalidField(each.name, "has the wrong type", got=repr(value), wanted=what)
    for name, choices in choices_of(type(settings)).items():
        if getattr(settings, name) not in choices:
            wanted = f"one of {', '.join(choices)}"
            raise InvalidField(name, "is not known", got=repr(getattr(settings, name)), wanted=wanted)


def is_share(value: float) -> bool:
    return 0 < value <= 1


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise InvalidField("seed", "is out of range", got=seed, wanted="a whole number from 0 to 2**63 - 1")
