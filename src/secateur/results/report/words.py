"""Numbers and names as the report shows them; text from files is made harmless here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

LONGEST = 80
"""Characters of a name or value that are shown."""
LARGEST = 1e24
"""Larger numbers count as infinite."""


def number(value: Any) -> float | None:
    """A finite number, else None, which is a gap in a chart and a dash in a table.

    >>> number(3), number("3"), number(True), number(float("nan")), number(10**40)
    (3, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < LARGEST else None


def drawn(values: Sequence[float | None]) -> list[float | None]:
    """Numbers to six digits, which halves the size of the page.

    >>> drawn([98.8857938718663, 64, None])
    [98.8858, 64, None]
    """
    return [float(f"{value:.6g}") if isinstance(value, float) else value for value in values]


def text(value: Any, longest: int = LONGEST) -> str:
    """A value in one line, without unprintable characters, shortened in the middle.

    >>> text("a\\nb"), text([0.1, 0.2]), text({"fc": 1.0}), text(0.1 - 1e-17), text("x" * 100, 9)
    ('a\ufffdb', '0.1, 0.2', '{"fc": 1.0}', '0.1', 'xxxx…xxxx')
    """
    if isinstance(value, list) and not any(isinstance(each, list | dict) for each in value):
        value = ", ".join(map(text, value))
    elif isinstance(value, list | dict):
        value = json.dumps(value)
    elif isinstance(value, float):
        value = f"{value:.6g}"
    line = "".join(letter if letter.isprintable() else "\ufffd" for letter in str(value))
    half = longest // 2
    return line if len(line) <= longest else f"{line[:half]}…{line[-half:]}"


def markup(name: str) -> str:
    """Text for a plotly chart, which interprets tags, entities, and templates such as %{x}.

    >>> markup("<b>&%{x}")
    '&lt;b&gt;&amp;&#37;{x}'
    """
    for letter, entity in {"&": "&amp;", "<": "&lt;", ">": "&gt;", "%": "&#37;"}.items():
        name = name.replace(letter, entity)
    return name


def precise(value: float | None) -> str:
    """Integers in full, other numbers to four digits.

    >>> precise(1648256), precise(98.8857), precise(3.1e-05), precise(None)
    ('1,648,256', '98.89', '3.1e-05', '-')
    """
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def brief(value: float | None) -> str:
    """Three digits, with a letter for ten thousand and more.

    >>> brief(1648256), brief(2010), brief(36661), brief(999999), brief(None)
    ('1.65 M', '2,010', '36.7 k', '1.00 M', '-')
    """
    if value is None or value < 10_000:
        return precise(value)
    power, letter = next((p, letter) for p, letter in ((9, "G"), (6, "M"), (3, "k")) if value >= 0.9995 * 10**p)
    scaled = value / 10**power
    return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {letter}"


def percent(share: float | None) -> str:
    """A share as a percentage.

    >>> percent(0.395), percent(None)
    ('39.5%', '-')
    """
    return "-" if share is None else f"{share:.1%}"


def share(part: float | None, whole: float | None) -> float | None:
    """Part of whole; None if either is unknown."""
    return part / whole if part is not None and whole else None


def roughly(seconds: float) -> str:
    """A time that is an estimate.

    >>> roughly(20), roughly(700), roughly(9000), roughly(360_000)
    ('less than a minute', 'about 12 min', 'about 2.5 h', 'about 100 h')
    """
    minutes = seconds / 60
    if minutes < 1:
        return "less than a minute"
    if minutes < 100:
        return f"about {minutes:.0f} min"
    return f"about {minutes / 60:.1f} h" if minutes < 600 else f"about {minutes / 60:,.0f} h"


def sentence(words: str) -> str:
    """With a capital letter first.

    >>> sentence("test loss"), sentence("")
    ('Test loss', '')
    """
    return words[:1].upper() + words[1:]
