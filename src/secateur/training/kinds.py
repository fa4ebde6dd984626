"""Settings have the kinds of values that their annotations say, wherever they come from: code, a file, a command."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from secateur.errors import InvalidSetting

KINDS = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("True or False", (bool,)),
    "str": ("text", (str,)),
    "dict[str, int | float]": ("numbers by name of a layer", (dict,)),
}
"""What an annotation means, in words and in types; of others only a Literal is checked."""


@cache
def choices_of(kind: type) -> dict[str, tuple[str, ...]]:
    """By field of a dataclass, the values that its Literal admits."""
    return {name: get_args(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal}


def check_kinds(settings: Any) -> None:
    """Raise for the first field of a dataclass that is of another kind."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        what, kinds = KINDS.get(str(field.type).removesuffix(" | None"), ("", ()))
        absent = value is None and field.default is None
        fits = type(value) in kinds and (type(value) is not float or math.isfinite(value))
        if kinds and not fits and not absent:
            raise InvalidSetting(f"{field.name} must be {what}, got {value!r}")
    for name, choices in choices_of(type(settings)).items():
        if getattr(settings, name) not in choices:
            raise InvalidSetting(f"{name} must be one of {', '.join(choices)}, got {getattr(settings, name)!r}")
