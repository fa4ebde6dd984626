"""Every flag of every command with values that make no sense: a message and a status come, never a traceback."""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from secateur.cli.command import commands

Call = Callable[..., tuple[int, str, str]]
ON = ["--device", "cpu", "--quiet"]
USUAL: dict[str, list[str]] = {
    "analyze": ["resnet20", "--no-probe"],
    "recipes": [],
    "train": ["tiny_job:build", "--epochs", "0", *ON, "--out", "OUT"],
    "prune": ["tiny_job:build", "--keep-macs", "0.9", "--finetune-epochs", "0", *ON, "--out", "OUT"],
    "continue": ["RUN", "--keep-macs", "0.3", *ON, "--out", "OUT"],
    "resume": ["RUN", *ON],
    "repair": ["RUN", *ON, "--out", "OUT"],
    "evaluate": ["tiny_job:build", "--weights", "RUN", "--device", "cpu"],
    "predict": ["RUN", "FILE"],
    "structure": ["RUN"],
    "report": ["RUN", "--out", "OUT"],
    "export": ["RUN", "--build", "tiny_job:build", "--state-dict", "OUT.safetensors"],
    "bench": ["RUN", "--build", "tiny_job:build", "--repetitions", "2"],
    "reproduce": ["table1", "--out", "OUT"],
}
"""Commands that work, or are refused in a line; `demo` has no flags of its own but a folder, a share and a seed."""
WRONG = ["", "x", "-1", "nan", "1e400", "0", "9" * 20, "FILE", "FOLDER", "NOWHERE", "RUN"]
SECONDS = 20
LONG = {"--help", "--live", "--port", "--debug"}
"""Flags that serve pages until they are stopped, or ask for what must not come."""


class TooLong(BaseException):
    """A value was taken that makes sense, and much is done."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("places")
    (folder / "file").write_text("text")
    (folder / "folder").mkdir()
    names = {"FILE": "file", "FOLDER": "folder", "NOWHERE": "nowhere", "RUN": "run", "OUT": "out"}
    return {name: str(folder / below) for name, below in names.items()}


def test_all_commands_are_here() -> None:
    assert {*USUAL, "demo"} == set(commands())


@pytest.mark.slow
@pytest.mark.parametrize("name", USUAL)
def test_every_flag_with_values_that_make_no_sense(
    name: str, places: dict[str, str], secateur: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a value that makes no sense may be the name of a folder
    if "RUN" in USUAL[name] and not Path(places["RUN"]).exists():
        short = ["--keep-macs", "0.6", "--tick-removes", "0.2", "--tock-every", "0", "--finetune-epochs", "1"]
        assert secateur("prune", "tiny_job:build", *short, *ON, "--out", places["RUN"])[0] == 0

    def placed(words: list[str]) -> list[str]:
        for place, path in places.items():
            words = [re.sub(rf"^{place}\b", path, word) for word in words]
        return words

    _, shown, _ = secateur(name, "--help")
    flags = sorted(set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]*)", shown)) - LONG)
    usual = USUAL[name]
    cases = [[*usual, flag, *value] for flag in flags for value in ([], *([wrong] for wrong in WRONG))]
    cases += [[wrong, *usual[1:]] for wrong in WRONG if usual and not usual[0].startswith("-")]
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for case in cases:
            signal.alarm(SECONDS)
            try:
                status, _, err = secateur(*placed(case))
            except TooLong:
                continue
            finally:
                signal.alarm(0)
            said = [line for line in err.splitlines() if line.startswith("secateur: ")]
            assert status in (0, 2), (case, err)
            assert status == 0 or len(said) == 1 or "--help" in err, (case, err)  # of flags, the parser shows the help
    finally:
        signal.signal(signal.SIGALRM, before)


DAMAGED = {
    "empty": b"",
    "bytes": bytes(range(256)) * 9,
    "text.json": b"{}",
    "bytes.pth": b"PK" + bytes(99),
    "folder": None,
}
"""Files by name; None is a folder."""
HERE = ["--device", "cpu", "--quiet", "--out", "out"]
MISTAKES = [
    *(["bench", "resnet20", "--device", name] for name in ("meta", "mps", "cpu:x", "9" * 99)),
    *(["bench", "resnet20", "--batch", count] for count in ("0", "-1", "9" * 20, "1e400")),
    *(["bench", "resnet20", "--repetitions", count] for count in ("1", "nan", "9" * 20)),
    *(["bench", "resnet20", "--runner", "onnxruntime", "--precision", number] for number in ("bf16", "fp16", "x")),
    *(["prune", "tiny_job:choosing", "--target-accuracy", share, *HERE] for share in ("nan", "inf", "-inf", "x")),
    ["prune", "tiny_job:choosing", "--target-accuracy", "50", "--keep-macs", "0.5", *HERE],
    ["prune", "tiny_job:build", "--target-accuracy", "50", *HERE],
    *(["demo", "--keep-macs", share] for share in ("0", "nan", "inf", "1.5", "-1")),
    *(["predict", "nowhere", "x.jpg", "--top", count] for count in ("0", "-1", "x")),
    *(
        ["export", "resnet20", "--int8", *flags]
        for flags in ([], ["--pt2", "x"], ["--onnx", "x", "--input", "1x3x8x8"])
    ),
    *(["export", "resnet20", "--pt2", "x", "--input", shape] for shape in ("1x3", "0x3x8x8", "1x1x8x8", "nan")),
    ["report", "nowhere", "--live", "--port", "99999"],
    *(["reproduce", "table1", "--only", "none", flag, "nan"] for flag in ("--epochs-scale", "--seed", "--recipe")),
    *([*words, name] for words in (["structure"], ["report"], ["resume"], ["bench"]) for name in DAMAGED),
    *(["predict", name, "x.jpg"] for name in DAMAGED),
    *(["repair", "tiny_job:build", "--out", "out", "--plan", name] for name in DAMAGED),
    *(["evaluate", "tiny_job:build", "--device", "cpu", "--weights", name] for name in DAMAGED),
    *(["export", "--state-dict", "x.safetensors", f"resnet20={name}"] for name in DAMAGED),
    *(["evaluate", "resnet20@cifar10", "--weights", "empty", "--data", name] for name in DAMAGED),
]


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistake_ends_with_one_line(
    words: list[str], secateur: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data in DAMAGED.items():
        (tmp_path / name).mkdir() if data is None else (tmp_path / name).write_bytes(data)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    status, out, err = secateur(*words)
    assert (status, out) == (2, "")
    said = [line for line in err.splitlines() if line.startswith("secateur: ")]
    assert len(said) == 1 or "--help" in err
    assert all(len(line) < 600 for line in said)
    assert sorted(tmp_path.rglob("*")) == before


def stop(number: int, frame: Any) -> None:
    raise TooLong
