"""About how many Ticks and Tocks a run has. No torch."""

from __future__ import annotations

import math

from secateur.runs.settings import TickTock


def num_ticks(settings: TickTock) -> int:
    """About how many Ticks there will be, if what a Tick removes has the mean cost of a filter.

    >>> num_ticks(TickTock.of(keep_macs=0.25, tick_removes=0.5)), num_ticks(TickTock.one_shot(keep_macs=0.25))
    (2, 1)
    """
    budget, ticks = settings.budget, settings.ticks
    if ticks.removes == 1:
        return 1
    by_filters = math.log(budget.share) / math.log(1 - ticks.removes)
    return max(1, math.ceil(max(by_filters, (1 - budget.share) / ticks.step) - 1e-9))


def num_tocks(settings: TickTock, ticks: int) -> int:
    """How many Tocks there are among so many Ticks, and before them.

    >>> num_tocks(TickTock.of(keep_macs=0.25, tock_every=10), 25)
    2
    """
    tocks = settings.tocks
    return ticks // tocks.every + tocks.first if tocks.every else 0
