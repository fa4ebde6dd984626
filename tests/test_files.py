"""Files that appear whole or not at all, and JSON that anybody may have written."""

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from secateur import files
from secateur.errors import InvalidData
from secateur.files import each_json_line, read_json, read_json_lines, to_json, write_atomic, write_tensors


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")

    def fail(target: Path) -> None:
        target.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "file", fail)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


@pytest.mark.parametrize("content", ["new", b"new", lambda target: target.write_text("new")])
def test_a_file_is_on_the_disk_before_it_has_its_name(content, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "made" / "file"
    synced = []

    def fsync(handle: int) -> None:
        is_folder = os.fstat(handle).st_ino == path.parent.stat().st_ino
        synced.append(("folder" if is_folder else os.fstat(handle).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomic(path, content)
    assert synced == [(3, False), ("folder", True)]
    assert path.read_text() == "new"
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_error_names_the_file_and_not_a_temporary_one(tmp_path: Path) -> None:
    (tmp_path / "folder" / "file").mkdir(parents=True)
    (tmp_path / "plain").touch()
    with pytest.raises(OSError, match="plain") as caught:
        write_atomic(tmp_path / "plain" / "file", "new")
    assert ".file" not in str(caught.value)
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "folder" / "file", "new")
    with pytest.raises(IsADirectoryError):
        write_atomic("", "new")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]


def test_tensors_may_share_memory(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    write_tensors(tmp_path / "file", {"a": whole, "b": whole[2:4], "c": whole.reshape(2, 3).T, "d": None})
    found = load_file(tmp_path / "file")
    assert found["b"].tolist() == [2, 3]
    assert torch.equal(found["c"], whole.reshape(2, 3).T)
    assert set(found) == {"a", "b", "c"}


@pytest.mark.parametrize("data", [None, b"", b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_json_that_cannot_be_read(data: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InvalidData) as caught:
        read_json(path)
    assert str(path) in caught.value.what
    path.write_bytes(b"3\n")
    with pytest.raises(InvalidData):
        read_json_lines(path)


def test_a_missing_file_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidData) as caught:
        read_json(tmp_path / "file.json")
    assert caught.value.got == os.strerror(errno.ENOENT)


@pytest.mark.parametrize(("read", "largest"), [(read_json, files.LARGEST), (read_json_lines, files.LARGEST_LINES)])
def test_a_huge_file_is_not_read(read: Callable[[Path], Any], largest: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(largest + 1)  # it takes no room
    with pytest.raises(InvalidData) as caught:
        read(path)
    assert f"{largest + 1:,} bytes" in str(caught.value.got)


def test_a_line_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text('{}\n{"loss": 1}\n{"loss"\n{}\n')
    count, events = each_json_line(path)
    assert (count, next(events), next(events)) == (4, {}, {"loss": 1})
    with pytest.raises(InvalidData) as caught:
        next(events)
    assert caught.value.what == f"line 3 of {path} cannot be read"


def test_half_a_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "events").write_text(f"{to_json({'loss': math.nan})}\n" + '{"loss')
    assert read_json_lines(tmp_path / "events") == [{"loss": None}]


@pytest.mark.parametrize("older", [{}, {"a": "old a", "b": "old b", "c": "old c"}, {"b": "old b"}])
def test_files_that_belong_together_are_put_in_place_all_or_none(
    older: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two files at least are moved aside or placed in turn, and the folder is synced.
    for call in range(4 + len(older)):
        folder = tmp_path / str(call)
        folder.mkdir()
        for name, content in older.items():
            (folder / name).write_text(content)
        with monkeypatch.context() as patch:
            fail_at(call, patch)
            with pytest.raises(OSError, match="broken"):
                files.write_together(folder, {"a": "1", "b": "2", "c": "3"})
        assert {path.name: path.read_text() for path in folder.iterdir()} == older
    files.write_together(folder, {"a": "1", "b": "2", "c": "3"})
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "1", "b": "2", "c": "3"}


def fail_at(call: int, patch: pytest.MonkeyPatch) -> None:
    """Let one of the calls fail that put files in place, once."""
    calls: list[str] = []

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def do(*given: Any) -> Any:
            calls.append(str(given[-1]))
            if len(calls) == call + 1:
                raise OSError(errno.EIO, "broken", str(given[-1]))
            return real(*given)

        return do

    real = files.write_atomic

    def written(path: Path, content: str) -> None:
        real(path, content)
        if path.name == "c":  # what follows puts them in place
            patch.setattr(Path, "replace", failing(Path.replace))
            patch.setattr(files, "sync_folder", failing(files.sync_folder))

    patch.setattr(files, "write_atomic", written)
