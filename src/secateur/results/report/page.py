"""The page: charts and tables of what was read, as one HTML file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from secateur.extras import import_extra
from secateur.files import write_atomic
from secateur.results.report.charts import Chart, colour
from secateur.results.report.progress import progress_charts
from secateur.results.report.read import Run, read_runs
from secateur.results.report.remaining import expected_end
from secateur.results.report.removals import removal_charts
from secateur.results.report.scores import score_charts
from secateur.results.report.seeds import make_seeds
from secateur.results.report.structure import structure_charts
from secateur.results.report.tables import make_cards, make_facts, make_settings
from secateur.results.report.tradeoff import LEGEND, tradeoff_charts

SYMBOLS = "● Tick, ◆ epoch of a Tock, ■ epoch of fine-tuning or training; dotted upright: where pruning ends."


@dataclass(frozen=True)
class Section:
    """Charts under one heading."""

    id: str
    title: str
    charts: list[Chart]
    note: str = ""

    @property
    def shown(self) -> bool:
        return any(chart.traces for chart in self.charts)


def write_report(runs: Sequence[str | Path], path: str | Path) -> Path:
    """Write one page about runs, finished or not, or results, side by side. It needs no other file and no network."""
    page = render(read_runs(runs)).encode()
    target = Path(path)
    write_atomic(target, page)
    return target


def render(runs: Sequence[Run], live: bool = False) -> str:
    """The whole page; a live one asks its server for changes."""
    scripts = [import_extra("plotly.offline", "report").get_plotlyjs(), _own("page.js")]
    sections, policy = make_sections(runs), _policy(scripts, live)
    about = {"policy": policy, "scripts": scripts, "style": _own("page.css"), "figures": _figures(sections)}
    return _fill("page.html", runs, sections, live, **about)


def render_news(runs: Sequence[Run]) -> dict[str, Any]:
    """The present contents, for a live page."""
    sections = make_sections(runs)
    return {"body": _fill("body.html", runs, sections, live=True), "figures": _figures(sections)}


def _policy(scripts: Sequence[str], live: bool) -> str:
    """Let the browser run these scripts only and contact nobody else, whatever else gets into the page."""
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(f"'sha256-{each}'" for each in hashes),
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {allowed}" for name, allowed in rules.items())


def make_sections(runs: Sequence[Run]) -> list[Section]:
    """All charts, also those without data so far."""
    return [
        Section("tradeoff", "Metric and size", tradeoff_charts(runs), LEGEND),
        Section("progress", "Along the run", progress_charts(runs), SYMBOLS if len(runs) > 1 else ""),
        Section("structure", "Layers", structure_charts(runs)),
        Section("removals", "Removals", removal_charts(runs)),
        Section("scores", "Scores", score_charts(runs)),
    ]


def _figures(sections: Sequence[Section]) -> dict[str, Any]:
    return {chart.id: chart.figure() for section in sections for chart in section.charts}


def _fill(template: str, runs: Sequence[Run], sections: Sequence[Section], live: bool, **about: Any) -> str:
    contents = {
        "runs": runs,
        "colour": colour,
        "sections": sections,
        "live": live,
        "ends": [expected_end(run) if live else "" for run in runs],
        "cards": make_cards(runs),
        "seeds": make_seeds(runs),
        "pictures": any(run.pictures for run in runs),
        "settings": make_settings(runs),
        "facts": make_facts(runs),
    }
    return _environment().get_template(template).render(contents, **about)


@cache
def _environment() -> Any:
    jinja = import_extra("jinja2", "report")
    environment = jinja.Environment(
        loader=jinja.FunctionLoader(_own),
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _own(name: str) -> str:
    """A file of this package."""
    return resources.files("secateur.results.report").joinpath(name).read_text(encoding="utf-8")
