"""A page in a browser, whose every message and request is kept."""

import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from secateur.results.report import write_report


class View:
    """A page that is drawn; without a network, whatever it tries."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1200, "height": 900}, **options)
        self.said: list[str] = []
        """By the console, by errors, by dialogs."""
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.context.route(lambda url: url != address and not url.startswith(address), lambda route: route.abort())
        # A page asks for news ten times a second instead of once.
        self.page.add_init_script(
            "window.setTimeout = ((later) => (act, pause) => later(act, pause === 1000 ? 100 : pause))(setTimeout)"
        )
        self.page.goto(address)
        self.page.wait_for_selector("html[data-drawn]")

    def chart(self, name: str) -> list[dict[str, Any]]:
        """What plotly has drawn: numbers and words of every trace."""
        keys = ["type", "name", "x", "y", "z", "customdata"]
        return self.page.evaluate(
            """([id, keys]) => document.getElementById(id).data.map(
                (trace) => Object.fromEntries(keys.filter((key) => key in trace).map((key) => [key, trace[key]])))""",
            [name, keys],
        )

    def table(self, name: str) -> list[list[str]]:
        """The numbers of a chart, with their heads."""
        return self.page.evaluate(
            """(id) => [...document.querySelectorAll(`#table-${id} tr`)].map(
                (row) => [...row.cells].map((cell) => cell.textContent))""",
            name,
        )

    def until(self, condition: str, seconds: float = 20) -> None:
        """Wait for it; the browser's own way to wait needs what the page's policy forbids."""
        patience = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < patience, f"never came true: {condition}"
            self.page.wait_for_timeout(50)

    def double_click(self, name: str, until: str) -> None:
        """Again, as anyone would, if a busy machine has taken it for two clicks."""
        for _ in range(5):
            self.page.mouse.dblclick(*self.middle(name))
            with suppress(AssertionError):
                return self.until(until, seconds=4)
        raise AssertionError(f"never came true: {until}")

    def middle(self, name: str, across: float = 0.5) -> tuple[float, float]:
        """A place in the chart, from its left to its right edge, where the mouse can go."""
        area = self.page.locator(f"#{name} .nsewdrag").first
        area.scroll_into_view_if_needed()
        box = area.bounding_box()
        return box["x"] + across * box["width"], box["y"] + 0.5 * box["height"]

    def hover(self, name: str, across: float) -> str:
        """What the label says there."""
        self.page.mouse.move(*self.middle(name, across))
        self.page.wait_for_selector(f"#{name} .hoverlayer text")
        return " ".join(self.page.locator(f"#{name} .hoverlayer text").all_text_contents())

    def ranges(self, *names: str) -> list[list[float]]:
        return self.page.evaluate("(ids) => ids.map((id) => document.getElementById(id).layout.xaxis.range)", names)

    def drag(self, name: str, start: float, end: float) -> None:
        x, y = self.middle(name, start)
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        self.page.mouse.move(self.middle(name, end)[0], y, steps=4)
        self.page.mouse.up()


def open_report(browser: Any, folder: Path, *runs: Path, **options: Any) -> View:
    """The report of these runs, from a file."""
    return View(browser, write_report(runs, folder / "report.html").as_uri(), **options)


def figures_of(page: str) -> dict[str, Any]:
    """The charts of a page, by name."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])
