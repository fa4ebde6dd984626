"""What can go wrong, each with its remedy."""

import shlex
from typing import Any


class SecateurError(Exception):
    """Base of every error that Secateur raises on purpose."""


class InvalidArgument(SecateurError, TypeError):
    """An argument is another kind of thing than the function takes."""


class InvalidModel(SecateurError, ValueError):
    """The model cannot be analysed as it is."""


class InvalidExample(SecateurError, ValueError):
    """The model does not run on the example input."""


class InvalidPlan(SecateurError, ValueError):
    """The plan does not fit the graph, or asks for what must not be cut."""


class InvalidSetting(SecateurError, ValueError):
    """A setting is out of range, or does not go with another."""


class UnreachableBudget(SecateurError, ValueError):
    """The floors do not allow the network to get as small as asked."""


class InvalidTask(SecateurError, ValueError):
    """The data, the loss or the metrics of a task are not what training needs."""


class InvalidData(SecateurError, ValueError):
    """The files of a dataset are missing, broken, or not what their names say."""


class InvalidOptimizer(SecateurError, ValueError):
    """The optimizer does not hold the parameters it should."""


class NonFiniteLoss(SecateurError):
    """The loss has become NaN or infinite."""

    def __init__(self, step: int) -> None:
        super().__init__(f"the loss is not finite at step {step}")
        self.step = step


class Diverged(SecateurError):
    """Training has gone wrong; `result` holds the network as it last was well."""

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result


class Interrupted(SecateurError):
    """A run was asked to stop, and has been saved."""

    def __init__(self, signal: int, folder: str) -> None:
        super().__init__(f"stopped and saved; go on with: secateur resume {shlex.quote(folder)}")
        self.signal = signal

    def within(self, command: str) -> "Interrupted":
        """The same when the run was a part of something larger, which is gone on with by giving its command again."""
        self.args = (f"stopped and saved; go on with: {command}",)
        return self


class LostProcess(SecateurError):
    """Another process of the same run has ended."""


class UnknownName(SecateurError, KeyError):
    """A name that does not exist; the message suggests near ones."""

    def __str__(self) -> str:
        return str(self.args[0])


class MissingExtra(SecateurError, ImportError):
    """An optional package is needed; the message says how to install it."""


class NotEquivalent(SecateurError):
    """The masked and the shrunk model disagree."""


class RunInUse(SecateurError):
    """Another process holds the folder of the run."""


class DamagedRun(SecateurError):
    """The folder of a run cannot be read or written, or what it holds is not what was written."""


class DamagedCheckpoint(UserWarning):
    """A checkpoint was put aside; the run goes on from the one before it."""


class CannotExport(SecateurError):
    """The network cannot be written in that form."""


class DamagedResult(SecateurError):
    """A result on disk is not what was saved, or is of another network."""


def unknown_name(kind: str, name: str, known: list[str]) -> UnknownName:
    """The error for a wrong name, with the nearest right ones.

    >>> str(unknown_name("layer", "conv11", ["conv1", "fc"]))
    "there is no layer 'conv11'; did you mean 'conv1'?"
    """
    import difflib

    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        hint = "did you mean " + " or ".join(repr(n) for n in near) + "?"
    else:
        shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        hint = f"known: {shown}" if known else "there are none"
    return UnknownName(f"there is no {kind} {name!r}; {hint}")


def place_of(error: BaseException, *inside: str) -> str:
    """The last line that led to the error, in a file whose name starts with none of these; as ` at file:line: code`."""
    import traceback
    from pathlib import Path

    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(inside)]
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
