"""Which images a run trains on and tests on, where a draw has decided: a list in its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

from secateur.errors import InvalidData
from secateur.files import read_json, write_atomic
from secateur.recipes.jobs import Job, Order
from secateur.words import counted

SPLIT = "split.json"


def keep_split(job: Job, order: Order, out: Path) -> str:
    """Write the list, and say in words what it holds."""
    parts = _parts(job, order)
    write_atomic(out / SPLIT, json.dumps(parts, indent=1))
    train, test = (len(parts[name]) for name in ("train", "test"))
    share = f"{test / sum(map(len, parts.values())):.0%}"
    chosen = f"{len(parts['choose']):,} to choose by, " if "choose" in parts else ""
    tested = f"{test:,} to test on ({share} of them, by class)"
    return f"{counted(train, 'image')} to train on, {chosen}{tested}: see {out / SPLIT}"


def check_split(job: Job, order: Order, out: Path) -> None:
    """Raise if the images are not those that the run began with."""
    begun, now = read_json(out / SPLIT), _parts(job, order)
    if begun != now:
        wanted = f"those that {out / SPLIT} lists"
        got = ", ".join(f"{len(paths):,} to {name}" for name, paths in now.items())
        remedy = "Put back what was moved, or start a new run"
        raise InvalidData(f"the images in {order.data} are others", got=got, wanted=wanted, remedy=remedy)


def _parts(job: Job, order: Order) -> dict[str, list[str]]:
    """The files of each part, by their paths in the folder of the data."""
    assert order.data is not None
    root = order.data
    return {
        name: [Path(os.path.relpath(path, root)).as_posix() for path in paths]
        for name, paths in (job.files or {}).items()
    }
