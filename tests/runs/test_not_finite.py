"""Numbers that are not finite: the files of a run stay JSON, which has none, and the run goes on from them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from small import prepared, quick

import secateur
from secateur.recipes.reports import changes, main
from secateur.results.report import write_report
from secateur.runs.run import Run


def strictly(text: str) -> Any:
    """As a browser reads it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_metrics_that_are_not_finite(tmp_path: Path) -> None:
    model, graph, task = prepared()
    task = replace(task, evaluate=lambda model: {"accuracy": math.nan, "loss": math.inf})
    settings, folder = quick(), tmp_path / "run"
    first = Run(settings, model, graph, task, folder=folder)
    events = first.events()
    for _ in range(3):
        next(events)
    events.close()
    result = settings(model, graph, task, folder=folder)
    assert len(result.history) > 3
    for event in result.history:
        assert math.isnan(event.metrics["accuracy"])
        assert "nan" in str(event)
    result = replace(result, original=strictly('{"accuracy": null}'))
    assert "nan" in str(result)
    secateur.save(result, folder / "result")
    for name in ("config.json", "result/summary.json"):
        strictly((folder / name).read_text())
    for name in ("events.jsonl", "result/history.jsonl"):
        for line in (folder / name).read_text().splitlines():
            assert strictly(line)["metrics"] == {"accuracy": None, "loss": None}
    summary = strictly((folder / "result" / "summary.json").read_text())
    assert math.isnan(main(summary))
    summary["before"]["metrics"] = {"accuracy": 50.0, "loss": None}
    assert changes(summary) == ["50.00 -> nan (+nan)", "nan -> nan (+nan)"]
    assert "Accuracy" in write_report([folder, folder / "result"], tmp_path / "page.html").read_text()
