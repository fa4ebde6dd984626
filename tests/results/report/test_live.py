"""The report while a run goes on."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from looking import View

from secateur import cli
from secateur.results.report.live import Server


@pytest.fixture
def growing(copied: Path) -> tuple[Path, list[str]]:
    """A run that has just begun, and the events that are still to come."""
    lines = (copied / "events.jsonl").read_text().splitlines(keepends=True)
    (copied / "result").rename(copied / "later")
    (copied / "events.jsonl").write_text("".join(lines[:1]))
    return copied, lines[1:]


@pytest.fixture
def server(growing: tuple[Path, list[str]]) -> Iterator[Server]:
    with Server([growing[0]], 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def append(folder: Path, *lines: str) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(lines)


def test_the_page_follows_the_run(browser: Any, growing: tuple[Path, list[str]], server: Server) -> None:
    folder, lines = growing
    first = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text("")
    view = View(browser, server.address)
    page = view.page
    assert page.locator("#metric-0, #tradeoff-0").count() == 0
    append(folder, first)  # tells the metrics, whose charts the page does not have
    page.wait_for_selector("#metric-0 .main-svg")
    page.wait_for_selector("html[data-drawn]")
    assert page.locator("#status").inner_text() == "no result yet: Start, 100.0% of the MACs left"
    assert page.locator("#removals").is_hidden()
    append(folder, *lines[:3])
    view.until("document.getElementById('scores-0').data?.[0].x.length === 2")
    assert page.locator("#removals").is_visible()
    assert view.chart("removals-0")[0]["x"] == [1, 2]
    assert "Tock 1, epoch 1" in page.locator("#status").inner_text()
    assert len(view.table("metric-0")) == 5
    # What the reader has done stays: a table is open, a chart is zoomed, and nothing was loaded anew.
    page.evaluate("window.mark = 1")
    page.locator("#figure-loss summary").click()
    view.drag("metric-0", 0.3, 0.7)
    view.until("document.getElementById('loss').layout.xaxis.range[0] > 0.3")
    zoomed = view.ranges("metric-0", "loss")
    append(folder, *lines[3:], '{"event": "Fine')
    view.until(f"document.getElementById('cost').data[0].y.length === {len(lines) + 1}")
    assert view.ranges("metric-0", "loss") == zoomed
    assert page.locator("#table-loss").is_visible()
    assert len(view.table("loss")) == len(lines) + 2
    (folder / "later").rename(folder / "result")
    view.until("document.getElementById('status').textContent === 'finished'")
    assert page.evaluate("window.mark") == 1
    config = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(b"{")
    page.wait_for_selector("#trouble:visible")
    assert "cannot be read" in page.locator("#trouble").inner_text()
    (folder / "config.json").write_bytes(config)
    page.wait_for_selector("#trouble", state="hidden")
    assert view.said == []
    assert {request.removeprefix(server.address) for request in view.requests} == {"", "news"}
    page.close()


def test_it_says_about_when_the_run_ends_until_that_is_stopped(growing: tuple[Path, list[str]], server: Server) -> None:
    folder, lines = growing
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (folder / ".lock").write_text(str(process.pid))
        append(folder, lines[0])
        assert "of the MACs left, less than a minute to go</p>" in json.loads(server.news())["body"]
        process.kill()
    assert "of the MACs left</p>" in json.loads(server.news())["body"]


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def test_two_addresses_are_answered_and_no_others(server: Server) -> None:
    status, page = ask(server, "/")
    assert (status, page[:15]) == (200, "<!doctype html>")
    status, news = ask(server, "/news")
    assert status == 200
    assert set(json.loads(news)) == {"body", "figures"}
    for path in ("/favicon.ico", "/config.json", "/../config.json", "/news?x=1", "/%2e%2e/config.json"):
        assert ask(server, path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        assert ask(server, "/", method)[0] == 501


def test_only_this_machine_by_its_own_name(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    port = server.server_port
    assert ask(server, "/news", Host=f"localhost:{port}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        assert ask(server, "/news", Host=host)[0] == 403


def test_a_run_that_vanishes_is_an_error_on_the_page(server: Server, growing: tuple[Path, list[str]]) -> None:
    shutil.rmtree(growing[0])
    assert "neither a run nor a result" in json.loads(ask(server, "/news")[1])["error"]
    status, said = ask(server, "/")
    assert status == 503
    assert "neither a run nor a result" in said


def test_ctrl_c_ends_it(growing: tuple[Path, list[str]]) -> None:
    command = [sys.executable, "-m", "secateur", "report", str(growing[0]), "--live"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
        assert (process.stdout.read(), process.stderr.read()) == ("", "")


def test_a_port_that_is_taken_is_one_line(growing: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit) as stop:
            cli.main(["report", str(growing[0]), "--live", "--port", port])
    out, err = capsys.readouterr()
    assert (stop.value.code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"secateur: port {port} cannot be used: ")
