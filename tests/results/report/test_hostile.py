"""Folders that somebody else has filled: their text is shown as it is, and what cannot be shown is refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from looking import open_report

from secateur.errors import InvalidData
from secateur.files import LARGEST, LARGEST_LINES
from secateur.results.report import write_report

SCRIPT = "</script><script>document.title = 'taken'</script>"
IMAGE = "<img src=http://evil.example/x onerror=alert(1)>"
LINK = "<a href='http://evil.example/'>%{x}</a>&amp;{{ 7 * 7 }}"


def change(path: Path, edit: Callable[[Any], object]) -> None:
    """A file of JSON, or of one per line."""
    text = path.read_text()
    if path.suffix == ".json":
        data = json.loads(text)
        edit(data)
        path.write_text(json.dumps(data))
    else:
        events = [json.loads(line) for line in text.splitlines()]
        edit(events)
        path.write_text("".join(json.dumps(event) + "\n" for event in events))


def poison(config: dict[str, Any]) -> None:
    config["settings"] |= {"score": SCRIPT, IMAGE: IMAGE, "at_least": {SCRIPT: 1}}
    config["order"] = {"recipe": IMAGE}
    config["network"] = {"name": SCRIPT, "options": {LINK: LINK}}
    config["layers"][0] = [LINK, config["layers"][0][1], {SCRIPT: 1}]
    config["layers"][1][0] = "\ud800\u202e" + "x" * 5000


def poison_events(events: list[dict[str, Any]]) -> None:
    for event in events:
        event["metrics"] = {SCRIPT: 90.0, IMAGE: float("nan"), LINK: float("inf"), "text": "x", "huge": 10**400}
        if event["event"] == "Tick":
            event["removed"] = {SCRIPT: 2}
            event["scores"][0] = float("nan") if event["number"] == 1 else 0.0
            event["loss"] = float("-inf")


def test_text_from_files_is_only_text(browser: Any, copied: Path, tmp_path: Path) -> None:
    shutil.rmtree(copied / "result")
    named = copied.rename(tmp_path / "<b>run<script>")
    change(named / "config.json", poison)
    change(named / "events.jsonl", poison_events)
    view = open_report(browser, tmp_path, named)
    page = view.page
    assert page.title() == "<b>run<script> \N{EN DASH} Secateur report"
    assert page.locator("h1").inner_text() == "<b>run<script>"
    assert page.locator("script").count() == 3
    assert page.locator("main img, main a, b").count() == 0
    assert view.said == []
    assert len(view.requests) == 1
    # The words are there, letter by letter: in headings, settings, axes, legends and labels.
    assert page.locator("#title-metric-0").inner_text() == SCRIPT
    assert SCRIPT in page.locator("#settings").inner_text()
    assert LINK in page.locator("#settings").inner_text()
    assert page.locator("#channels-0 .xtick text").first.text_content() == f"…{LINK[-19:]}"
    assert LINK in view.hover("channels-0", 0.25)
    assert SCRIPT in view.hover("metric-0", 0.5)
    assert page.locator("#metric-0 .legendtext").first.text_content() == SCRIPT
    # What is no number is a gap.
    assert view.chart("loss")[0]["y"][1] is None
    assert view.table("loss")[2][1] == "-"
    assert len(view.chart("scores-0")[0]["x"]) == len(view.table("removals-0")) - 2
    longest = max(len(word) for row in view.table("channels-0") for word in row)
    assert longest == 81


def set_value(*keys: Any, value: Any) -> Callable[[Any], None]:
    """An edit of one value, which is found by keys."""

    def edit(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return edit


REFUSED = {
    "settings that are none": ("result/summary.json", set_value("settings", value=[1]), "1"),
    "layers that are none": ("config.json", set_value("layers", value=[[1]]), "ValueError"),
    "layers of no size": ("config.json", set_value("layers", 0, 1, value=-1), "ValueError"),
    "layers with groups that are none": ("config.json", set_value("layers", 0, 2, value="x"), "AttributeError"),
    "layers without end": ("config.json", set_value("layers", 0, 1, value=2**40), "1099511627776"),
    "layers without a name": ("config.json", set_value("layers", 0, 0, value=[]), "name"),
    "an order that is none": ("config.json", set_value("order", value="x"), "x"),
    "an event that is none": ("events.jsonl", set_value(1, value=[1]), "list"),
    "an unknown event": ("events.jsonl", set_value(1, "event", value=["Tick"]), "Tick"),
    "metrics that are none": ("events.jsonl", set_value(1, "metrics", value=[1]), "1"),
    "scores that are none": ("events.jsonl", set_value(1, "scores", value="x"), "x"),
    "removals that are no counts": ("events.jsonl", set_value(1, "removed", value={"0": "x"}), "x"),
    "removals below nothing": ("events.jsonl", set_value(2, "removed", value={"no": -1}), "-1"),
    "a verification that is none": ("result/summary.json", set_value("verification", value="x"), "x"),
    "a cost that is none": ("result/summary.json", set_value("before", value=7), "7"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused(case: str, copied: Path, tmp_path: Path) -> None:
    name, edit, got = REFUSED[case]
    change(copied / name, edit)
    check_refused(copied, tmp_path, "", got)


def check_refused(folder: Path, target: Path, name: str, got: str = "") -> None:
    with pytest.raises(InvalidData) as caught:
        write_report([folder], target / "page.html")
    assert str(folder / name) in caught.value.what
    assert got in str(caught.value.got)
    assert "\n" not in str(caught.value)
    assert not (target / "page.html").exists()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b"\xff\xfe"),
        ("config.json", b"[" * 100_000),
        ("events.jsonl", b"not json\n"),
        ("events.jsonl", b'{"event": ' + b"9" * 5000 + b"}\n"),
        ("result/summary.json", b'{"settings": {'),
        ("result/pictures.png", b"<svg onload=alert(1)>"),
        *((name, None) for name in ("config.json", "events.jsonl", "result/summary.json", "result/pictures.png")),
    ],
)
def test_damaged_and_huge_files_are_refused(name: str, data: bytes | None, copied: Path, tmp_path: Path) -> None:
    most = LARGEST_LINES if name == "events.jsonl" else LARGEST
    with (copied / name).open("wb") as file:
        file.truncate(most + 1) if data is None else file.write(data)
    check_refused(copied, tmp_path, name, f"{most + 1:,} bytes" if data is None else "")


def test_a_pipe_is_not_waited_for(copied: Path, tmp_path: Path) -> None:
    (copied / "events.jsonl").unlink()
    os.mkfifo(copied / "events.jsonl")
    check_refused(copied, tmp_path, "events.jsonl")
