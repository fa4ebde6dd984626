"""What a run from Python says when it is stopped with Ctrl-C."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from killing import Fork, finish, has_saved, in_python
from small import prepared, quick


def test_ctrl_c_in_python_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = Fork(folder, [str(folder)], in_python)
    assert has_saved(process, folder)
    process.send_signal(signal.SIGINT)
    *_, name, last = finish(process)[2].splitlines()
    assert name == "KeyboardInterrupt"
    assert last == f"saved in {folder} up to the last checkpoint: the same call goes on from there"


@pytest.mark.parametrize("folder", [None, "run"])
def test_ctrl_c_in_python_says_nothing_where_nothing_is_saved(tmp_path: Path, folder: str | None) -> None:
    net, graph, task = prepared()
    interrupted = {"loss" if folder is None else "evaluate": lambda *given: signal.raise_signal(signal.SIGINT)}
    with pytest.raises(KeyboardInterrupt) as stop:
        quick()(net, graph, replace(task, **interrupted), folder=folder and tmp_path / folder)
    assert not hasattr(stop.value, "__notes__")
