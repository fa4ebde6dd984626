"""Settings are data: frozen groups of fields, checked when they are made. No torch.

A settings class may hold groups, each with a prefix. Files and the command line know every field by one flat name, the
prefix and the field's own name: `TickTock.tick.removes` is `tick_removes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from secateur.errors import InvalidSetting, unknown_name
from secateur.training.schedules import SHAPES, Shape

TYPES = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("True or False", (bool,)),
    "str": ("text", (str,)),
    "tuple[float, ...]": ("numbers", (tuple,)),
    "dict[str, int | float]": ("numbers by layer name", (dict,)),
}
"""What an annotation means, in text and in types. Of other annotations only Literals are checked."""


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

        >>> Training.of(epochs=3, weight_decay=0.0).schedule.epochs
        3
        """
        return cls(**_arguments(cls, None, values))

    def but(self, **values: Any) -> Self:
        """A copy with other values, by flat name.

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


@dataclass(frozen=True, kw_only=True)
class Schedule(Settings):
    """How long a phase trains, and at which learning rates."""

    epochs: int = 40
    """Number of epochs."""

    lr: float = 1e-2
    """Highest learning rate."""

    lr_low: float = 1e-3
    """Lowest learning rate, for the shapes that have one."""

    shape: Shape = "triangle"
    """triangle (the paper's: up, down), warmup (up for a fifth, down to 0), cosine (down), steps or constant."""

    milestones: tuple[float, ...] = (0.6, 0.8, 0.9)
    """Where "steps" divides the learning rate, as fractions of the epochs. The paper: 0.6, 0.8, 0.9 on ImageNet."""

    divide: float = 10.0
    """What "steps" divides the learning rate by."""

    def check(self) -> None:
        self.require("0 or more", "epochs", "lr", "lr_low", holds=lambda value: value >= 0)
        if self.lr_low > self.lr:
            raise InvalidField("lr_low", "is out of range", got=self.lr_low, wanted=f"at most lr, {self.lr}")
        numbers = all(isinstance(value, int | float) for value in self.milestones)
        if not numbers or not all(0 < value < 1 for value in self.milestones):
            wanted = "fractions of the epochs, between 0 and 1"
            raise InvalidField("milestones", "is out of range", got=self.milestones, wanted=wanted)
        self.require("a number above 0", "divide", holds=lambda value: value > 0)

    def rate(self, step: int, num_steps: int) -> float:
        """The learning rate of a step, out of so many in the whole phase."""
        divided = (self.milestones, self.divide) if self.shape == "steps" else ()
        # A loader may give more batches than its length says.
        return SHAPES[self.shape](min(step, num_steps), num_steps, self.lr_low, self.lr, *divided)


@dataclass(frozen=True, kw_only=True)
class Learning(Settings):
    """What all phases of a run share: the optimizer, distillation, and averaging."""

    optimizer: str = "sgd"
    """Any optimizer of torch, by name: sgd, adamw, ..."""

    momentum: float = 0.9
    """Momentum, for optimizers that have it."""

    nesterov: bool = False
    """Use Nesterov momentum."""

    weight_decay: float = 1e-4
    """Weight decay, on gates too."""

    decay_norms: bool = True
    """Apply weight decay to gates, batch norms and biases too; otherwise to filters alone."""

    distill: float = 0.0
    """Share of the loss that is the distance from the whole network's output, in Tocks and fine-tuning."""

    distill_temperature: float = 4.0
    """Temperature that softens both outputs."""

    ema: float = 0.0
    """Decay of a moving average of the weights, which becomes the result of fine-tuning; 0 for none."""

    def check(self) -> None:
        self.require("0 or more", "momentum", "weight_decay", holds=lambda value: value >= 0)
        self.require("a share, at least 0 and below 1", "distill", "ema", holds=lambda value: 0 <= value < 1)
        self.require("a number above 0", "distill_temperature", holds=lambda value: value > 0)


Evaluate = Literal["always", "phases", "end"]


@dataclass(frozen=True, kw_only=True)
class Training(Settings):
    """Train a network: from random weights, or from those that it has."""

    schedule: Schedule = group(Schedule)
    learning: Learning = group(Learning)

    evaluate: Evaluate = "always"
    """When to compute the metrics: after every epoch, or at the end only (phases, end)."""

    seed: int = 0
    """Seed of everything random in a run."""

    def check(self) -> None:
        check_seed(self.seed)


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise InvalidField("seed", "is out of range", got=seed, wanted="a whole number from 0 to 2**63 - 1")
