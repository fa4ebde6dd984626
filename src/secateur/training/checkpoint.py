"""A run on disk, which can be killed at any moment and resumed from its last checkpoint."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import safetensors.torch
import torch
from safetensors import SafetensorError

from secateur.errors import DamagedCheckpoint, InvalidData, InvalidSetting, RunInUse
from secateur.files import read_bytes, read_json, reason, sync_folder, to_json, write_atomic, write_synced
from secateur.training.packed import DTYPES, FORMATS, Packed, unpack

RUN = {"format": "secateur-run", "version": 1}
CHECKPOINT = {"format": "secateur-checkpoint", "version": 1}
TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
"""What systems answer if somebody else holds the lock."""
LOCKED = 2**20
"""The byte of the lock's file that is locked where a whole file cannot be."""
KEPT = 2  # checkpoints: the last, and the one before in case the last is damaged

# A link in a folder from elsewhere would have another file cut and written.
OWN = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
OWN |= getattr(os, "O_BINARY", 0)  # Windows would change the ends of lines

# What reading bytes that anybody may have changed can raise; safetensors and torch have their own ways to refuse.
REFUSALS = (OSError, ValueError, TypeError, KeyError, RuntimeError, OverflowError, AssertionError, SafetensorError)


class RunFolder:
    """A run on disk: config.json, events.jsonl, checkpoints, and a lock that admits one process."""

    def __init__(self, path: str | Path) -> None:
        """Make the folder if needed, and lock it."""
        self._lock = self._events = -1
        self._owner = 0
        """The process that holds the lock."""
        self.path = Path(path)
        try:
            with self._named("open"):
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(self.path / ".lock", OWN, 0o666)
                lock(self._lock, self.path)
                self._owner = os.getpid()
                self._events = os.open(self.path / "events.jsonl", OWN | os.O_APPEND, 0o666)
        except BaseException:
            self.close()
            raise
        OPEN.add(self)

    def write_config(self, config: dict[str, Any]) -> None:
        """Write what defines the run; the file appears whole or not at all."""
        self.write("config.json", to_json(RUN | config, indent=2))

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file beside the checkpoints; it appears whole or not at all."""
        with self._named(f"write {name} of"):
            self._check_own()
            write_atomic(self.path / name, content)

    def read_config(self) -> dict[str, Any]:
        """What was given to `write_config`."""
        return read_config(self.path)

    def append_event(self, event: dict[str, Any]) -> None:
        """Add a line to events.jsonl; it survives a crash at once, and a power failure from the next checkpoint on."""
        line = to_json(event).encode() + b"\n"
        with self._named("write events.jsonl of"):
            size = os.fstat(self._events).st_size
            try:
                if os.write(self._events, line) < len(line):
                    raise OSError("there was room for a part of the line only")
            except BaseException:
                os.ftruncate(self._events, size)
                raise

    def read_events(self) -> list[dict[str, Any]]:
        """All events so far."""
        with self._named("read events.jsonl of"):
            if not stat.S_ISREG(os.fstat(self._events).st_mode):
                raise OSError("not a plain file")
            *lines, _ = (self.path / "events.jsonl").read_bytes().split(b"\n")  # a line without an end is half an event
        events = []
        for number, line in enumerate(lines, 1):
            try:
                events.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                what = f"line {number} of {self.path / 'events.jsonl'} is damaged: {error}"
                remedy = "Remove this line and all after it, and resume"
                raise InvalidData(what, remedy=remedy) from error
        return events

    def save(self, state: dict[str, Any], name: str | None = None) -> Path:
        """Write a checkpoint, which appears whole or not at all, and remove all but the last two.

        state: dicts with string keys, lists, strings, numbers, booleans, None and tensors, in any nesting.
        name: keep it for good under this name; `load` does not look at it.
        """
        packed = Packed(state)
        data = safetensors.torch.save(packed.tensors)
        folder = self.path / "checkpoints"
        with self._named("save a checkpoint of"):
            self._check_own()
            os.fsync(self._events)
            body = CHECKPOINT | {
                "events": os.fstat(self._events).st_size,
                "size": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "formats": packed.formats,
                "bytes": packed.bytes,
                "state": packed.skeleton,
            }
            folder.mkdir(exist_ok=True)
            sync_folder(self.path)
            number = max((int(checkpoint.name) for checkpoint in self._checkpoints()), default=0) + 1
            target = folder / (name or f"{number:08}")
            temporary = folder / f".{target.name}"
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                if name is not None:
                    shutil.rmtree(target, ignore_errors=True)
                temporary.mkdir()
                write_synced(temporary / "state.safetensors", data)
                write_synced(temporary / "state.json", seal(body))
                sync_folder(temporary)
                temporary.rename(target)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            sync_folder(folder)
            self._tidy()
        return target

    def load(self) -> dict[str, Any] | None:
        """The state of the last whole checkpoint, None if there is none yet; later events are dropped.

        Damaged checkpoints that are newer are put aside under another name, for what follows makes them wrong.
        """
        state, events = None, 0
        refused: dict[Path, str] = {}
        for checkpoint in reversed(self._checkpoints()):
            try:
                state, events = read_checkpoint(checkpoint, self._events)
                break
            except REFUSALS as error:
                refused[checkpoint] = f"checkpoint {checkpoint} is damaged: {error}"
        if refused and state is None:
            remedy = f"Restore one from a copy, or start again by removing {self.path / 'checkpoints'}"
            raise InvalidData(f"no checkpoint can be used: {'; '.join(refused.values())}", remedy=remedy)
        with self._named("go back to the last whole checkpoint of"):
            for checkpoint, reason in refused.items():
                aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                checkpoint.rename(aside)
                text = f"{reason}; it is renamed to {aside.name}, and the run continues from the one before"
                warnings.warn(text, DamagedCheckpoint, stacklevel=2)
            os.ftruncate(self._events, events)
        return state

    def close(self) -> None:
        """Give up the lock, and remove the process id from it; a forked process only closes its handles."""
        if self._lock >= 0 and self._owner == os.getpid():
            with suppress(OSError):
                os.ftruncate(self._lock, 0)
        handles = self._events, self._lock
        self._events = self._lock = -1
        for handle in handles:
            if handle >= 0:
                os.close(handle)

    __del__ = close
    """A run that never started must not keep its lock."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_own(self) -> None:
        """Raise if the folder was removed; another run may have its place."""
        held = self.path / ".lock"
        if not held.exists() or not os.path.samestat(held.stat(), os.fstat(self._lock)):
            raise InvalidData(f"the folder of the run, {self.path}, was removed or moved", remedy="Start the run again")

    def _checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        found = (path for path in (self.path / "checkpoints").glob("*") if re.fullmatch("[0-9]{8,}", path.name))
        return sorted(found, key=lambda path: int(path.name))

    def _tidy(self) -> None:
        """Remove old checkpoints, and what a killed process has left."""
        for checkpoint in self._checkpoints()[:-KEPT]:
            # A half removed one must not pass for a checkpoint.
            hidden = checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}"))
            shutil.rmtree(hidden, ignore_errors=True)
        for stale in (self.path / "checkpoints").glob(".*"):
            shutil.rmtree(stale, ignore_errors=True)

    @contextmanager
    def _named(self, action: str) -> Iterator[None]:
        """Turn an error of the system into one that names the run and a remedy."""
        try:
            yield
        except OSError as error:
            remedy = "Make sure that the folder is writable and the disk has room, then resume: no checkpoint is lost"
            raise InvalidData(f"cannot {action} the run in {self.path}: {reason(error)}", remedy=remedy) from error


OPEN: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _let_go() -> None:
    # A data loader's worker would otherwise hold the lock for as long as it outlives the killed run.
    for folder in list(OPEN):
        folder.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def as_it_was(path: Path, *names: str, config: str = "config.json") -> Iterator[None]:
    """If a start fails, leave the folder as it was, unless a run has begun there, which then has its config.

    names: the files that the start may put there, beside those of a `RunFolder`.
    """
    begins = path / config
    new = [file for name in (".lock", "events.jsonl", *names) if not (file := path / name).exists()]
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    begun = begins.exists()
    try:
        yield
    except RunInUse:
        raise  # what is there is another's
    except BaseException:
        if begins.exists() == begun:
            with suppress(OSError):  # the path is a file's, or somebody else has put something there
                for file in new:
                    file.unlink(missing_ok=True)
                for folder in missing:
                    folder.rmdir()
        raise


def read_config(folder: Path) -> dict[str, Any]:
    """What defines the run in this folder; needs no lock."""
    path = folder / "config.json"
    try:
        config = read_json(path)
        check_format(config, RUN)
    except REFUSALS as error:
        remedy = "Restore it, or start a new run in another folder"
        raise InvalidData(f"{path} cannot be read: {error}", remedy=remedy) from error
    return {key: value for key, value in config.items() if key not in RUN}


def read_checkpoint(folder: Path, events: int) -> tuple[dict[str, Any], int]:
    """The state, and the length that events.jsonl had; raises one of `REFUSALS` if anything has changed.

    Sizes are compared with the files before anything is read or allocated.
    """
    body = unseal(read_bytes(folder / "state.json"))
    check_format(body, CHECKPOINT)
    position = field(body, "events", int)
    length = os.fstat(events).st_size
    if not 0 <= position <= length:
        raise ValueError(f"events.jsonl had {position} bytes then, and has only {length} now")
    if position and read_at(events, position - 1, 1) != b"\n":
        raise ValueError(f"events.jsonl had {position} bytes then, and no line ends there now")
    path = folder / "state.safetensors"
    if not path.is_file():
        raise ValueError("state.safetensors is not a plain file")
    if (size := path.stat().st_size) != field(body, "size", int):
        raise ValueError(f"state.safetensors has {size} bytes where {body['size']} were written")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != field(body, "sha256", str):
        raise ValueError("the sha256 of state.safetensors differs")
    tensors = safetensors.torch.load(data)
    if set(tensors) != {str(index) for index in range(len(tensors))}:
        raise ValueError("state.safetensors holds tensors that are not named by number")
    for name, (dtype, shape) in field(body, "bytes", dict).items():
        tensors[name] = tensors[name].view(DTYPES[dtype]).reshape(shape)
    for name, memory_format in field(body, "formats", dict).items():
        plain = tensors[name]
        tensors[name] = torch.empty(plain.shape, dtype=plain.dtype, memory_format=FORMATS[memory_format]).copy_(plain)
    state = unpack(field(body, "state", dict), tensors)
    if not isinstance(state, dict):
        raise ValueError("the state is not a dict")
    return state, position


def field(body: dict[str, Any], name: str, kind: type) -> Any:
    if type(body.get(name)) is not kind:
        raise ValueError(f"{name!r} in state.json should be of type {kind.__name__}, got {body.get(name)!r:.40}")
    return body[name]


def check_format(found: Any, wanted: dict[str, Any]) -> None:
    """Raise unless the format and the version are those that this code reads."""
    if not isinstance(found, dict) or found.get("format") != wanted["format"]:
        raise ValueError(f"it does not say that it is a {wanted['format']}")
    if found.get("version") != wanted["version"]:
        version = f"{found.get('version')!r:.40}"
        raise ValueError(f"it has version {version}, and this Secateur reads version {wanted['version']}")


def seal(body: dict[str, Any]) -> bytes:
    """JSON with its own sha256, which `unseal` compares before it parses anything."""
    text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    return b'{"sha256":"%s","body":%s}\n' % (hashlib.sha256(text).hexdigest().encode(), text)


def unseal(data: bytes) -> Any:
    match = re.fullmatch(rb'\{"sha256":"([0-9a-f]{64})","body":(.*)\}\n', data, re.DOTALL)
    if not match or hashlib.sha256(match[2]).hexdigest().encode() != match[1]:
        raise ValueError("the sha256 of state.json differs")
    return json.loads(match[2])


def lock(handle: int, path: Path) -> None:
    """Take the lock and write the process id; the system releases the lock however the process ends."""
    try:
        _take(handle, path)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        holder = read_at(handle, 0, 20)
        who = f"process {int(holder)}" if holder.isdigit() else "another process"
        remedy = "Wait until it ends, or choose another folder"
        raise RunInUse(f"the run in {path} is in use by {who}", remedy=remedy) from None
    os.ftruncate(handle, 0)
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, str(os.getpid()).encode())


def read_at(handle: int, place: int, count: int) -> bytes:
    """So many bytes of an open file from there on, which stays where it is; Windows has no os.pread."""
    before = os.lseek(handle, 0, os.SEEK_CUR)
    os.lseek(handle, place, os.SEEK_SET)
    found = os.read(handle, count)
    os.lseek(handle, before, os.SEEK_SET)
    return found


def _take(handle: int, path: Path) -> None:
    """Lock an open file, or raise at once."""
    with suppress(ImportError):
        import fcntl

        return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with suppress(ImportError):  # Windows, where others cannot read what is locked
        import msvcrt

        os.lseek(handle, LOCKED, os.SEEK_SET)
        return msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # pyright: ignore[reportAttributeAccessIssue]
    remedy = "Run it from Python without a folder"
    raise InvalidSetting(f"the run in {path} needs file locks, which this system lacks", remedy=remedy)
