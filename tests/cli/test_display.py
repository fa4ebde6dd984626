"""A run on the screen: bars on a terminal, plain lines elsewhere."""

import io
import re
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console

from secateur.cli.display import Display, waiting
from secateur.cli.runs import stopped_by_signals
from secateur.runs.events import Event, Finished, Tick


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> io.StringIO:
    """What is shown, on a terminal or, with False as parameter, in a file."""
    stream, kind = io.StringIO(), rich.console.Console
    terminal = getattr(request, "param", True)
    monkeypatch.setattr(
        rich.console,
        "Console",
        lambda **options: kind(file=stream, force_terminal=terminal, width=100 if terminal else None),
    )
    return stream


def tick(share: float, left: dict[str, float] | None = None, **metrics: float) -> Tick:
    return Tick(
        macs=int(1000 * share),
        share=share,
        params=10,
        filters=5,
        metrics=metrics or {"accuracy": 91.5},
        seconds=1.25,
        left=left or {},
        number=3,
        loss=0.5,
        removed={"stem": 2},
        skipped=0,
        scores=[],
        threshold=0.0,
    )


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_bars_show_the_phase_and_what_is_left(screen: io.StringIO) -> None:
    run: Any = SimpleNamespace(done=0.25)
    with Display(quiet=False) as display:
        display.run = run
        display.step("Tock", 5, 20)
        display.show(tick(0.73))
        assert display.bars.tasks[display.whole].completed == 0.25
        display.bars.refresh()
    shown = plain(screen.getvalue())
    assert "\x1b[" in screen.getvalue()
    for text in (
        "Tock",
        "25%",
        "73.0% of the MACs left",
        "Tick 3              73.0% of the MACs  accuracy 91.50  1.2 s",
    ):
        assert text in shown


def test_other_budgets_are_shown_beside_the_macs(screen: io.StringIO) -> None:
    with Display(quiet=False) as display:
        display.show(tick(0.5, left={"filters": 0.7}))
        display.bars.refresh()
    shown = plain(screen.getvalue())
    assert "50.0% of the MACs, 70.0% of the filters  accuracy 91.5" in shown
    assert "70.0% of the filters left" in shown


def test_finished_is_all_of_it(screen: io.StringIO) -> None:
    end: Event = Finished(macs=1, share=0.5, params=1, filters=1, metrics={}, seconds=0.0, result=None)  # pyright: ignore
    run: Any = SimpleNamespace(done=0.5)  # without fine-tuning, the last phase has nothing to do
    with Display(quiet=False) as display:
        display.run = run
        display.show(end)
        assert display.bars.tasks[display.whole].completed == 1.0


@pytest.mark.parametrize("screen", [False], indirect=True)
def test_an_event_is_one_plain_line_however_long(screen: io.StringIO) -> None:
    with Display(quiet=False) as display:
        display.step("Tock", 5, 20)
        display.show(tick(0.73))
        display.show(tick(0.73, accuracy=91.5, loss=0.123, pixel_accuracy=88.5, mean_intersection_over_union=77.5))
        display.show("checkpoint /a/rather/long/path/" + "x" * 80 + " is damaged")
    first, *others = screen.getvalue().splitlines()
    assert first == "Tick 3              73.0% of the MACs  accuracy 91.50  1.2 s"
    assert len(others) == 2


@pytest.mark.parametrize("screen", [True, False], indirect=True)
def test_quiet_shows_nothing(screen: io.StringIO) -> None:
    with Display(quiet=True) as display:
        display.show("building")
        display.step("Tock", 5, 20)
        display.show(tick(0.73))
    assert screen.getvalue() == ""


def test_names_are_not_taken_for_markup(screen: io.StringIO) -> None:
    with Display(quiet=False) as display:
        display.show("building [red]my.module[/red]:build")
    assert "[red]my.module[/red]:build" in plain(screen.getvalue())


def test_the_bars_are_gone_when_a_run_fails(screen: io.StringIO) -> None:
    def fail() -> None:
        with Display(quiet=False):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert screen.getvalue().rfind("\x1b[?25h") > screen.getvalue().rfind("\x1b[?25l")  # the cursor is back


def test_what_takes_long_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("quick", delay=60) as say:
        say("one step")
    with waiting("slow", delay=0.01) as say:
        say("one step")
        time.sleep(0.2)
    assert capsys.readouterr() == ("", "slow\n")


@pytest.mark.parametrize("ends_within", [0.0, 1.5], ids=["at once", "after a while"])
def test_what_ctrl_c_waits_for_is_said_when_it_takes_a_while(ends_within: float) -> None:
    said: list[str] = []
    run: Any = SimpleNamespace(stopping=None)
    with stopped_by_signals(run, said.append):
        signal.raise_signal(signal.SIGINT)
        assert run.stopping == signal.SIGINT
        time.sleep(ends_within)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    time.sleep(1.5 - ends_within)
    assert [text[:8] for text in said] == (["stopping"] if ends_within else [])
