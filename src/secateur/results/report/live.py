"""The report of a running run: a small server for this machine only."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from secateur.errors import InvalidSetting, SecateurError
from secateur.results.report.page import render, render_news
from secateur.results.report.read import is_running, read_runs

ADDRESS = "127.0.0.1"


class Server(ThreadingHTTPServer):
    """Serves the page and its changes."""

    daemon_threads = True

    def __init__(self, runs: Sequence[str | Path], port: int) -> None:
        self.runs = [Path(run) for run in runs]
        self.last: tuple[object, str] = None, ""
        """The state of the files and runs, and the contents then."""
        try:
            super().__init__((ADDRESS, port), Handler)
        except (OSError, OverflowError) as error:
            remedy = "Use port 0 for any free port"
            raise InvalidSetting(f"port {port} cannot be used", got=error, remedy=remedy) from error

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def news(self) -> str:
        """The contents, read again only if a file has changed, or a run has stopped."""
        files = [(path.stat().st_mtime_ns, path.stat().st_size) for path in self._files()]
        now = files, [is_running(run) for run in self.runs]
        if now != self.last[0]:
            self.last = now, json.dumps(render_news(read_runs(self.runs)), allow_nan=False)
        return self.last[1]

    def _files(self) -> list[Path]:
        """The files of the runs without their checkpoints."""
        return [path for run in self.runs for place in (run, run / "result") for path in place.glob("*.*")]

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a browser that disconnects before it has its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]


class Handler(BaseHTTPRequestHandler):
    """Answers GET of two addresses and refuses everything else."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "secateur", ""

    def do_GET(self) -> None:
        answers = {"/": ("text/html", self._page), "/news": ("application/json", self._news)}
        # Against DNS rebinding: a page from elsewhere whose name resolves to this machine sends that name.
        if self.headers.get("Host", "") not in [f"{host}:{self.server.server_port}" for host in (ADDRESS, "localhost")]:
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path not in answers:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            kind, answer = answers[self.path]
            try:
                self._answer(HTTPStatus.OK, kind, answer())
            except SecateurError as error:
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))

    def _page(self) -> str:
        return render(read_runs(self.server.runs), live=True)

    def _news(self) -> str:
        """The contents, or why they cannot be read at the moment; the page shows it and asks again."""
        try:
            return self.server.news()
        except (SecateurError, OSError) as error:
            return json.dumps({"error": str(error)})

    def _answer(self, status: HTTPStatus, kind: str, body: str) -> None:
        data = body.encode()
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(data)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


def serve(runs: Sequence[str | Path], port: int, say: Callable[[str], object]) -> None:
    """Serve the report until Ctrl-C; `say` gets the address."""
    render(read_runs(runs), live=True)  # raises at once for what cannot be read
    with Server(runs, port) as server, suppress(KeyboardInterrupt):
        say(server.address)
        server.serve_forever()
