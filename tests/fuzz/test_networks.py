"""Two hundred random networks; `python tests/fuzz/fuzz.py` tries as many as you like."""

import warnings

from checks import PARTS, case_of, check
from fuzz import MIX
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

COUNT = 200
IN_TURN = ["gates", "repair", "folder", "loop"]


def test_random_networks() -> None:
    found = []

    @settings(
        database=None, deadline=None, derandomize=True, max_examples=COUNT, print_blob=False,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(st.lists(st.integers(0, 999), min_size=4, max_size=16), st.integers(0, 9))
    def draw(numbers: list[int], seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's, about empty layers and old functions
            case = case_of(seed, MIX, numbers)
            found.append(check(case, True, [IN_TURN[len(found) % len(IN_TURN)]], ("random", "least", "branches")))

    draw()
    assert len(found) >= COUNT
    assert sum(outcome.channels > 0 for outcome in found) > 0.7 * COUNT
    assert {kind for outcome in found for kind in outcome.kinds} >= set(MIX)
    assert set(IN_TURN) <= set(PARTS)
