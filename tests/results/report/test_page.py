"""The page of one run, as a reader meets it in a browser."""

import json
import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from looking import View, open_report

from secateur.files import read_json_lines
from secateur.results.structure import read_structure

BAND = re.compile(r"M([-.\d]+),0H([-.\d]+)V1H[-.\d]+Z")
"""From where to where in a path."""
CHARTS = ["tradeoff-0", "metric-0", "loss", "cost", "channels-0", "percent-0", "removals-0", "scores-0"]


@pytest.fixture(scope="module")
def opened(browser: Any, runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> View:
    return open_report(browser, tmp_path_factory.mktemp("page"), runs["taylor"])


@pytest.fixture
def view(opened: View) -> Iterator[View]:
    """The page; it must have kept quiet and to itself."""
    yield opened
    opened.page.emulate_media(color_scheme="light", media="screen")
    opened.page.set_viewport_size({"width": 1200, "height": 900})
    assert opened.said == []
    assert opened.requests == opened.requests[:1]
    assert opened.requests[0].startswith("file:")


@pytest.fixture
def events(runs: dict[str, Path]) -> list[dict[str, Any]]:
    return read_json_lines(runs["taylor"] / "events.jsonl")


def test_metrics_loss_and_cost_are_the_runs(view: View, events: list[dict[str, Any]]) -> None:
    (accuracy,) = view.chart("metric-0")
    assert accuracy["y"] == pytest.approx([event["metrics"]["accuracy"] for event in events], rel=1e-5)
    assert accuracy["customdata"][:4] == ["Start", "Tick 1", "Tick 2", "Tock 1, epoch 1"]
    assert accuracy["customdata"][-1] == "Fine-tuning epoch 2"
    test, training = view.chart("loss")
    assert test["y"] == pytest.approx([event["metrics"]["loss"] for event in events], rel=1e-5)
    assert training["y"][0] is None
    assert training["y"][1:] == pytest.approx([event["loss"] for event in events[1:]], rel=1e-5)
    assert "budget: 50% of the MACs" in view.page.locator("#cost .legendtext").all_text_contents()
    macs, params, filters = view.chart("cost")
    assert macs["y"] == pytest.approx([100 * event["share"] for event in events], rel=1e-5)
    assert params["y"][-1] == pytest.approx(100 * events[-1]["params"] / events[0]["params"], rel=1e-5)
    assert filters["y"][-1] == pytest.approx(100 * events[-1]["filters"] / events[0]["filters"], rel=1e-5)


def test_the_metric_over_the_macs_from_the_start_to_the_result(
    view: View, runs: dict[str, Path], events: list[dict[str, Any]]
) -> None:
    (line,) = view.chart("tradeoff-0")
    after = json.loads((runs["taylor"] / "result" / "summary.json").read_text())["after"]
    lefts = [*(event["share"] for event in events), after["macs"] / events[0]["macs"]]
    accuracies = [*(event["metrics"]["accuracy"] for event in events), after["metrics"]["accuracy"]]
    assert line["x"] == pytest.approx([100 * left for left in lefts], rel=1e-5)
    assert line["y"] == pytest.approx(accuracies, rel=1e-5)
    assert line["customdata"][0] == "Start"
    assert line["customdata"][-2:] == ["Fine-tuning epoch 2", "Result"]
    assert view.table("tradeoff-0")[0] == ["after", "MACs left", "accuracy"]
    assert view.table("tradeoff-0")[-1] == ["Result", f"{100 * lefts[-1]:.4g}%", f"{accuracies[-1]:.4g}"]
    first, last = f"{accuracies[0]:.4g} with 100%", f"{accuracies[-1]:.4g} with {100 * lefts[-1]:.4g}%"
    caption = view.page.locator("#caption-tradeoff-0").inner_text()
    assert caption == f"From {first} of the MACs to {last} of the MACs."
    shown = view.page.evaluate("document.getElementById('tradeoff-0').layout.xaxis.range")
    assert shown[0] > 100 > 100 * lefts[-1] > shown[1]  # from left to right, as the run went


def test_layers_are_the_runs(view: View, runs: dict[str, Path]) -> None:
    layers = read_structure(runs["taylor"]).layers
    before, after = view.chart("channels-0")
    assert before["x"] == after["x"] == [layer.name for layer in layers]
    assert before["y"] == [layer.before for layer in layers] == [12, 16]
    assert after["y"] == [layer.after for layer in layers]
    (removed,) = view.chart("percent-0")
    assert removed["y"] == pytest.approx([100 * (1 - layer.after / layer.before) for layer in layers], rel=1e-5)


def test_removals_and_scores_are_the_ticks(view: View, runs: dict[str, Path], events: list[dict[str, Any]]) -> None:
    ticks = [event for event in events if event["event"] == "Tick"]
    (removals,) = view.chart("removals-0")
    assert removals["x"] == [tick["number"] for tick in ticks]
    assert removals["customdata"] == [[tick["removed"].get(name, 0) for tick in ticks] for name in removals["y"]]
    layers = read_structure(runs["taylor"]).layers
    assert [sum(row) for row in removals["customdata"]] == [layer.before - layer.after for layer in layers]
    for counts, shares, layer in zip(removals["customdata"], removals["z"], layers, strict=True):
        assert shares == pytest.approx([100 * count / layer.before for count in counts], rel=1e-5)
    *deciles, median, threshold = view.chart("scores-0")
    assert [trace["y"] for trace in deciles] == [
        pytest.approx([tick["scores"][place] for tick in ticks], rel=1e-5) for place in range(11)
    ]
    assert median["y"] == deciles[5]["y"]
    assert threshold["y"] == pytest.approx([tick["threshold"] for tick in ticks], rel=1e-5)


def test_every_chart_is_drawn_with_its_phases(view: View, events: list[dict[str, Any]]) -> None:
    assert view.page.locator(".chart").evaluate_all("all => all.map(c => c.id)") == CHARTS
    for name in CHARTS:
        kind = {"removals-0": ".heatmaplayer image", "channels-0": ".bars path", "percent-0": ".bars path"}
        marks = view.page.locator(f"#{name} {kind.get(name, '.scatterlayer path.js-line')}")
        assert marks.count() > 0
        assert view.page.locator(f"#{name}").bounding_box()["height"] >= 260
    words = {"Tick": "Tick", "Tock": "Tock", "FineTune": "fine-tuning"}
    shapes = view.page.evaluate("document.getElementById('metric-0').layout.shapes.map(s => [s.name, s.path])")
    bands = [(float(start), float(end), name) for name, path in shapes for start, end in BAND.findall(path)]
    phases = [(name, len(list(steps))) for name, steps in groupby(words[event["event"]] for event in events[1:])]
    assert [(name, end - start) for start, end, name in sorted(bands)] == phases
    assert [name for name, _ in shapes] == list(dict.fromkeys(name for name, _ in phases))  # as in the legend


def test_hover_shows_the_numbers(view: View, events: list[dict[str, Any]]) -> None:
    place = 0.5  # the chart goes from half a step before the first event to half a step behind the last
    said = view.hover("metric-0", place)
    event = events[(len(events) - 1) // 2], events[len(events) // 2]
    assert any(f"accuracy {each['metrics']['accuracy']:.4g}" in said for each in event)
    assert re.search(r"(Tick|Tock) \d", said)
    assert "before : 12" in view.hover("channels-0", 0.25)
    assert re.search(r"Tick \d: \d removed, [\d.]+%", view.hover("removals-0", 0.5))
    assert "median" in view.hover("scores-0", 0.5)


def test_zoom_is_shared_along_the_run(view: View) -> None:
    names = ["metric-0", "loss", "cost"]
    before = view.ranges(*names)
    view.drag("metric-0", 0.3, 0.6)
    view.until("document.getElementById('cost').layout.xaxis.range[0] > 0.5")
    first, *others = view.ranges(*names)
    assert others == [first, first]
    assert before[0][0] < first[0] < first[1] < before[0][1]
    view.double_click("metric-0", until="document.getElementById('cost').layout.xaxis.range[0] < 0")
    assert view.ranges(*names) == [pytest.approx(each) for each in before]


def test_tables_behind_details_open_by_keyboard(view: View, events: list[dict[str, Any]]) -> None:
    table = view.page.locator("#table-loss")
    assert not table.is_visible()
    view.page.locator("#figure-loss summary").focus()
    view.page.keyboard.press("Enter")
    assert table.is_visible()
    assert view.table("loss")[0] == ["after", "test loss", "training loss"]
    told = [[f"{event['metrics']['loss']:.4g}", f"{event.get('loss', 0):.4g}"] for event in events]
    told[0][1] = "-"
    assert [row[1:] for row in view.table("loss")[1:]] == told
    view.page.keyboard.press("Enter")
    assert not table.is_visible()


def test_every_chart_has_a_table_of_its_numbers(view: View, runs: dict[str, Path], events: list[Any]) -> None:
    for row, event in zip(view.table("cost")[1:], events, strict=True):
        assert row[1] == f"{100 * event['share']:.4g}%"
    layers = read_structure(runs["taylor"]).layers
    assert view.table("channels-0")[1:] == [[x.name, str(x.before), str(x.after)] for x in layers]
    assert view.table("percent-0")[1][1] == f"{100 * (1 - layers[0].after / layers[0].before):.1f}%"
    ticks = [event for event in events if event["event"] == "Tick"]
    assert [row[1] for row in view.table("removals-0")[1:]] == [str(sum(t["removed"].values())) for t in ticks]
    assert view.table("scores-0")[1][1:] == [f"{score:.4g}" for score in (*ticks[0]["scores"], ticks[0]["threshold"])]


def test_cards_hold_the_summary(view: View, runs: dict[str, Path]) -> None:
    summary = json.loads((runs["taylor"] / "result" / "summary.json").read_text())
    cards = view.page.locator("#cards").inner_text()
    before, after = summary["before"], summary["after"]
    assert f"{100 * after['macs'] / before['macs']:.1f}% left" in cards
    assert f"{after['params']:,}" in cards
    assert f"{after['metrics']['accuracy']:.4g}" in cards
    assert [card.split("\n")[0] for card in view.page.locator(".card").all_inner_texts()] == [
        "MACs",
        "Accuracy",
        "Parameters",
        "Filters",
        "Cut checked",
        "Time",
    ]


def test_settings_that_are_not_the_default_are_marked(view: View) -> None:
    rows = view.page.locator("#settings > .scroll tbody tr").all_inner_texts()
    assert all("not the default" in row for row in rows)
    assert any(row.startswith("tick_removes") and "0.15" in row and "0.01" in row for row in rows)
    rest = view.page.locator("#settings details")
    assert "momentum" not in rest.inner_text()
    rest.locator("summary").click()
    assert "momentum" in rest.inner_text()
    facts = view.page.locator("#facts").inner_text()
    assert "hardware" in facts
    assert "torch" in facts


def test_headings_are_in_order_and_everything_has_a_name(view: View) -> None:
    levels = view.page.locator("h1, h2, h3").evaluate_all("all => all.map(h => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for name in CHARTS:
        figure = view.page.get_by_role("figure", name=view.page.locator(f"#title-{name}").inner_text(), exact=True)
        assert figure.count() == 1
        assert view.page.locator(f"#{name}").get_attribute("aria-label").startswith("Chart: ")
        assert view.page.locator(f"#caption-{name}").inner_text()
        # Zooming and saving work without a mouse.
        assert view.page.locator(f"#{name} .modebar").get_by_role("button").count() == 4
    assert view.page.locator("html").get_attribute("lang") == "en"


def luminance(colour: str) -> float:
    """Of "rgb(1, 2, 3)", as the guidelines on contrast have it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted([luminance(one), luminance(other)], reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_charts_follow_light_and_dark(view: View, scheme: str) -> None:
    view.page.emulate_media(color_scheme=scheme)
    paper = view.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) < 0.1) == (scheme == "dark")
    series = view.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--series-1').trim()")
    view.until(f"document.getElementById('metric-0').data[0].line.color === '{series}'")
    style = "(e) => getComputedStyle(e)."
    for text in ("#metric-0 .xtick text", "#metric-0 .legendtext"):
        assert contrast(view.page.locator(text).first.evaluate(f"{style}fill"), paper) > 7
    assert contrast(view.page.locator("#status").evaluate(f"{style}color"), paper) > 4.5
    for line in ("#metric-0 .js-line", "#loss .trace:nth-child(2) .js-line", "#scores-0 .trace:last-child .js-line"):
        assert contrast(view.page.locator(line).first.evaluate(f"{style}stroke"), paper) > 3


def legends_are_above(view: View) -> bool:
    """The plots, and do not cover them."""
    return view.page.locator(".chart:has(.legend)").evaluate_all(
        """all => all.every((chart) => chart.querySelector(".legend").getBoundingClientRect().bottom <=
            chart.querySelector(".nsewdrag").getBoundingClientRect().top)"""
    )


def test_nothing_overflows_on_a_phone(view: View) -> None:
    view.page.set_viewport_size({"width": 360, "height": 740})
    view.until("document.querySelector('#cost .main-svg').getBoundingClientRect().width <= 340")
    assert view.page.evaluate("document.documentElement.scrollWidth") == 360
    edges = view.page.locator("figure, .card, .chart .main-svg").evaluate_all(
        "all => all.map(e => e.getBoundingClientRect()).map(r => [r.left, r.right])"
    )
    assert all(0 <= left < right <= 360 for left, right in edges)
    tops = view.page.locator("#progress figure").evaluate_all("all => all.map(e => e.getBoundingClientRect().top)")
    assert len(set(tops)) == len(tops)  # one column
    assert legends_are_above(view)


def test_it_prints_on_paper_in_light_colours(view: View) -> None:
    view.page.emulate_media(color_scheme="dark")
    # What the page makes of itself for the printer.
    view.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    view.page.emulate_media(media="print", color_scheme="dark")
    widths = view.page.locator(".chart .main-svg").evaluate_all("all => all.map(e => e.getBoundingClientRect().width)")
    assert set(widths) == {680}
    assert legends_are_above(view)
    assert view.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not view.page.locator("nav").is_visible()
    view.page.evaluate("dispatchEvent(new Event('afterprint'))")
    view.page.emulate_media(media="screen", color_scheme="light")
    printed = view.page.pdf(format="A4")
    assert printed.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 8
    view.until("document.querySelector('#metric-0 .main-svg').getBoundingClientRect().width > 700")
