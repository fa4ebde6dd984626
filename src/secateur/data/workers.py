"""What worker processes make, in order, while others use it.

They write into memory that is shared and used again and again: to send new memory with every batch takes several times
as long as to read a file.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from secateur.errors import SecateurError

Request = TypeVar("Request")
Made = TypeVar("Made")

AHEAD = 2
"""Requests that each worker has at a time."""


def in_workers(
    make: Callable[[Request, Tensor], Made], requests: Iterable[Request], workers: int, size: int, used: int
) -> Generator[tuple[Request, Made, Tensor]]:
    """Each request with what `make` returned for it, and with the bytes in which it left the rest.

    size: how many bytes.
    used: how many of the latest ones are needed at a time; the bytes of those before are written to again.
    """
    memory = [_shared(size) for _ in range(AHEAD * workers + used + 1)]
    waiting: deque[tuple[Request, int]] = deque()

    options: dict[str, Any] = {"multiprocessing_context": _start_method(), "prefetch_factor": AHEAD} if workers else {}
    loader = DataLoader(
        _Maker(make, memory),
        batch_sampler=_Requests(requests, len(memory), waiting),  # pyright: ignore[reportArgumentType]
        num_workers=workers,
        collate_fn=_as_it_is,
        generator=torch.Generator(),
        **options,
    )
    results: Any = iter(loader)
    try:
        for made in results:
            if isinstance(made, SecateurError):
                raise made
            request, place = waiting.popleft()
            yield request, made, memory[place]
    finally:
        if hasattr(results, "_shutdown_workers"):
            results._shutdown_workers()  # left to the garbage collector, this takes ten seconds


@dataclass(frozen=True)
class _Requests:
    """With the number of the memory that each is to use.

    Not defined within the function: a class there would keep all memory until the next garbage collection.
    """

    requests: Iterable[Any]
    places: int
    waiting: deque[tuple[Any, int]]

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        for number, request in enumerate(self.requests):
            self.waiting.append((request, number % self.places))
            yield self.waiting[-1]


@dataclass(frozen=True)
class _Maker(Dataset):
    make: Callable[[Any, Tensor], Any]
    memory: list[Tensor]

    def __getitems__(self, request: tuple[Any, int]) -> Any:
        try:
            return self.make(request[0], self.memory[request[1]])
        except SecateurError as error:
            return error  # raised in a worker, it would arrive with the worker's traceback as its text


def _as_it_is(made: Any) -> Any:
    return made


def _start_method() -> str | None:
    return "fork" if sys.platform == "linux" else None


def _shared(size: int) -> Tensor:
    """Bytes that worker processes share with this one."""
    if _start_method() == "fork":
        # Torch's own shared memory is in /dev/shm, where containers have little.
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    return torch.empty(size, dtype=torch.uint8).share_memory_()


def num_workers(images: int) -> int:
    """Starting workers takes longer than decoding a few images."""
    return 0 if images < 1000 else min(8, num_cores() - 1)


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
