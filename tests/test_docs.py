"""The documentation is correct: Python blocks run, commands work, and the reference is complete.

The blocks of a page run in order, in one namespace and one folder, for a reader who has done the tutorial. A fenced
`text` block with the title "Output" must be exactly what the block before it prints. Below `<!-- not run: WHY -->`, in
indented blocks and in text, commands are only parsed: they need data or hardware that is missing here, or take too
long. Files that a page shows are blocks of another kind, `{.python}`, and have tests of their own.

Pages train for minutes. Here `miniature` makes every epoch and every evaluation a few examples long, networks are timed
a few times only, and torchvision's ResNet-18 is narrow; the number of epochs, the budgets and everything else are those
of the page.
"""

from __future__ import annotations

import doctest
import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest
import torch
import torchvision
from exporting import one_table  # noqa: F401
from once import made_once
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

import secateur
from secateur import timing
from secateur.cli import main
from secateur.cli.command import _parse, commands
from secateur.data.catalog import DATASETS
from secateur.nested import map_tensors
from secateur.pruning import least_squares, measure, repair, scores
from secateur.results import bench
from secateur.training import task
from secateur.training.loop import Trainer

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OWN_MODEL = ROOT / "examples" / "own_model"
TUTORIAL = "docs/tutorial.md"
BEGINNING = (["secateur", "train"], ["secateur", "prune"])
"""The tutorial's commands whose runs other pages need too."""
EXAMPLES = 2
"""Examples in an epoch, and in an evaluation."""
TIMES = 3
"""How often a network is timed at most."""
README_LINES = 120

FENCE = re.compile(
    r"^(?P<not_run> *<!-- not run: [^\n]+ -->\n)?"
    r"(?P<indent> *)```(?P<kind>\w+)(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)```$",
    flags=re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    body: str
    line: int
    runs: bool
    is_output: bool

    @property
    def uses_runs(self) -> bool:
        """Whether it opens a run of the tutorial."""
        return self.runs and bool(re.search(r"runs/(digits|baseline)\b", self.body))

    @property
    def commands(self) -> list[list[str]]:
        """The command lines of a shell block, split into words."""
        if self.kind != "shell":
            return []
        lines = self.body.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            kind=found["kind"],
            body=dedent(found["body"]),
            line=text[: found.start("body")].count("\n") + 1,
            runs=found["not_run"] is None,
            is_output='title="Output"' in found["info"],
        )
        for found in FENCE.finditer(text)
    ]


PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), OWN_MODEL / "README.md"]
BLOCKS = {str(page.relative_to(ROOT)): blocks_of(page) for page in PAGES if page.exists()}
RUN = [page for page, blocks in BLOCKS.items() if any(block.kind in ("python", "shell") for block in blocks)]
LONG = ("docs/howto/repair.md", "docs/howto/criteria.md", "docs/howto/quantize.md", "examples/own_model/README.md")
"""Pages that take too long for every day. Then their commands are only parsed."""


class Narrow(ResNet):
    def _make_layer(self, block: type[BasicBlock], planes: int, *rest: Any, **options: Any) -> nn.Sequential:
        return super()._make_layer(block, planes // 8, *rest, **options)


def narrow_resnet18(num_classes: int) -> nn.Module:
    network = Narrow(BasicBlock, [2, 2, 2, 2])
    network.fc = nn.Linear(512 // 8, num_classes)
    return network


@pytest.fixture(scope="module")
def miniature() -> Iterable[None]:
    """An epoch, and an evaluation, has a few examples of the first batch; repair takes few samples and one strength."""
    epoch, prefetch, timed = Trainer.epoch, task.prefetch, timing.time_in_turn

    def few(batches: Iterable[Any]) -> list[Any]:
        return [map_tensors(next(iter(batches)), lambda tensor: tensor[:EXAMPLES])]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "epoch", lambda self, batches, *rest: epoch(self, few(batches), *rest))
        patch.setattr(least_squares, "RIDGES", [least_squares.RIDGE])
        patch.setattr(repair, "SAMPLES", 1000)
        patch.setattr(task, "prefetch", lambda batches, device: few(prefetch(batches, device)))
        patch.setattr(torchvision.models, "resnet18", narrow_resnet18)
        for module in (measure, bench):
            patch.setattr(
                module, "time_in_turn", lambda calls, device, times, *rest: timed(calls, device, TIMES, *rest)
            )
        yield


@pytest.fixture(scope="module")
def runs(miniature: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of the tutorial, which other pages use."""

    def make(folder: Path) -> None:
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "path", [*sys.path])
            for block in BLOCKS[TUTORIAL]:
                for words in block.commands:
                    if words[:2] in BEGINNING:
                        main(words[1:])

    return made_once(tmp_path_factory, "tutorial", make) / "runs"


@pytest.fixture
def reader(
    page: str, miniature: None, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterable[None]:
    """A folder with the examples, and with the tutorial's runs if the page uses them; leaves nothing behind."""
    own_model = tmp_path / "examples" / "own_model"
    shutil.copytree(OWN_MODEL, own_model, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    example = page.startswith("examples")
    if page == TUTORIAL or (not example and any(block.uses_runs for block in BLOCKS[page])):
        shutil.copytree(request.getfixturevalue("runs"), tmp_path / "runs")
    monkeypatch.chdir(own_model if example else tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(scores, "SCORES", dict(scores.SCORES))
    before = set(sys.modules)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", [pytest.param(p, marks=pytest.mark.slow if p in LONG else ()) for p in RUN])
def test_page(page: str, reader: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for block in BLOCKS[page]:
        if block.is_output:
            assert printed.strip() == block.body.strip(), f"{page}:{block.line}"
        elif block.kind == "python":
            assert block.runs
            exec(compile("\n" * block.line + block.body, str(ROOT / page), "exec"), namespace)
            printed = capsys.readouterr().out
        for words in block.commands:
            if page == TUTORIAL and words[:2] in BEGINNING:
                continue  # done by `runs`
            run_command(words, block.runs, monkeypatch)
            printed = capsys.readouterr().out


@pytest.mark.parametrize("page", LONG)
def test_commands_of_long_pages_can_be_parsed(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in BLOCKS[page]:
        for words in block.commands:
            run_command(words, False, monkeypatch)


def run_command(words: list[str], runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command of Secateur in this process; other commands are skipped."""
    if words[0] == "cd":
        monkeypatch.chdir(words[1])
    elif words[0] == "secateur" and runs:
        main(words[1:])
    elif "secateur" in words:
        _parse(words[words.index("secateur") + 1 :])


def commands_in_text(page: Path) -> list[str]:
    """Commands outside of fenced blocks: in indented lines, and between backticks."""
    text = FENCE.sub("", page.read_text())
    indented = re.findall(r"^    ((?:torchrun .* -m )?secateur .*)$", text, flags=re.MULTILINE)
    quoted = [" ".join(found.split()) for found in re.findall(r"`(secateur [a-z]+ [^`]+)`", text)]
    return [command for command in (*indented, *quoted) if not re.search(r"\.\.\.|--help|\b[A-Z]{3,}\b", command)]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_in_text(page)], ids=lambda page: page.name)
def test_commands_in_text_can_be_parsed(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands_in_text(page):
        words = shlex.split(command, comments=True)
        try:
            _parse(words[words.index("secateur") + 1 :])
        except SystemExit:
            pytest.fail(f"{command}: {capsys.readouterr().err}")


def test_files_that_pages_include_stand_alone_on_their_lines() -> None:
    """Elsewhere the name of the file is shown as text."""
    for page in PAGES:
        for line in page.read_text().splitlines():
            assert "--8<--" not in line or re.fullmatch(r' *--8<-- "[^"]+"', line), page


def test_blocks_are_found() -> None:
    """A fence that the pattern above does not match would be skipped."""
    for page in PAGES:
        opened = re.findall(r"^ *```(?:python|shell)", page.read_text(), flags=re.MULTILINE)
        assert len(opened) == sum(block.kind in ("python", "shell") for block in blocks_of(page)), page


def test_every_public_name_has_one_entry() -> None:
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    assert sorted(re.findall(r"^::: secateur\.(\w+)$", text, flags=re.MULTILINE)) == sorted(secateur.__all__)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_the_readme_uses_public_names_only() -> None:
    code = "\n".join(block.body for block in BLOCKS["README.md"] if block.kind == "python")
    assert not re.findall(r"secateur\.(?:channels|pruning|training|data|models|runs|results|recipes|cli)\b", code)
    assert set(re.findall(r"secateur\.(\w+)", code)) <= set(secateur.__all__)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", DOCS / "architecture.md"])
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w/.-]+)`", text)
    links = re.findall(r"\]\(([\w/.-]+)[)#]", text)
    for path in [*(ROOT / name for name in named), *(page.parent / link for link in links)]:
        assert path.exists(), path


def load_module(name: str) -> ModuleType:
    """A file of the documentation's own code."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["hooks", "docstrings"])
def test_the_code_that_builds_the_site(name: str) -> None:
    assert doctest.testmod(load_module(name)).failed == 0


def test_every_command_is_in_the_reference() -> None:
    text = load_module("hooks").on_page_markdown((DOCS / "commands.md").read_text())
    for name in commands():
        assert f"[`{name}`](#secateur-{name})" in text
        assert f"## secateur {name}\n\n```text\nusage: secateur {name} " in text
    assert not set("╭╮╰╯│\x1b") & set(text)


def test_every_dataset_is_in_the_reference() -> None:
    text = load_module("hooks").on_page_markdown((DOCS / "howto" / "datasets.md").read_text())
    for name, dataset in DATASETS.items():
        assert f"`NETWORK@{name}`" in text
        if dataset.folder:
            _, _, tree = dataset.describe().partition("looks like this:\n")
            assert dedent(tree) in text
