"""Measured numbers as JSON, which knows neither NaN nor infinity, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any


def to_json(data: Any, indent: int | None = None) -> str:
    """JSON that every parser reads: a number that is not finite becomes null.

    >>> to_json({"accuracy": 93.1, "loss": float("inf"), "scores": (0.5, float("nan"))})
    '{"accuracy": 93.1, "loss": null, "scores": [0.5, null]}'
    """
    return json.dumps(
        _changed(data, lambda value: None if isinstance(value, float) and not math.isfinite(value) else value),
        indent=indent,
        allow_nan=False,
    )


def numbers(data: Any) -> Any:
    """Metrics and the like from a file: what was not finite is NaN.

    >>> numbers({"accuracy": 93.1, "loss": None})
    {'accuracy': 93.1, 'loss': nan}
    """
    return _changed(data, lambda value: math.nan if value is None else value)


def _changed(data: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(data, dict):
        return {key: _changed(value, change) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_changed(value, change) for value in data]
    return change(data)
