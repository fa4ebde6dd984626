"""Runs on disk: what is written comes back."""

import errno
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved import same
from torch import nn

from secateur.errors import InvalidData, InvalidSetting, RunInUse
from secateur.training.checkpoint import RunFolder, as_it_was

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16]
DTYPES += [torch.int32, torch.int64, torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn]


@pytest.fixture(scope="module", autouse=True)
def unsynced() -> Iterator[None]:
    """Do not wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


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


@settings(max_examples=40, deadline=None)
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
    with RunFolder(tmp_path) as run, pytest.raises(InvalidSetting) as caught:
        run.save({"a": [0, value]})
    assert "['a'][1]" in caught.value.what
    assert not (tmp_path / "checkpoints").exists()


# Configuration and events


def test_config(tmp_path) -> None:
    with RunFolder(tmp_path / "new" / "run") as run:
        with pytest.raises(InvalidData):
            run.read_config()
        run.write_config({"seed": 1})
        run.write_config({"seed": 3, "keep": [0.5]})
        assert run.read_config() == {"seed": 3, "keep": [0.5]}
        path = run.path / "config.json"
        assert json.loads(path.read_text()) == {"format": "secateur-run", "version": 1, "seed": 3, "keep": [0.5]}
        wrong = [b"", b"[]", b"{", b"\xff", b"[" * 10**5, b'{"format": "x", "version": 1}']
        for text in [*wrong, b'{"format": "secateur-run", "version": 2}']:
            path.write_bytes(text)
            with pytest.raises(InvalidData) as caught:
                run.read_config()
            assert str(path) in caught.value.what


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
        assert run.read_events() == [{"step": 1, "loss": None}, {"text": "ä\n"}, {"step": 4}]
    path.write_bytes(b"{}\n{]\n")
    with RunFolder(tmp_path) as run, pytest.raises(InvalidData, match="line 2"):
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


def test_a_start_that_fails_leaves_the_folder_as_it_was(tmp_path) -> None:
    folder = tmp_path / "new" / "run"

    def fail(begin: bool = False) -> None:
        with suppress(KeyboardInterrupt), as_it_was(folder, "mine"), RunFolder(folder) as run:
            run.write("mine", "new")
            if begin:
                run.write_config({})
            raise KeyboardInterrupt

    fail()
    assert list(tmp_path.iterdir()) == []
    folder.mkdir(parents=True)
    (folder / "mine").write_text("there before")
    fail()
    assert [path.name for path in folder.iterdir()] == ["mine"]
    fail(begin=True)
    assert {path.name for path in folder.iterdir()} == {".lock", "events.jsonl", "mine", "config.json"}


def test_the_lock_names_the_process_for_as_long_as_the_run_is_open(tmp_path) -> None:
    lock = tmp_path / "run" / ".lock"
    with RunFolder(tmp_path / "run"):
        assert lock.read_text() == str(os.getpid())
        with pytest.raises(RunInUse):
            RunFolder(tmp_path / "run")
        assert lock.read_text() == str(os.getpid())
    assert lock.read_text() == ""


def test_a_start_in_a_folder_that_another_process_has_just_taken_leaves_it_its_files(tmp_path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RunInUse), as_it_was(folder), RunFolder(folder), RunFolder(folder):
        pass
    assert {path.name for path in folder.iterdir()} == {".lock", "events.jsonl"}


def test_windows_locks_a_byte_behind_the_process_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for msvcrt, which fails as the real one does."""
    taken: list[int] = []

    def locking(handle: int, mode: int, count: int) -> None:
        assert (mode, count) == (2, 1)
        place = os.lseek(handle, 0, os.SEEK_CUR)
        if place in taken:
            raise PermissionError(errno.EACCES, "Permission denied")
        taken.append(place)

    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
    for name in ("pread", "pwrite"):
        monkeypatch.delattr(os, name)
    with RunFolder(tmp_path):
        (place,) = taken
        assert (tmp_path / ".lock").read_bytes() == str(os.getpid()).encode()
        assert place > 20
        with pytest.raises(RunInUse, match=f"process {os.getpid()}"):
            RunFolder(tmp_path)
    monkeypatch.delitem(sys.modules, "msvcrt")
    with pytest.raises(InvalidSetting, match="file locks"):
        RunFolder(tmp_path)


@pytest.mark.parametrize("another", [False, True])
def test_nothing_is_written_where_the_folder_was_removed_or_holds_another_run(another: bool, tmp_path) -> None:
    folder = tmp_path / "run"
    with RunFolder(folder) as run:
        run.save({"step": 1})
        folder.rename(tmp_path / "moved")
        with RunFolder(folder) if another else nullcontext():
            before = sorted(tmp_path.rglob("*"))
            for write in (lambda: run.save({"step": 2}), lambda: run.write("more.json", "{}")):
                with pytest.raises(InvalidData, match="was removed or moved") as caught:
                    write()
                assert str(folder) in caught.value.what
            assert sorted(tmp_path.rglob("*")) == before
        run.append_event({"step": 2})  # into the folder that was moved
    assert (tmp_path / "moved" / "events.jsonl").read_text() == '{"step": 2}\n'
