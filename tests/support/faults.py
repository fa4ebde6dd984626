"""A disk that fails: every call that changes a folder is counted, and one of them, or all after it, raises."""

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

CHANGING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
MAKES = {"open", "write", "mkdir"}
"""Calls that a full disk refuses; it can still rename and remove, and has room again after that."""


class Faults:
    """What a folder's disk is asked for, and which of it fails.

    fail_at: the number of the first call that fails, from 0; None for none.
    code: the error. With `lasting`, all later calls of the kinds in `MAKES` fail too.
    """

    def __init__(self, folder: Path, fail_at: int | None = None, code: int = 0, lasting: bool = False) -> None:
        self.folder, self.fail_at, self.code, self.lasting = folder, fail_at, code, lasting
        self.calls: list[str] = []

    def check(self, kind: str, path: Any) -> None:
        """Count a call; raise if it is to fail. `path` may be a handle."""
        name = Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else Path(os.fspath(path)).absolute()
        if not name.is_relative_to(self.folder):
            return
        number = len(self.calls)
        self.calls.append(f"{kind} {name.relative_to(self.folder)}")
        if self.fail_at is None or number < self.fail_at:
            return
        if number == self.fail_at or (self.lasting and kind in MAKES):
            named = () if isinstance(path, int) else (os.fspath(path),)
            raise OSError(self.code, os.strerror(self.code), *named)

    @contextmanager
    def active(self) -> Iterator["Faults"]:
        with patch.multiple(os, **self._calls()), patch("io.open", self._open), patch("builtins.open", self._open):
            yield self

    def _calls(self) -> dict[str, Callable[..., Any]]:
        real = {name: getattr(os, name) for name in ("open", *ARGUMENTS)}

        def checked(name: str) -> Callable[..., Any]:
            def call(*given: Any, **options: Any) -> Any:
                # rmtree gives names within a folder that is open, and removes; that does not fail on a full disk.
                if options.get("dir_fd") is None:
                    self.check(ARGUMENTS[name], given[0])
                return real[name](*given, **options)

            return call

        def opened(path: Any, flags: int, *given: Any, **options: Any) -> int:
            if flags & CHANGING:
                self.check("open", path)
            return real["open"](path, flags, *given, **options)

        def written(handle: int, data: bytes) -> int:
            try:
                self.check("write", handle)
            except OSError:
                real["write"](handle, data[: len(data) // 2])  # a full disk takes what fits
                raise
            return real["write"](handle, data)

        return {**{name: checked(name) for name in ARGUMENTS}, "open": opened, "write": written}

    def _open(self, file: Any, mode: str = "r", *given: Any, _real: Any = io.open, **options: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+"):
            return _real(file, mode, *given, **options)
        self.check("open", file)
        raw = FailingFile(self, file, mode.replace("b", "").replace("t", ""))
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, options.get("encoding"))


ARGUMENTS = {
    "write": "write",
    "fsync": "fsync",
    "ftruncate": "truncate",
    "pwrite": "write",
    "mkdir": "mkdir",
    "rename": "rename",
    "replace": "rename",
}
"""Functions of os by the kind of call that they are."""


class FailingFile(io.FileIO):
    """A file that takes half of what it is given when its disk fails."""

    def __init__(self, faults: Faults, path: Any, mode: str) -> None:
        super().__init__(path, mode)
        self._faults = faults

    def write(self, data: Any) -> int:
        try:
            self._faults.check("write", self.fileno())
        except OSError:
            super().write(bytes(data)[: len(data) // 2])
            raise
        return super().write(data)


assert builtins.open is io.open
