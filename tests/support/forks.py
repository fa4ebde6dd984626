"""Processes that have loaded already what the tests need, and so start at once."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch

forks = multiprocessing.get_context("forkserver")
# All of them come from one server, which loads what the last call here names.
forks.set_forkserver_preload(
    ["torch._dynamo", "secateur.cli.prune", "secateur.recipes.work", "many", "killable", "own_loop", "once", "pytest"]
)


class Fork(forks.Process):
    """A function in such a process."""

    def __init__(self, do: Callable[..., object], *given: Any, **environment: str) -> None:
        super().__init__()
        self.do, self.given, self.environment = do, given, environment
        self.start()

    def run(self) -> None:
        os.environ.update(self.environment)
        torch.set_num_threads(1)
        self.do(*self.given)


def run_code(code: str, **names: object) -> None:
    exec(code, {"__name__": "__main__", **names})
