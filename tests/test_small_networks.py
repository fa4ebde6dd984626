"""Three small networks on a CPU lose 60% of their MACs and next to nothing of what they can."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import small_networks


@pytest.mark.parametrize("name", small_networks.CASES)
def test_small_network(name: str) -> None:
    result = small_networks.run(small_networks.CASES[name], seed=0)
    before, after = next(iter(result.metrics_before.values())), next(iter(result.metrics.values()))
    print(small_networks.row(name, [result]))
    assert result.after.macs <= 0.4 * result.before.macs
    assert before > 50
    assert after > before - 2
