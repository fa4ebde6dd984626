"""Two hundred random networks; `python tests/fuzz/fuzz.py` tries as many as you like, and more of each."""

import warnings

import pytest
from cases import case_of
from checks import Outcome, check
from fuzz import CLEAN
from grammar import STEPS
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

COUNT = 9
"""Networks for each kind of step."""
EVERY = 64
"""About one of so many is probed, which takes as long as ten that are not."""


@pytest.mark.parametrize("kind", sorted(STEPS))
def test_random_networks(kind: str) -> None:
    found: list[Outcome] = []

    @settings(
        database=None, deadline=None, derandomize=True, max_examples=COUNT, print_blob=False,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(st.lists(st.integers(0, 999), min_size=4, max_size=8), st.integers(0, EVERY - 1))
    def draw(numbers: list[int], seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's, about empty layers and old functions
            case = case_of(seed, [kind, "chain", kind], numbers)
            probe = seed % EVERY == EVERY - 1
            plans = ("random", "least", "branches") if probe or CLEAN.issuperset(case.network.kinds) else ("nothing",)
            parts = [["gates"], ["folder"], ["repair"], []][seed % 4] if len(plans) > 1 or seed % 4 == 0 else []
            found.append(check(case, probe, parts, plans))

    draw()
    assert len(found) >= COUNT
    assert any(outcome.channels for outcome in found)
    assert any(kind in outcome.kinds for outcome in found)
