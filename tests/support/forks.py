"""Processes that have loaded already what the tests need, and so start at once."""

import multiprocessing

forks = multiprocessing.get_context("forkserver")
# All of them come from one server, which loads what the last call here names.
forks.set_forkserver_preload(
    ["torch._dynamo", "secateur.cli.prune", "secateur.recipes.work", "many", "killable", "own_loop", "once", "pytest"]
)
