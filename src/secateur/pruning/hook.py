"""Hooks of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A forward hook of a score. In a copy or a pickle of the model it does nothing: the score is of this model."""

    def __init__(self, see: Callable[..., None]) -> None:
        self.see = see

    def __call__(self, *given: Any) -> None:
        self.see(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_look_away,)


def _look_away(*given: Any) -> None:
    pass
