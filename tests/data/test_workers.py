"""Memory that worker processes write to."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from secateur.data.workers import in_workers


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("passes", [2, 6], ids=["stopped", "to the end"])
@pytest.mark.usefixtures("uncollected")
def test_memory_goes_with_the_pass(workers: int, passes: int) -> None:
    """Found by the fuzzer of readers: it stayed until the next garbage collection, a gigabyte after some epochs."""

    def fill(number: int, memory: torch.Tensor) -> int:
        memory.fill_(number)
        return 2 * number

    made = in_workers(fill, range(6), workers, size=8, used=1)
    held = []
    for _, (number, doubled, memory) in zip(range(passes), made, strict=False):
        assert (doubled, memory.tolist()) == (2 * number, [number] * 8)
        held.append(weakref.ref(memory))
    made.close()
    del made, memory
    assert all(each() is None for each in held)
