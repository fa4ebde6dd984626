"""A run on the screen: bars on a terminal, plain lines elsewhere."""

import io
import re
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console

from secateur import Event, FineTune, Finished, Tick, TickTock
from secateur.cli.display import Display
from secateur.cli.runs import stopped_by_signals


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


def tick(share: float, **metrics: float) -> Tick:
    return Tick(
        macs=int(1000 * share),
        share=share,
        params=10,
        filters=5,
        metrics=metrics or {"accuracy": 91.5},
        seconds=1.25,
        number=3,
        loss=0.5,
        removed={"stem": 2},
        skipped=0,
        scores=[],
        threshold=0.0,
    )


def tuning(epoch: int, share: float = 0.4) -> FineTune:
    return FineTune(
        macs=400, share=share, params=10, filters=5, metrics={}, seconds=1.0, epoch=epoch, epochs=4, loss=0.1
    )


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_bars_show_the_phase_and_the_macs(screen: io.StringIO) -> None:
    with Display(quiet=False) as display:
        display.step("Tock", 5, 20)
        display.event(tick(0.73))
        display.bars.refresh()
    shown = plain(screen.getvalue())
    assert "\x1b[" in screen.getvalue()
    assert "Tock" in shown
    assert "25%" in shown
    assert "73.0% of the MACs left" in shown
    assert "Tick 3              73.0% of the MACs  accuracy 91.5  1.2 s" in shown


def test_the_whole_run_goes_from_nothing_to_all(screen: io.StringIO) -> None:
    shares = []
    with Display(quiet=False) as display:
        display.begin(TickTock(keep_macs=0.4, finetune_epochs=4))
        events: list[Event] = [tick(1.0), tick(0.7), tick(0.4), tuning(2), tuning(4)]
        for event in events:
            display.event(event)
            shares.append(display.bars.tasks[display.whole].completed)
    assert shares == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


def test_plain_training_is_called_so(screen: io.StringIO) -> None:
    with Display(quiet=False) as display:
        display.begin(TickTock(keep_macs=1.0, finetune_epochs=4))
        display.event(tuning(1, share=1.0))
        assert display.bars.tasks[display.whole].completed == pytest.approx(0.25)
    assert "Training epoch 1 " in plain(screen.getvalue())


def test_other_budgets_get_to_the_end_too(screen: io.StringIO) -> None:
    # As `start` makes it for keep_params=0.5: at the last epoch the run is done but for the result.
    with Display(quiet=False) as display:
        display.begin(TickTock(keep_params=0.4, finetune_epochs=4))
        display.event(tuning(4, share=0.5))
        assert display.bars.tasks[display.whole].completed == pytest.approx(1.0)


def test_other_budgets_are_shown_beside_the_macs(screen: io.StringIO) -> None:
    with Display(quiet=False) as display:
        display.begin(TickTock(keep_filters=0.4, finetune_epochs=0), lambda: 0.7)
        display.event(tick(0.5))
        display.bars.refresh()
        assert display.bars.tasks[display.whole].completed == pytest.approx(0.5)
    shown = plain(screen.getvalue())
    assert "50.0% of the MACs, 70.0% of the filters  accuracy 91.5" in shown
    assert "70.0% of the filters left" in shown


@pytest.mark.parametrize("screen", [False], indirect=True)
def test_plain_lines_elsewhere(screen: io.StringIO) -> None:
    with Display(quiet=False) as display:
        display.step("Tock", 5, 20)
        display.event(tick(0.73))
    assert screen.getvalue() == "Tick 3              73.0% of the MACs  accuracy 91.5  1.2 s\n"


@pytest.mark.parametrize("screen", [False], indirect=True)
def test_an_event_is_one_line_however_long(screen: io.StringIO) -> None:
    with Display(quiet=False) as display:
        display.event(tick(0.73, accuracy=91.5, loss=0.123, pixel_accuracy=88.5, mean_intersection_over_union=77.5))
        display.say("checkpoint /a/rather/long/path/" + "x" * 80 + " is damaged")
    assert len(screen.getvalue().splitlines()) == 2


@pytest.mark.parametrize("screen", [True, False], indirect=True)
def test_quiet_shows_nothing(screen: io.StringIO) -> None:
    with Display(quiet=True) as display:
        display.say("building")
        display.step("Tock", 5, 20)
        display.event(tick(0.73))
    assert screen.getvalue() == ""


def test_names_are_not_taken_for_markup(screen: io.StringIO) -> None:
    with Display(quiet=False) as display:
        display.say("building [red]my.module[/red]:build")
    assert "[red]my.module[/red]:build" in plain(screen.getvalue())


def test_the_bars_are_gone_when_a_run_fails(screen: io.StringIO) -> None:
    def fail() -> None:
        with Display(quiet=False):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert screen.getvalue().rfind("\x1b[?25h") > screen.getvalue().rfind("\x1b[?25l")  # the cursor is back


def test_finished_is_all_of_it(screen: io.StringIO) -> None:
    end = Finished(macs=1, share=0.5, params=1, filters=1, metrics={}, seconds=0.0, result=None)  # pyright: ignore
    with Display(quiet=False) as display:
        display.event(end)
        assert display.bars.tasks[display.whole].completed == 1.0


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
