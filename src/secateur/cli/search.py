"""Prune as far as an accuracy allows, for a command: several runs, in folders of one folder."""

from __future__ import annotations

import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from secateur.cli.display import saved_in
from secateur.cli.options import RunOutput
from secateur.cli.runs import follow, summary_of
from secateur.errors import Interrupted, InvalidSetting
from secateur.files import read_json, to_json, write_atomic

if TYPE_CHECKING:
    from secateur.recipes.work import RunConfig
    from secateur.runs.events import Result

SEARCH = "search.json"


def start_search(config: RunConfig, target: float, out: Path, output: RunOutput) -> str:
    """Begin or resume a search; what the command prints in the end."""
    import torch

    from secateur.recipes.jobs import build
    from secateur.recipes.work import smaller
    from secateur.runs.search import FIRST, name_of, search
    from secateur.training.checkpoint import as_it_was
    from secateur.training.distributed import join, leave

    world = join()
    if config.order.is_own and build(config.order, config.settings.seed, torch.device("cpu")).task.held_out is None:
        what = f"the task of {config.order.recipe} has no images to choose by"
        raise InvalidSetting(what, remedy="Hold some out: classification(train, test, held_out=...)")

    def attempt(share: float, since: float | None) -> Result:
        source = out / name_of(since) if since is not None else None
        return follow(smaller(config, keep_macs=share), out / name_of(share), output, source)

    def say(line: str) -> None:
        if world.leads and not output.quiet:
            print(line, file=sys.stderr, flush=True)

    begins = f"{name_of(FIRST)}/config.json"
    with as_it_was(out, SEARCH, config=begins) if world.leads else nullcontext():
        if world.leads:
            out.mkdir(parents=True, exist_ok=True)
            write_atomic(out / SEARCH, to_json({"target_accuracy": target}))
        try:
            share, result = search(attempt, target, say)
        except Interrupted as error:
            error.remedy = f"Resume it: secateur resume {shlex.quote(str(out))}"
            raise
    leave()
    if not world.leads:
        return ""
    saved = out / name_of(share) / "result"
    if output.json:
        found = {"macs": result.after.macs, "params": result.after.params, "metrics": result.metrics}
        return to_json({**found, "result": str(saved)})
    found = f"the smallest network found with {target:g} or more on held-out images"
    return f"{summary_of(result, saved.parent)}\n\n{found}\n{saved_in(saved)}"


def resume_search(out: Path, output: RunOutput) -> str:
    """Resume a search that was stopped."""
    from secateur.recipes.work import read_run
    from secateur.runs.search import FIRST, name_of

    target = read_json(out / SEARCH).get("target_accuracy")
    if not isinstance(target, int | float) or not abs(target) < 1e9:
        raise InvalidSetting(f"{out / SEARCH} is damaged", remedy="Start again in another folder")
    return start_search(read_run(out / name_of(FIRST)), float(target), out, output)
