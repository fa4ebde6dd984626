"""Flags of the command line, made from settings classes: one flat flag for every value, with its docstring as help."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from functools import cache
from textwrap import dedent
from typing import Annotated, Any, get_type_hints

import tyro

from secateur.settings import Settings, flat_fields

Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""A flag that is either typed or not, unlike the flags of settings, which have a --no- form too."""


def flags_of(kind: type[Settings], shown: Mapping[str, Any] | None = None, prefix: str = "") -> type:
    """A dataclass with a field for every value of the settings, by flat name; None is a flag that was not typed.

    shown: the values that --help shows as defaults, by flat name; otherwise those of the class.
    """
    return _flags_of(kind, _defaults_of(kind, prefix) if shown is None else shown, prefix)


def _flags_of(kind: Any, shown: Mapping[str, Any], prefix: str) -> type:
    hints, texts = get_type_hints(kind), docstrings_of(kind)
    made: list[Any] = []
    for each in fields(kind):
        inner: str | None = each.metadata.get("prefix")
        if inner is not None:
            group = _flags_of(each.default_factory, shown, prefix + inner)
            made.append((each.name, group, field(default_factory=group)))
        else:
            name = prefix + each.name
            hint = f"(default: {_text_of(shown[name])})"
            about = tyro.conf.arg(help=texts.get(each.name, ""), help_behavior_hint=hint)
            made.append((name, Annotated[hints[each.name] | None, about], field(default=None)))
    about = {"__doc__": (kind.__doc__ or "").partition("\n\n")[0]}
    return make_dataclass(kind.__name__, made, frozen=True, kw_only=True, namespace=about)


def typed(flags: Any) -> dict[str, Any]:
    """The values that were typed, by flat name."""
    values: dict[str, Any] = {}
    for each in fields(flags):
        value = getattr(flags, each.name)
        values |= typed(value) if is_dataclass(value) else {each.name: value} if value is not None else {}
    return values


def _defaults_of(kind: type[Settings], prefix: str) -> dict[str, Any]:
    return {
        prefix + name: each.default if each.default_factory is MISSING else each.default_factory()
        for name, (_, each) in flat_fields(kind).items()
    }


def _text_of(value: Any) -> str:
    """A value as it would be typed.

    >>> _text_of((0.5, 0.75)), _text_of(None), _text_of(0.01)
    ('0.5 0.75', 'none', '0.01')
    """
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    return "none" if value is None or value in ("", {}) else str(value)


@cache
def docstrings_of(kind: type) -> dict[str, str]:
    """The docstrings of the fields of a class and of its bases, which Python does not keep."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for before, after in zip(body.body, body.body[1:], strict=False):
            match before, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = text
    return found
