"""Runs on disk: what is written comes back, and damage is found, said and survived."""

import errno
import hashlib
import json
import math
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from secateur.errors import DamagedRun, InvalidSetting, RunInUse
from secateur.training import checkpoint
from secateur.training.checkpoint import RunFolder, seal, unseal

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16]
DTYPES += [torch.int32, torch.int64, torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn]


def same(left, right) -> bool:
    """Equal down to the types and the bits."""
    if isinstance(left, torch.Tensor):
        if (left.dtype, left.shape, left.stride()) != (right.dtype, right.shape, right.stride()):
            return False
        return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)))
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)


def there_and_back(state: dict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        with RunFolder(folder) as run:
            run.save(state)
        with RunFolder(folder) as run:
            loaded = run.load()
    assert loaded is not None
    return loaded


def random_tensor(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, (math.prod(shape),), dtype=torch.uint8).view(dtype).reshape(shape)
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


tensors = st.builds(random_tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=5))
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), tensors)
nested = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.text(), nested, max_size=4))
def test_any_state_comes_back_to_the_bit(state) -> None:
    assert same(there_and_back(state), state)


def test_numbers_keep_their_kind() -> None:
    state = {"int": 1, "float": 1.0, "zero": -0.0, "inf": [math.inf, -math.inf, math.nan], "big": 2**70, "yes": True}
    state |= {"dict": {}, "tensor": "text", "float ": {"dict": {"tensor": {"float": "nan"}}}, "__metadata__": [], "": 0}
    assert same(there_and_back(state), state)
    assert same(there_and_back({"a": (1, (2.0,))}), {"a": [1, [2.0]]})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [[], [0], [2, 0, 3], [3, 2]], ids=str)
def test_tensors_of_every_type(dtype, shape) -> None:
    state = {"__metadata__": random_tensor(dtype, shape)}
    assert same(there_and_back(state), state)


def test_tied_tensors_come_back_as_one() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    state = {"a": weight, "b": [weight.data, weight.detach()[:]], "copy": weight.detach().clone()}
    state |= {"row": weight.data[0], "turned": weight.data.t(), "bits": weight.data.view(torch.int32)}
    state |= {"empty": torch.empty(0), "other": torch.empty(0)}
    back = there_and_back(state)
    assert back["a"] is back["b"][0] is back["b"][1]
    assert len({id(back[name]) for name in ("a", "copy", "row", "turned", "bits", "empty", "other")}) == 7
    for name in ("a", "copy", "row", "turned", "bits"):
        assert torch.equal(back[name], state[name].detach())
    assert not back["a"].requires_grad


def test_conjugate_views_are_what_they_show() -> None:
    base = torch.randn(4, dtype=torch.complex64)
    back = there_and_back({"base": base, "conj": base.conj(), "negative": base.conj().imag})
    assert torch.equal(back["conj"], base.conj().resolve_conj())
    assert torch.equal(back["base"], base)
    assert torch.equal(back["negative"], -base.imag)


@pytest.mark.parametrize("shape", [(4, 3, 5, 5), (4, 3, 1, 1), (4, 1, 3, 3), (1, 1, 1, 1), (0, 3, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
def test_memory_formats_come_back(shape, dtype) -> None:
    plain = torch.randn(shape).to(dtype)
    last = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last).copy_(plain)
    deep = torch.empty((*shape, 2), dtype=dtype, memory_format=torch.channels_last_3d).fill_(2)
    state = {"plain": plain, "last": last, "deep": deep, "plain deep": torch.ones(*shape, 2)}
    assert same(there_and_back(state), state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_come_back_on_the_cpu() -> None:
    tensor = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    on_gpu = tensor.cuda()
    back = there_and_back({"a": on_gpu, "b": on_gpu})
    assert same(back["a"], tensor)
    assert back["a"] is back["b"]


@pytest.mark.parametrize("value", [{1: 2}, object(), {1}, torch.ones(2).to_sparse(), torch.ones(2, device="meta")])
def test_what_cannot_be_held_is_named(tmp_path, value) -> None:
    with RunFolder(tmp_path) as run, pytest.raises(InvalidSetting, match=r"state\['a'\]\[1\] (is|has) "):
        run.save({"a": [0, value]})
    assert not (tmp_path / "checkpoints").exists()


# Configuration and events


def test_config(tmp_path) -> None:
    with RunFolder(tmp_path / "new" / "run") as run:
        with pytest.raises(DamagedRun, match=r"config\.json"):
            run.read_config()
        run.write_config({"seed": 1})
        run.write_config({"seed": 3, "keep": [0.5]})
        assert run.read_config() == {"seed": 3, "keep": [0.5]}
        path = run.path / "config.json"
        assert json.loads(path.read_text()) == {"format": "secateur-run", "version": 1, "seed": 3, "keep": [0.5]}
        wrong = [b"", b"[]", b"{", b"\xff", b"[" * 10**5, b'{"format": "x", "version": 1}']
        for text in [*wrong, b'{"format": "secateur-run", "version": 2}']:
            path.write_bytes(text)
            with pytest.raises(DamagedRun, match=r"config\.json.*(restore|version 1; use the Secateur that wrote it)"):
                run.read_config()


def test_events_are_cut_back_to_the_checkpoint(tmp_path) -> None:
    with RunFolder(tmp_path) as run:
        run.append_event({"step": 0})
        assert run.load() is None
        assert run.read_events() == []
        run.append_event({"step": 1, "loss": math.inf})
        run.append_event({"text": "ä\n"})
        run.save({"step": 2})
        run.append_event({"step": 3})
        assert len(run.read_events()) == 3
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": ')
    with RunFolder(tmp_path) as run:
        assert len(run.read_events()) == 3
        assert run.load() == {"step": 2}
        run.append_event({"step": 4})
        assert run.read_events() == [{"step": 1, "loss": math.inf}, {"text": "ä\n"}, {"step": 4}]
    path.write_bytes(b"{}\n{]\n")
    with RunFolder(tmp_path) as run, pytest.raises(DamagedRun, match="line 2 of"):
        run.read_events()


def test_the_last_two_are_kept(tmp_path) -> None:
    stale = tmp_path / "checkpoints" / ".00000002"
    stale.mkdir(parents=True)
    (stale / "state.json").write_text("half")
    with RunFolder(tmp_path) as run:
        assert run.load() is None
        paths = [run.save({"step": step}) for step in range(5)]
        assert sorted((tmp_path / "checkpoints").iterdir()) == paths[-2:]
        assert paths[-1].name == "00000005"


# Damage


class Damaged:
    """A run with two checkpoints, to damage the last and see the first come back."""

    def __init__(self, path: Path) -> None:
        self.said: list[str] = []
        self.run = RunFolder(path, say=self.said.append)
        self.run.append_event({"step": 1})
        self.run.save({"step": 1})
        self.run.append_event({"step": 2})
        self.new = {"step": 2, "weight": torch.arange(3.0), "wide": torch.ones(1, 2, 2, 2)}
        self.last = self.run.save(self.new)
        self.events = (path / "events.jsonl").read_bytes()

    def refused(self, words: str = "") -> bool:
        """Load; whether the last was refused in these words. Then put everything back."""
        self.said.clear()
        state = self.run.load()
        if same(state, self.new):
            assert not self.said
            return False
        assert state == {"step": 1}
        assert self.run.read_events() == [{"step": 1}]
        assert len(self.said) == 1
        assert str(self.last) in self.said[0]
        assert words in self.said[0]
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
def test_every_flipped_byte_and_every_cut_is_refused(damaged, name) -> None:
    path = damaged.last / name
    good = path.read_bytes()
    dice = random.Random(0)
    for index, byte in enumerate(good):
        path.write_bytes(good[:index] + bytes([byte ^ 1 << dice.randrange(8)]) + good[index + 1 :])
        assert damaged.refused(f"{name} is not what was written"), index
    for length in range(0, len(good), 7):
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
    assert damaged.refused("recursion")


def test_lost_events_are_noticed(damaged) -> None:
    (damaged.run.path / "events.jsonl").write_bytes(damaged.events[:-1])
    assert damaged.refused("and now that has")


def test_going_on_after_damage(damaged) -> None:
    (damaged.last / "state.json").unlink()
    assert damaged.run.load() == {"step": 1}
    saved = damaged.run.save({"step": 3})
    assert damaged.run.load() == {"step": 3}
    assert sorted(path.name for path in saved.parent.iterdir()) == ["00000001", "00000002", "00000002.damaged"]


def test_no_whole_checkpoint(damaged) -> None:
    for path in damaged.last.parent.iterdir():
        (path / "state.safetensors").unlink()
    with pytest.raises(DamagedRun, match=r"00000002 is damaged.*00000001 is damaged.*none is whole: restore"):
        damaged.run.load()
    assert (damaged.run.path / "events.jsonl").read_bytes() == damaged.events


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
        with pytest.raises(DamagedRun, match=f"{os.strerror(code)}; make sure that .* disk has room"):
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
    """Run it with an interrupt before that line of checkpoint.py; False if it has fewer lines to run."""
    lines = iter(range(10**6))

    def trace(frame, event, _):
        if frame.f_code.co_filename != checkpoint.__file__:
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
    with pytest.raises(DamagedRun, match=r"cannot open the run in .*file"):
        RunFolder(tmp_path / "file")
    with pytest.raises(DamagedRun, match=r"cannot open the run in .*file/run"):
        RunFolder(tmp_path / "file" / "run")
    with RunFolder(tmp_path / "run") as run:
        (tmp_path / "run" / "checkpoints").touch()
        with pytest.raises(DamagedRun, match=r"cannot save a checkpoint of the run in .*run"):
            run.save({})


# Other processes


NURSERY = """
import json, os, resource, sys, time
import torch
from secateur.training.checkpoint import DamagedRun, RunFolder

def tell(*words):
    os.write(1, (json.dumps(words) + "\\n").encode())

def save(folder):
    run = RunFolder(folder)
    state = run.load() or {"step": 0}
    for step in range(state["step"] + 1, 10**6):
        run.append_event({"step": step})
        run.save({"step": step, "weights": [torch.full((100, n), float(step)) for n in range(60)]})
        tell("saved", step)

def hold(folder):
    run = RunFolder(folder)
    tell("held")
    time.sleep(60)

def worker(folder):
    run = RunFolder(folder)
    if pid := os.fork():
        tell("worker", pid)
    time.sleep(60)

def full(folder):
    run = RunFolder(folder)
    run.append_event({"step": 1})
    run.save({"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    for action in (lambda: run.save({"big": torch.ones(100_000)}), lambda: run.append_event({"big": "x" * 20_000})):
        try:
            action()
        except DamagedRun as error:
            tell(str(error), sorted(os.listdir(folder + "/checkpoints")))
    run.append_event({"step": 2})
    assert run.read_events() == [{"step": 1}, {"step": 2}]
    assert run.load() == {"step": 1}

torch.set_num_threads(1)
for line in sys.stdin:
    action, folder = json.loads(line)
    if pid := os.fork():
        tell("gone", os.waitpid(pid, 0)[1])
    else:
        try:
            tell("pid", os.getpid())
            globals()[action](folder)
            os._exit(0)
        finally:
            os._exit(1)
"""


class Nursery:
    """A process that has torch loaded and starts children, as many as we care to kill."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", NURSERY]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, action: str, folder: Path) -> int:
        assert self.process.stdin is not None
        print(json.dumps([action, str(folder)]), file=self.process.stdin, flush=True)
        word, pid = self.hear()
        assert word == "pid"
        return pid

    def hear(self) -> list:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def kill(self, pid: int) -> list[list]:
        """Kill a child; what it said since we last heard it."""
        os.kill(pid, signal.SIGKILL)
        heard = list(iter(self.hear, ["gone", signal.SIGKILL]))
        assert all(word == "saved" for word, _ in heard)
        return heard


@pytest.fixture(scope="module")
def nursery():
    made = Nursery()
    yield made
    made.process.communicate(timeout=10)
    assert made.process.returncode == 0


def test_killed_at_any_moment(tmp_path, nursery) -> None:
    dice, step = random.Random(0), 0
    for _ in range(25):
        pid = nursery.start("save", tmp_path)
        heard = [nursery.hear()]
        time.sleep(dice.uniform(0, 0.05))
        heard += nursery.kill(pid)
        assert [number for _, number in heard] == list(range(step + 1, step + 1 + len(heard)))
        told = heard[-1][1]
        with RunFolder(tmp_path) as run:
            state = run.load()
            assert state is not None
            step = state["step"]
            assert step in (told, told + 1)
            assert same(state["weights"], [torch.full((100, n), float(step)) for n in range(60)])
            assert run.read_events() == [{"step": number} for number in range(1, step + 1)]


def test_one_process_at_a_time(tmp_path, nursery) -> None:
    with RunFolder(tmp_path) as run:
        run.save({"step": 1})
        with pytest.raises(RunInUse, match=f"{tmp_path} is in use by process {os.getpid()}: wait"):
            RunFolder(tmp_path)
        assert run.load() == {"step": 1}
    pid = nursery.start("hold", tmp_path)
    assert nursery.hear() == ["held"]
    with pytest.raises(RunInUse, match=f"{tmp_path} is in use by process {pid}: wait"):
        RunFolder(tmp_path)
    nursery.kill(pid)
    RunFolder(tmp_path).close()


def test_workers_that_outlive_the_run_do_not_hold_it(tmp_path, nursery) -> None:
    pid = nursery.start("worker", tmp_path)
    _, worker = nursery.hear()
    try:
        nursery.kill(pid)
        os.kill(worker, 0)
        RunFolder(tmp_path).close()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, nursery) -> None:
    nursery.start("full", tmp_path)
    for action in ("save a checkpoint of", "write events.jsonl of"):
        message, left = nursery.hear()
        assert message.startswith(f"cannot {action} the run in {tmp_path}: ")
        assert "make sure that the folder can be written and the disk has room" in message
        assert left == ["00000001"]
    assert nursery.hear() == ["gone", 0]
