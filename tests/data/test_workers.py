"""Memory that worker processes write to."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from secateur.data.workers import in_workers
from secateur.errors import InvalidData


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


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_arrives_as_it_was_raised(workers: int) -> None:
    def fail(number: int, memory: torch.Tensor) -> int:
        raise InvalidData("7.png is damaged", got=number, remedy="Remove it")

    with pytest.raises(InvalidData) as caught:
        next(in_workers(fail, range(2), workers, size=8, used=1))
    assert str(caught.value) == "7.png is damaged: got 0. Remove it"
