"""A run's folder as the report needs it. Anybody may have written the files, so everything is checked here."""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from secateur.errors import InvalidData, InvalidSetting
from secateur.files import each_json_line, read_bytes, read_json
from secateur.pruning.settings import UNITS
from secateur.results.report.words import number, sentence, share, text
from secateur.results.structure import Layer, check_holds_run, read_structure

PHASES = {"Start": "Start", "Train": "training", "Tick": "Tick", "Tock": "Tock", "FineTune": "fine-tuning"}
TRAINING = {"baseline": "baseline", "retrain": "retraining"}
"""What an epoch of training is part of, where it is not all that the run does."""
METRICS = {"top5": "top-5 accuracy", "miou": "mean IoU", "pixel_accuracy": "pixel accuracy"}
"""Titles of our own tasks' metrics."""
COSTS = {"macs": "MACs", "params": "parameters", "filters": "filters"}
COUNTED = {**COSTS, "latency": "time"}
"""What a budget may count."""
MOST_MOMENTS = 1000
"""That are drawn of a run: with more, the page would take long to write and to open."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The network after a Tick or an epoch of training; None for a number that is missing or not finite."""

    phase: str
    name: str
    number: int
    """Of the Tick or Tock, from 1."""
    part: str
    """Of the run, if it is an epoch of training: baseline, retrain or train."""
    epoch: int
    epochs: int
    """How many there are in this Tock or part of the run; 0 if it is no epoch."""
    costs: dict[str, float | None]
    time_left: float | None
    """The share of the time that is left, where that is what the budget counts."""
    metrics: dict[str, float | None]
    loss: float | None
    seconds: float
    removed: dict[str, int]
    """Channels by group."""
    scores: list[float | None]
    threshold: float | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, finished or not, or what is known from its result."""

    name: str
    moments: list[Moment]
    layers: list[Layer]
    members: dict[str, dict[str, int]]
    """By group, the layers that a channel of it is in, and as how many filters; empty if only the result is known."""
    kind: str
    """"prune" or "train"."""
    settings: dict[str, Any]
    engine: dict[str, Any]
    setting: str
    """All settings but the seed, and the machine: the same for runs that differ in their seed only."""
    facts: dict[str, str]
    """The network, the data, the machine and versions."""
    ends: tuple[Moment, Moment]
    """Before and after, as in the summary; empty without one."""
    latency: dict[str, Any]
    verification: dict[str, Any]
    """How far the masked and the cut network are apart; empty if that is not known."""
    pictures: str
    """A data address, or nothing."""
    finished: bool
    running: bool
    """Whether a process on this machine is doing it."""
    batches: int
    """In an epoch; 0 if that is not known."""

    @property
    def prunes(self) -> bool:
        """Whether it removes channels."""
        return self.kind != "train"

    @property
    def budget(self) -> tuple[str, float] | None:
        """What the budget counts, and the share that stays; None if the run does not prune."""
        shares = {key: number(self.settings.get(f"keep_{key}")) for key in COUNTED if self.prunes}
        return next(((key, share) for key, share in shares.items() if share is not None and 0 < share <= 1), None)

    @property
    def cut(self) -> bool:
        return any(layer.after < layer.before for layer in self.layers)

    @property
    def since_start(self) -> list[Moment]:
        """The moments without those of the training that came before the start of pruning."""
        start = next((place for place, moment in enumerate(self.moments) if moment.phase == "Start"), 0)
        return self.moments[start:]

    def cost(self, what: str) -> tuple[float | None, float | None]:
        """MACs, parameters or filters before and after."""
        found = [moment.costs[what] for moment in self.moments if moment.costs[what] is not None] or [None]
        before, after = (end.costs[what] for end in self.ends)
        return before if before is not None else found[0], after if after is not None else found[-1]

    def metric(self, name: str) -> tuple[float | None, float | None]:
        """Before and after as in the summary, or the first and the last since the start of pruning; None if unknown.

        A summary has no metrics before where the run began with a network that was cut already.
        """
        found = [value for moment in self.since_start if (value := moment.metrics.get(name)) is not None] or [None]
        before, after = (end.metrics.get(name) for end in self.ends)
        return (before, after) if after is not None else (found[0], found[-1])

    @property
    def metrics(self) -> list[str]:
        """Their names; the first one matters most."""
        return list(dict.fromkeys(name for moment in self.moments for name in moment.metrics))

    @property
    def main_metric(self) -> str | None:
        return next(iter(self.metrics), None)

    @property
    def status(self) -> str:
        """Whether there is a result, or how far it is."""
        if self.finished:
            return "finished"
        if not self.moments:
            return "begun"
        left = share(self.cost("macs")[1], self.cost("macs")[0])
        kept = f", {left:.1%} of the MACs left" if left is not None and self.prunes else ""
        return f"no result yet: {self.moments[-1].name}{kept}"


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """The runs, each under the shortest end of its path that no other has."""
    if not folders:
        raise InvalidSetting("a report needs at least one run")
    parts = [Path(folder).resolve().parts for folder in folders]
    most = max(map(len, parts))
    long = next((n for n in range(1, most) if len({p[-n:] for p in parts}) == len(parts)), most)
    return [read_run(folder, "/".join(p[-long:])) for folder, p in zip(folders, parts, strict=True)]


def read_run(folder: str | Path, name: str) -> Run:
    """A run's folder, or a result's."""
    path = Path(folder)
    check_holds_run(path)
    alone = (path / "summary.json").is_file()
    result = path if alone else path / "result"
    config, summary, history = path / "config.json", result / "summary.json", path / "events.jsonl"
    if alone:
        history = path / "history.jsonl"
    asked = read_json(config) if config.is_file() and not alone else {}
    found = read_json(summary) if summary.is_file() else {}
    about = {**asked, **found}
    count, events = each_json_line(history)
    moments = thinned(events, count, history)
    layers = read_structure(path, _sum(moment.removed for moment in moments)).layers
    ends = [_moment({"event": "Start", **_record(found, end, path)}, summary) for end in ("before", "after")]
    return Run(
        name=text(name),
        layers=layers,
        moments=moments,
        members=_members(asked),
        kind=text(about.get("kind", "prune")),
        settings=_record(about, "settings", path),
        engine=_record(about, "engine", path),
        setting=json.dumps([_setting(about, path), [(layer.name, layer.before) for layer in layers]]),
        facts=_facts(about, path) | _not_shown(count),
        ends=(ends[0], ends[1]),
        latency=_record(found, "latency", path),
        verification=_record(found, "verification", path),
        pictures=_pictures(result / "pictures.png"),
        finished=bool(found),
        running=not alone and is_running(path),
        batches=_whole(about.get("batches")),
    )


def thinned(events: Iterable[dict[str, Any]], count: int, path: Path, most: int = MOST_MOMENTS) -> list[Moment]:
    """Of very many events every so many of each kind, with the removals and the time of those in between.

    count: of the events.
    """
    every = -(-count // most)
    waiting: dict[str, list[dict[str, Any]]] = {phase: [] for phase in PHASES}
    last: dict[str, int] = {}
    kept: dict[int, Moment] = {}
    for place, event in enumerate(events):
        phase = _phase(event, path)
        last[phase] = place
        waiting[phase].append(event)
        if len(waiting[phase]) >= every or place == 0:
            kept[place] = _together(waiting[phase], path)
            waiting[phase] = []
    for phase, together in waiting.items():
        if together:
            kept[last[phase]] = _together(together, path)
    return [kept[place] for place in sorted(kept)]


def _together(events: Sequence[dict[str, Any]], path: Path) -> Moment:
    """The last of these events, with the removals and the time of all."""
    removed = _sum(_removed(event, path) for event in events)
    seconds = sum(number(event.get("seconds")) or 0.0 for event in events)
    return replace(_moment(events[-1], path), removed=removed, seconds=seconds)


def _sum(removals: Iterable[dict[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for removed in removals:
        if removed:
            total.update(removed)
    return dict(total)


def is_running(folder: Path) -> bool:
    """Whether the process that has written its number into the run's lock is alive; False if nobody can tell."""
    try:
        process = int(read_bytes(folder / ".lock"))
        if os.name != "posix" or process < 1:
            return False
        os.kill(process, 0)
    except PermissionError:
        return True
    except (InvalidData, ValueError, OverflowError, ProcessLookupError):
        return False
    return True


def _phase(event: dict[str, Any], path: Path) -> str:
    phase = event.get("event")
    if not isinstance(phase, str) or phase not in PHASES:
        raise InvalidData(f"{path} is damaged", got=text(event), wanted="an event of a run")
    return phase


def _moment(event: dict[str, Any], path: Path) -> Moment:
    phase, scores = _phase(event, path), event.get("scores", [])
    if not isinstance(scores, list):
        raise InvalidData(f"{path} is damaged", got=text(scores), wanted="a list of scores")
    counted = {word: _whole(event.get(key)) for key, word in (("number", ""), ("epoch", "epoch "))}
    said = ", ".join(f"{word}{count}" for word, count in counted.items() if count)
    word = TRAINING.get(str(event.get("phase")), PHASES[phase]) if phase == "Train" else PHASES[phase]
    return Moment(
        phase=phase,
        name=sentence(f"{word} {said}".strip()),
        number=counted[""],
        part=text(event.get("phase", "")),
        epoch=_whole(event.get("epoch")),
        epochs=_whole(event.get("epochs")),
        costs={what: number(event.get(what)) for what in COSTS},
        time_left=number(_record(event, "left", path).get(UNITS["latency"])),
        metrics={METRICS.get(n, text(n)): number(value) for n, value in _record(event, "metrics", path).items()},
        loss=number(event.get("loss")),
        seconds=number(event.get("seconds")) or 0.0,
        removed=_removed(event, path),
        scores=[number(score) for score in scores],
        threshold=number(event.get("threshold")),
    )


def _removed(event: dict[str, Any], path: Path) -> dict[str, int]:
    removed = _record(event, "removed", path)
    if not all(isinstance(count, int) and 0 <= count < 2**31 for count in removed.values()):
        raise InvalidData(f"{path} is damaged", got=text(removed), wanted="numbers of removed channels")
    return removed


def _members(asked: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Layers by group, from those in the config, which `read_structure` has checked."""
    members: dict[str, dict[str, int]] = {}
    for name, _, groups in asked.get("layers", []):
        for group, each in groups.items():
            members.setdefault(group, {})[str(name)] = each
    return members


def _setting(about: dict[str, Any], path: Path) -> list[Any]:
    settings, order = dict(_record(about, "settings", path)), dict(_record(about, "order", path))
    # Weights of a network that was trained with the same seed.
    order["weights"] = str(order.get("weights")).replace(f"seed{settings.pop('seed', None)}", "seed")
    rest = ("kind", "engine", "network", "input", "hardware", "versions")
    return [settings, order, *(about.get(key) for key in rest)]


def _not_shown(count: int) -> dict[str, str]:
    every = -(-count // MOST_MOMENTS)
    return {"events": f"{count:,}, of which one in {every} is drawn"} if every > 1 else {}


def _facts(about: dict[str, Any], path: Path) -> dict[str, str]:
    order, network, versions = (_record(about, key, path) for key in ("order", "network", "versions"))
    options = _record(network, "options", path)
    said = {
        "recipe": order.get("recipe"),
        "data": order.get("data"),
        "weights": order.get("weights"),
        "network": network.get("name"),
        **{f"network: {text(key)}": value for key, value in options.items()},
        "input": about.get("input"),
        "hardware": about.get("hardware"),
        **{text(key): value for key, value in versions.items()},
    }
    return {key: text(value) for key, value in said.items() if value is not None}


def _pictures(path: Path) -> str:
    if not path.exists():
        return ""
    data = read_bytes(path)
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        raise InvalidData(f"{path} is not a PNG image")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _record(about: dict[str, Any], key: str, path: str | Path) -> dict[str, Any]:
    """The object under a key; empty if it is missing."""
    found = about.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InvalidData(f"{key} in {path} is damaged", got=text(found), wanted="an object")
    return found


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and 0 < value < 2**31 else 0
