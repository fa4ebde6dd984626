"""How long the report of a run of very many events or layers takes: to be written, and to be opened.

python benchmarks/report_speed.py --events 100000
python benchmarks/report_speed.py --events 80 --layers 10000

A small network is pruned. Its layers are repeated, and its Ticks and Tocks, until there are so many; each Tick then
removes something of some of the layers. The command writes the report. If there is a chromium, it opens the page, and
says when the numbers were there, the first chart, and all charts.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
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


def timed(do: Callable[[], object]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def median(found: Sequence[float]) -> str:
    """Seconds, from the fastest to the slowest."""
    return f"{statistics.median(found):.2f} s ({min(found):.2f} to {max(found):.2f})"


LOOK = """
new MutationObserver(() => {
    if (document.querySelector(".js-plotly-plot")) window.firstChart ??= performance.now() / 1000;
}).observe(document, { subtree: true, childList: true, attributes: true });
"""
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"


def print_opening(page: Path, times: int) -> None:
    program = shutil.which("chromium")
    if program is None:
        print("opening was not tried, for there is no chromium")
        return
    from playwright.sync_api import sync_playwright

    found: dict[str, list[float]] = {"numbers": [], "first chart": [], "all charts": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for _ in range(times):
            view = browser.new_page(viewport={"width": 1200, "height": 900})
            view.add_init_script(LOOK)

            def drawn(view: Any = view) -> None:
                view.goto(page.as_uri())
                view.wait_for_selector("html[data-drawn]")

            found["all charts"].append(timed(drawn))
            found["numbers"].append(view.evaluate(PAINTED))
            found["first chart"].append(view.evaluate("window.firstChart"))
            view.close()
    for what, seconds in found.items():
        print(f"{what}: after {median(seconds)}")


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
        write = partial(subprocess.run, command, check=True, capture_output=True)
        print(f"written: {median([timed(write) for _ in range(options.times)])}")
        print(f"the page: {page.stat().st_size / 1e6:.1f} MB")
        print_opening(page, options.times)


if __name__ == "__main__":
    main()
