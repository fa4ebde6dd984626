"""Runs on disk: damage is found, said and survived."""

import errno
import gc
import hashlib
import json
import os
import random
import resource
import struct
import sys
import warnings
from pathlib import Path

import pytest
import torch
from saved import same

from secateur import files
from secateur.errors import DamagedCheckpoint, InvalidData
from secateur.training import checkpoint
from secateur.training.checkpoint import RunFolder, seal, unseal

# Damage


class Damaged:
    """A run with two checkpoints, to damage the last and see the first come back."""

    def __init__(self, path: Path) -> None:
        self.run = RunFolder(path)
        self.run.append_event({"step": 1})
        self.run.save({"step": 1})
        self.run.append_event({"step": 2})
        self.new = {"step": 2, "weight": torch.arange(3.0), "wide": torch.ones(1, 2, 2, 2)}
        self.last = self.run.save(self.new)
        self.events = (path / "events.jsonl").read_bytes()

    def refused(self, name: str = "") -> bool:
        """Load; whether the last was refused, and this file named. Then put everything back."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state = self.run.load()
        said = [str(warning.message) for warning in caught if warning.category is DamagedCheckpoint]
        if same(state, self.new):
            assert not said
            return False
        assert state == {"step": 1}
        assert self.run.read_events() == [{"step": 1}]
        assert len(said) == 1
        assert str(self.last) in said[0]
        assert name in said[0]
        self.last.with_name(f"{self.last.name}.damaged").rename(self.last)
        (self.run.path / "events.jsonl").write_bytes(self.events)
        return True


@pytest.fixture
def damaged(tmp_path):
    made = Damaged(tmp_path)
    assert not made.refused()
    yield made
    made.run.close()


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_flipped_bytes_and_cuts_are_refused(damaged, name) -> None:
    path = damaged.last / name
    good = path.read_bytes()
    dice = random.Random(0)
    for index, byte in list(enumerate(good))[:: len(good) // 300 + 1]:
        path.write_bytes(good[:index] + bytes([byte ^ 1 << dice.randrange(8)]) + good[index + 1 :])
        assert damaged.refused(name), index
    for length in range(0, len(good), 41):
        path.write_bytes(good[:length])
        assert damaged.refused(name), length
    path.write_bytes(good + b"\n")
    assert damaged.refused(name)
    path.unlink()
    assert damaged.refused(name)
    path.write_bytes(good)
    assert not damaged.refused()


def forge(folder: Path, **changes) -> None:
    """Change the checkpoint as somebody would who knows how to seal it."""
    body = unseal((folder / "state.json").read_bytes())
    (folder / "state.json").write_bytes(seal(body | changes))


HOSTILE = [
    *({"events": position} for position in (2**80, 29, 5, -1, "3", True, None, 3.0)),
    *({"size": size} for size in (2**62, 0, -1, "1", None)),
    *({"sha256": digest} for digest in ("0" * 64, 3, None)),
    *({"formats": formats} for formats in ([], {"1": "x"}, {"9": "channels_last"}, {"0": "channels_last"}, {"0": {}})),
    *({"bytes": {"0": entry}} for entry in (0, [], ["torch.float32", [2**40]], ["torch.load", [1]], [{}, [1]])),
    {"bytes": {"../0": ["torch.float32", [1]]}},
    *({"state": {"tensor": name}} for name in ("9", 0, None, "../../1", "/etc/passwd")),
    *({"state": state} for state in (None, [], {}, {"dict": 1}, {"dict": {}, "tensor": "0"}, {"tensor": "0"})),
    *({"state": {"dict": {"a": {"float": text}}}} for text in ("x", 3, None)),
    {"version": 2},
    {"format": "secateur-run"},
]


@pytest.mark.parametrize("changes", HOSTILE, ids=lambda changes: json.dumps(changes)[:60])
def test_forged_values_are_refused(damaged, changes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    forge(damaged.last, **changes)
    assert damaged.refused()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def tensor_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[int], end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        tensor_file({}, length=2**63),
        tensor_file({}, length=90_000_000),
        tensor_file({"0": entry([2**40], 2**42)}),
        tensor_file({"0": entry([2**62, 4], 4)}, bytes(4)),
        tensor_file({"0": entry([0, 2**63], 0)}),
        tensor_file({"0": entry([1], 4, "F8_E8M0")}, bytes(4)),
        tensor_file({"../../0": entry([1], 4)}, bytes(4)),
        tensor_file({"0/1": entry([1], 4)}, bytes(4)),
        tensor_file([0]),
    ],
)
def test_forged_tensor_files_are_refused(damaged, data) -> None:
    (damaged.last / "state.safetensors").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    forge(damaged.last, size=len(data), sha256=sha256, formats={}, state={"dict": {}})
    assert damaged.refused()


def test_skeleton_that_is_too_deep_is_refused(damaged) -> None:
    text = (damaged.last / "state.json").read_bytes().partition(b'"body":')[2][:-2]
    text = text.replace(b'"dict":{"step":2', b'"dict":{"step":' + b"[" * 10**5 + b"]" * 10**5)
    digest = hashlib.sha256(text).hexdigest().encode()
    (damaged.last / "state.json").write_bytes(b'{"sha256":"%s","body":%s}\n' % (digest, text))
    assert damaged.refused()


def test_lost_events_are_noticed(damaged) -> None:
    (damaged.run.path / "events.jsonl").write_bytes(damaged.events[:-1])
    assert damaged.refused("events.jsonl")


def test_going_on_after_damage(damaged) -> None:
    (damaged.last / "state.json").unlink()
    with pytest.warns(DamagedCheckpoint):
        assert damaged.run.load() == {"step": 1}
    saved = damaged.run.save({"step": 3})
    assert damaged.run.load() == {"step": 3}
    assert sorted(path.name for path in saved.parent.iterdir()) == ["00000001", "00000002", "00000002.damaged"]


def test_no_whole_checkpoint(damaged) -> None:
    for path in damaged.last.parent.iterdir():
        (path / "state.safetensors").unlink()
    with pytest.raises(InvalidData) as caught:
        damaged.run.load()
    assert "00000002" in caught.value.what
    assert "00000001" in caught.value.what
    assert (damaged.run.path / "events.jsonl").read_bytes() == damaged.events


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "terabyte"])
def test_what_is_no_plain_file_is_neither_waited_for_nor_read_without_end(damaged, name, kind) -> None:
    forge(damaged.last, size=0)
    path = damaged.last / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 2**40)
    assert damaged.refused(name)


@pytest.mark.parametrize("name", [".lock", "events.jsonl"])
def test_no_file_elsewhere_is_cut_or_written_through_a_link(name, tmp_path) -> None:
    folder, other = tmp_path / "run", tmp_path / "precious"
    folder.mkdir()
    other.write_text("precious\n")
    (folder / name).symlink_to(other)
    with pytest.raises(InvalidData) as caught:
        RunFolder(folder)
    assert str(folder) in caught.value.what
    assert other.read_text() == "precious\n"


def test_events_in_a_pipe_are_not_waited_for(tmp_path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with RunFolder(tmp_path) as run, pytest.raises(InvalidData, match="not a plain file"):
        run.read_events()


# Trouble while saving


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])
@pytest.mark.parametrize(("name", "fail_at"), [*(("fsync", call) for call in range(5)), ("mkdir", 1), ("rename", 0)])
def test_errors_of_the_system_leave_the_old_checkpoints(damaged, monkeypatch, name, fail_at, code) -> None:
    real, calls = getattr(os, name), iter(range(100))

    def broken(*args):
        if next(calls) == fail_at:
            raise OSError(code, os.strerror(code))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, broken)
        with pytest.raises(InvalidData, match=os.strerror(code)):
            damaged.run.save({"step": 3})
    assert [path.name for path in sorted(damaged.last.parent.iterdir())] == ["00000001", "00000002"]
    assert not damaged.refused()
    damaged.run.save({"step": 3})
    assert damaged.run.load() == {"step": 3}


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # interrupted while closing it
def test_interrupts_on_every_line(tmp_path) -> None:
    """A KeyboardInterrupt before each line that a save runs, one at a time."""
    old, new = {"step": 0}, {"step": 1, "weight": torch.ones(2)}
    found = []
    gc.collect()  # folders of other tests are closed in the same module
    with RunFolder(tmp_path) as run:
        for interrupt_at in range(1000):
            run.save(old)  # also takes away what the interrupted one has left
            assert len(list((tmp_path / "checkpoints").iterdir())) <= 2
            if not interrupted(interrupt_at, run.save, new):
                break
            state = run.load()
            assert state == old or same(state, new)
            found.append(state == old)
    assert found.count(True) > 50
    assert found.count(False) > 5
    assert found == sorted(found, reverse=True)


def interrupted(line: int, action, *args) -> bool:
    """Run it with an interrupt before that line of the modules that write; False if it has fewer lines to run."""
    lines = iter(range(10**6))

    def trace(frame, event, _):
        if frame.f_code.co_filename not in (checkpoint.__file__, files.__file__):
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action(*args)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_paths_that_are_files(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidData):
        RunFolder(tmp_path / "file")
    with pytest.raises(InvalidData):
        RunFolder(tmp_path / "file" / "run")
    with RunFolder(tmp_path / "run") as run:
        (tmp_path / "run" / "checkpoints").touch()
        with pytest.raises(InvalidData):
            run.save({})
