"""How long the report of a run of very many events or layers takes: to be written, and to be opened.

python benchmarks/report_speed.py --events 100000
python benchmarks/report_speed.py --events 80 --layers 10000

A small network is pruned. Its layers are repeated, and its Ticks and Tocks, until there are so many; each Tick then
removes something of some of the layers. The command writes the report. If there is a chromium, it opens the page and
waits until all charts are drawn.
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


def repeat(run: Path, count: int, layers: int) -> None:
    """Turn the events of a run into so many, the first, Ticks and Tocks in turn, and the last; and the layers."""
    config, history = run / "config.json", run / "events.jsonl"
    about = json.loads(config.read_text())
    _, width, _ = about["layers"][0]
    groups = [f"stage.{number}.conv" for number in range(layers)]
    about |= {"layers": [[group, width, {group: 1}] for group in groups]}
    config.write_text(json.dumps(about))
    events: list[dict[str, Any]] = [json.loads(line) for line in history.read_text().splitlines()]
    kinds = {event["event"]: event for event in events}
    ticks = max(1, (count - 2) // 2)
    middle = []
    for place in range(count - 2):
        number = place // 2
        removed = {"removed": dict.fromkeys(groups[number::ticks], 1)} if place % 2 == 0 else {}
        middle.append({**kinds["Tock" if place % 2 else "Tick"], "number": number + 1, **removed})
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
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run, page = Path(name) / "run", Path(name) / "report.html"
        make_run(run)
        repeat(run, options.events, options.layers)
        size = (run / "events.jsonl").stat().st_size
        command = [sys.executable, "-m", "secateur", "report", str(run), "--out", str(page)]
        print(f"{options.events:,} events of {options.layers:,} layers, {size / 1e6:.1f} MB")
        print(f"written: {median(lambda: subprocess.run(command, check=True, capture_output=True), options.times)}")
        print(f"the page: {page.stat().st_size / 1e6:.1f} MB")
        print(f"opened: {time_opening(page, options.times)}")


if __name__ == "__main__":
    main()
