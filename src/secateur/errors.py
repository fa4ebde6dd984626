"""What can go wrong. Each error says what, what was got, what was wanted, and the remedy."""

from __future__ import annotations

from typing import Any


class SecateurError(Exception):
    """Base of every error that Secateur raises on purpose.

    what: the thing and what is wrong with it.
    got, wanted: the value that was found, and what would do.
    remedy: what to do about it, as a sentence.

    >>> print(SecateurError("tick_removes is out of range", got=1.5, wanted="a share above 0 and at most 1"))
    tick_removes is out of range: got 1.5, wanted a share above 0 and at most 1
    >>> print(SecateurError("the model is wrapped in DataParallel", remedy="Pass model.module instead"))
    the model is wrapped in DataParallel. Pass model.module instead
    """

    def __init__(self, what: str, *, got: Any = None, wanted: Any = None, remedy: str | None = None) -> None:
        super().__init__(what)
        self.what, self.got, self.wanted, self.remedy = what, got, wanted, remedy

    def __str__(self) -> str:
        details = [
            f"{word} {value}" for word, value in (("got", self.got), ("wanted", self.wanted)) if value is not None
        ]
        text = f"{self.what}: {', '.join(details)}" if details else self.what
        return f"{text}. {self.remedy}" if self.remedy else text


class InvalidModel(SecateurError, ValueError):
    """The model, or the example it is called with, cannot be used: analysed, gated, built or exported."""


class InvalidSetting(SecateurError, ValueError):
    """An argument, setting, name or plan is wrong, or does not go with another."""


class InvalidData(SecateurError, ValueError):
    """Data are not what is needed: batches, labels, losses, or files that are missing, damaged or of another kind."""


class UnreachableBudget(InvalidSetting):
    """The floors do not allow the network to get as small as asked."""


class NotEquivalent(SecateurError):
    """Two networks that must give the same output differ."""


class Diverged(SecateurError):
    """The loss is not finite any more; `result` holds the network as it was before, where there is one."""

    def __init__(self, what: str, *, result: Any = None, remedy: str | None = None) -> None:
        super().__init__(what, remedy=remedy)
        self.result = result


class Interrupted(SecateurError):
    """A run was asked to stop, and has been saved in `folder`."""

    def __init__(self, signal: int, folder: str) -> None:
        super().__init__(f"stopped and saved in {folder}")
        self.signal, self.folder = signal, folder


class RunInUse(SecateurError):
    """Another process holds the folder of the run."""


class LostProcess(SecateurError):
    """Another process of the same run has ended, or stands still."""


class MissingExtra(SecateurError, ImportError):
    """An optional package is not installed."""


class DamagedCheckpoint(UserWarning):
    """A checkpoint was put aside; the run continues from the one before it."""


def unknown_name(kind: str, name: str, known: list[str]) -> InvalidSetting:
    """The error for a name that does not exist, with the nearest ones that do.

    >>> print(unknown_name("layer", "conv11", ["conv1", "fc"]))
    there is no layer 'conv11'. Did you mean 'conv1'?
    """
    import difflib

    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        remedy = "Did you mean " + " or ".join(repr(n) for n in near) + "?"
    else:
        shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        remedy = f"Known: {shown}" if known else "There are none"
    return InvalidSetting(f"there is no {kind} {name!r}", remedy=remedy)


def place_of(error: BaseException, *inside: str) -> str:
    """The last line that led to the error, in a file whose name starts with none of these; as ` at file:line: code`."""
    import traceback
    from pathlib import Path

    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(inside)]
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
