"""`secateur report` as a user meets it."""

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

from secateur import cli
from secateur.results.report import page


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The command in this process: exit status, stdout and stderr."""
    status = 0
    try:
        cli.main(["report", *map(str, arguments)])
    except SystemExit as stop:
        status = int(stop.code or 0)
    return status, *capsys.readouterr()


def test_a_page_in_one_file(capsys: pytest.CaptureFixture[str], runs: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "new" / "page.html"
    assert call(capsys, runs["taylor"], runs["slim"], "-o", target) == (0, f"{target}\n", "")
    written = target.read_text()
    assert written.startswith("<!doctype html>")
    assert 4_000_000 < len(written) < 5_500_000
    assert "taylor, slim" in written


def test_torch_is_not_needed(runs: dict[str, Path], tmp_path: Path) -> None:
    """Nor waited for: importing it takes longer than all of the page."""
    code = "import sys; from secateur.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    arguments = ["report", str(runs["taylor"]), "-o", str(tmp_path / "page.html")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    assert (tmp_path / "page.html").is_file()


def test_json_tells_where_it_is(
    capsys: pytest.CaptureFixture[str], runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = call(capsys, runs["slim"], "--json")
    assert (status, json.loads(out), err) == (0, {"page": "report.html"}, "")
    assert (tmp_path / "report.html").is_file()


def test_help_teaches_report(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = call(capsys, "--help")
    assert status == 0
    assert "secateur report runs/tick-only runs/tick-tock -o compared.html" in text
    for flag in ("RUNS", "--out", "-o", "--live", "--port", "--json"):
        assert flag in text


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, runs: dict[str, Path]) -> None:
    for arguments in ([tmp_path], []):
        status, out, err = call(capsys, *arguments)
        assert (status, out, len(err.splitlines())) == (2, "", 1)
        assert err.startswith("secateur: ")
    (tmp_path / "config.json").write_text("{")
    status, out, err = call(capsys, runs["slim"], tmp_path)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"secateur: {tmp_path / 'config.json'} cannot be read: ")


@pytest.mark.parametrize("package", ["jinja2", "plotly.offline"])
def test_a_missing_package_is_one_line(
    package: str, capsys: pytest.CaptureFixture[str], runs: dict[str, Path], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    page._environment.cache_clear()
    status, out, err = call(capsys, runs["slim"], "-o", tmp_path / "page.html")
    assert (status, out) == (2, "")
    assert err == f'secateur: {package} is not installed. Run: pip install "secateur[report]"\n'


def test_the_files_of_the_page_come_with_the_package() -> None:
    names = {path.name for path in resources.files("secateur.results.report").iterdir()}
    assert {"page.html", "body.html", "page.css", "page.js"} <= names
