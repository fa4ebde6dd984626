"""How long the report of a run of very many events takes: to be written, and to be opened.

python benchmarks/report_speed.py --events 100000

A small network is pruned. Its Ticks and Tocks are repeated until there are so many events; then the command writes the
report. If there is a chromium, it opens the page and waits until all charts are drawn.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import secateur


def make_run(folder: Path) -> None:
    torch.manual_seed(0)
    images, labels = torch.rand(32, 2, 8, 8), torch.arange(32) % 2
    model = nn.Sequential(
        nn.Conv2d(2, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    settings = secateur.TickTock.of(keep_macs=0.5, tick_removes=0.1, tock_every=1, tock_epochs=1, finetune_epochs=1)
    task = secateur.classification([(images, labels)], [(images, labels)])
    secateur.prune(model, images[:1], task, settings=settings, folder=folder)


def repeat(history: Path, count: int) -> None:
    """Turn the events of a run into so many: the first, Ticks and Tocks in turn that remove nothing, and the last."""
    events: list[dict[str, Any]] = [json.loads(line) for line in history.read_text().splitlines()]
    kinds = {event["event"]: event for event in events}
    groups = {group: 0 for event in events for group in event.get("removed", {})}
    pair = {**kinds["Tick"], "removed": groups}, kinds["Tock"]
    middle = [{**pair[place % 2], "number": place // 2 + 1} for place in range(count - 2)]
    made = [events[0], *middle, events[-1]]
    history.write_text("".join(json.dumps(event) + "\n" for event in made))


def median(do: Callable[[], object], times: int) -> str:
    """Seconds, from the fastest to the slowest."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        do()
        found.append(time.perf_counter() - start)
    return f"{statistics.median(found):.2f} s ({min(found):.2f} to {max(found):.2f})"


def time_opening(page: Path, times: int) -> str:
    program = shutil.which("chromium")
    if program is None:
        return "not tried, for there is no chromium"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])

        def open_page() -> None:
            view = browser.new_page(viewport={"width": 1200, "height": 900})
            view.goto(page.as_uri())
            view.wait_for_selector("html[data-drawn]")
            view.close()

        return median(open_page, times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run, page = Path(name) / "run", Path(name) / "report.html"
        make_run(run)
        repeat(run / "events.jsonl", options.events)
        size = (run / "events.jsonl").stat().st_size
        command = [sys.executable, "-m", "secateur", "report", str(run), "--out", str(page)]
        print(f"{options.events:,} events, {size / 1e6:.1f} MB")
        print(f"written: {median(lambda: subprocess.run(command, check=True, capture_output=True), options.times)}")
        print(f"the page: {page.stat().st_size / 1e6:.1f} MB")
        print(f"opened: {time_opening(page, options.times)}")


if __name__ == "__main__":
    main()
