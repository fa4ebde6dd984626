"""Docstrings of this project as Markdown: lists of arguments become lists, examples become code."""

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.*)")


class Docstrings(griffe.Extension):
    """Rewrites every docstring once it has been read."""

    def on_instance(self, *, obj: griffe.Object, **rest: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """
    >>> print(to_markdown("Do it.\\n\\nhow: in which\\n    way\\nfrom, to: then"))
    Do it.
    <BLANKLINE>
    - `how`: in which way
    - `from`, `to`: then
    """
    return "\n\n".join(paragraph_to_markdown(each) for each in re.split(r"\n\s*\n", text.strip()))


def paragraph_to_markdown(text: str) -> str:
    if text.startswith(">>> "):
        return f"```pycon\n{text}\n```"
    lines = re.sub(r"\n\s+", " ", text).splitlines()
    found = [ARGUMENT.fullmatch(line) for line in lines]
    if all(found):
        return "\n".join(f"- {names(each[1])}: {each[2]}" for each in found if each is not None)
    return text


def names(text: str) -> str:
    return ", ".join(f"`{name}`" for name in text.split(", "))
