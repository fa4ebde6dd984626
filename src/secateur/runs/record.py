"""A run in a folder: what it must remember to go on, and how it does."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from secateur.channels.guard import check_extra_state
from secateur.channels.shrink import tensors_of
from secateur.errors import DamagedRun, InvalidSetting
from secateur.pruning.scores import check_state
from secateur.pruning.select import UNITS
from secateur.runs.events import Event, Finished, from_dict
from secateur.training.checkpoint import REFUSALS, RunFolder, as_it_was, read_checkpoint, read_config
from secateur.training.loop import Position
from secateur.training.optimizers import placed

if TYPE_CHECKING:
    from secateur.runs.run import Run
    from secateur.runs.settings import TickTock

PATIENCE = 40
"""A checkpoint that took a second is followed by no other for this many: they cost no more than 3% of a run."""


ORIGINAL = "original.safetensors"
"""In the run's folder: the network it starts from."""
PRUNED = "pruned"
"""The checkpoint from which a run can be pruned further."""


@dataclass
class Cursor:
    """What is to be done next."""

    phase: str = "Start"
    """"Start", "Tick", "Tock", "FineTune" or "Finished"."""
    number: int = 0
    """How many phases have been done."""
    epoch: int = 0
    ticks: int = 0
    tocks: int = 0


class Record:
    """Writes down a run as it goes, and puts one that was stopped back where it was."""

    def __init__(self, run: Run, path: str | Path, about: dict[str, Any]) -> None:
        check_state(run.pruner.score)
        check_extra_state(run.model)
        self.run = run
        self.path = Path(path)
        self.folder: RunFolder | None = None
        self.not_before = 0.0
        mine = {
            "settings": run.settings.to_dict(),
            "channels": [[group.name, group.size] for group in run.pruner.graph.groups],
        }
        with as_it_was(self.path, ORIGINAL) if run.world.leads else nullcontext():
            try:
                self.folder = RunFolder(path) if run.world.leads else None
                self._open(mine, about)
            except BaseException:
                self.finish()
                raise

    def _open(self, mine: dict[str, Any], about: dict[str, Any]) -> None:
        """Begin, or go on from the last checkpoint."""
        run, state = self.run, None
        if self.folder is not None:
            # Started from Python: nobody else has kept the network.
            whole = {} if "order" in about else run.given.state_dict()
            tensors = {name: value for name, value in whole.items() if isinstance(value, Tensor)}
            if (self.path / "config.json").exists():
                self._compare(self.folder.read_config(), mine)
                self._compare_weights(tensors)
                state = self.folder.load()
            else:
                if tensors:
                    self.folder.write_tensors(ORIGINAL, tensors)
                graph = run.pruner.graph
                about = {**about, "layers": graph.widths, "macs": graph.macs, "example": self._sizes()}
                self.folder.write_config({**mine, "engine": run.engine.to_dict(), **about})
        state = run.world.tell(state)
        if state is not None:
            told = run.world.tell(self.folder and self.folder.read_events())
            try:
                run.history = [from_dict(event) for event in told]
            except (AttributeError, KeyError, TypeError) as error:
                raise DamagedRun(f"{self.path / 'events.jsonl'} holds what is no event of a run: {error}") from error
            restore(run, state)

    def _compare(self, config: dict[str, Any], mine: dict[str, Any]) -> None:
        _check_whole(config, self.path)
        engine = self.run.engine.to_dict()
        for name in ("accumulate", "clip_norm", "precision"):
            if config["engine"].get(name) != engine[name]:
                raise InvalidSetting(f"{self.path} holds a run with another {name}: go on as it was")
        sizes = self._sizes()
        if config.get("example", sizes) != sizes:
            raise InvalidSetting(
                f"{self.path} holds a run with an example of another size ({config['example']}, without the batch, and "
                f"not {sizes}), for which a budget means something else: go on with such a one, or name another folder"
            )
        try:
            # Settings that did not exist when the run began have their defaults, which change nothing.
            config["settings"] = type(self.run.settings).from_dict(config["settings"]).to_dict()
        except (TypeError, ValueError, AttributeError) as error:
            raise DamagedRun(f"{self.path / 'config.json'} is damaged, or of another version: {error}") from error
        for name, value in mine.items():
            if config.get(name) != value:
                other = [key for key in value if config[name].get(key) != value[key]] if name == "settings" else []
                what = f"other {name}" + (f" ({', '.join(other)})" if other else "")
                raise InvalidSetting(
                    f"{self.path} holds a run with {what}: resume it as it was, or name another folder"
                )

    def _sizes(self) -> list[list[int]]:
        """Of the example that the network was analysed with, without the batch."""
        examples = self.run.pruner.graph.calls.get("eval", ())[:1]
        return [list(tensor.shape[1:]) for example in examples for tensor in example.tensors]

    def _compare_weights(self, tensors: dict[str, Tensor]) -> None:
        path = self.path / ORIGINAL
        if not tensors or not path.is_file():
            return
        try:
            kept = load_file(path)
        except REFUSALS as error:
            raise DamagedRun(f"{path} is damaged: {error}; restore it, or start a new run elsewhere") from error
        for name, tensor in tensors.items():
            if name not in kept or not are_same(tensor.detach().cpu(), kept[name]):
                raise InvalidSetting(
                    f"{self.path} holds a run of a network with another {name}: give the network as it was when that "
                    "began, or name another folder"
                )

    def note(self, event: Event) -> None:
        if self.folder is not None and not isinstance(event, Finished):
            self.folder.append_event(event.to_dict())

    def save(self, needed: bool) -> None:
        """Write a checkpoint, unless the last one was a moment ago and this one is not needed."""
        now = time.perf_counter()
        if not self.run.world.tell(needed or now >= self.not_before):
            return
        if self.folder is not None:
            self.folder.save(state_of(self.run))
            self.not_before = time.perf_counter() + PATIENCE * (time.perf_counter() - now)
        self.run.world.wait()

    def keep_pruned(self, phase: str) -> None:
        """Keep for good how it would go on with that phase if the budget were smaller."""
        if self.folder is not None:
            cursor = replace(self.run.cursor, phase=phase, epoch=0, number=self.run.cursor.number + 1)
            changed = {"cursor": asdict(cursor), "position": asdict(Position()), "score": {}}
            self.folder.save({**state_of(self.run), **changed}, PRUNED)

    def finish(self) -> None:
        if self.folder is not None:
            self.folder.close()


def prune_further(source: str | Path, target: str | Path, settings: TickTock) -> None:
    """Make a folder in which the same call as for `source`, with these settings, goes on from the end of its pruning.

    What was done in `source` is not done again, and `source` stays as it is. The settings can have a smaller budget and
    differ in what follows; the optimizer and the kind of gates stay.
    """
    source, target = Path(source), Path(target)
    config, kept = read_config(source), source / "checkpoints" / PRUNED
    _check_whole(config, source)
    if not kept.is_dir():
        done = (source / "result").is_dir()
        why = "keeps no checkpoint of the end of its pruning" if done else "has not come to the end of its pruning yet"
        raise InvalidSetting(f"{source} {why}: {'prune the whole network anew' if done else 'let it go on first'}")
    for name in ("optimizer", "filter_scale"):
        if config["settings"].get(name) != getattr(settings, name):
            raise InvalidSetting(f"{source} has another {name}: what it has done cannot go on with this one")
    if (target / "config.json").exists():
        raise InvalidSetting(f"{target} holds a run already: resume that, or name another folder")
    with (
        as_it_was(target, ORIGINAL),
        RunFolder(target) as folder,
        (source / "events.jsonl").open("rb") as events,
    ):
        try:
            _, length = read_checkpoint(kept, events.fileno())
        except REFUSALS as error:
            raise DamagedRun(f"{kept} is damaged: {error}; prune the whole network anew") from error
        lines = events.read(length)
        _check_smaller(source, settings, lines)
        (target / "events.jsonl").write_bytes(lines)
        if (source / ORIGINAL).is_file():
            shutil.copyfile(source / ORIGINAL, target / ORIGINAL)
        shutil.copytree(kept, target / "checkpoints" / f"{1:08}", dirs_exist_ok=True)
        folder.write_config({**config, "settings": settings.to_dict()})


def _check_whole(config: dict[str, Any], folder: Path) -> None:
    missing = [name for name in ("settings", "engine") if not isinstance(config.get(name), dict)]
    if missing:
        raise DamagedRun(f"{folder / 'config.json'} lacks its {missing[0]}: restore it, or start a new run elsewhere")


def _check_smaller(source: Path, settings: TickTock, lines: bytes) -> None:
    """Raise if the budget leaves nothing to remove."""
    try:
        first, *_, last = [from_dict(json.loads(line)) for line in lines.splitlines()]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise DamagedRun(f"{source / 'events.jsonl'} is damaged: {error}; prune the whole network anew") from error
    for name in ("macs", "params", "filters"):
        wanted, left = getattr(settings, f"keep_{name}"), getattr(last, name) / getattr(first, name)
        if wanted is not None and wanted >= left:
            what = UNITS[name]
            raise InvalidSetting(f"{source} has {left:.1%} of the {what} left already: ask for less, or finetune it")


def are_same(one: Tensor, two: Tensor) -> bool:
    """To the bit."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two)))


def state_of(run: Run) -> dict[str, Any]:
    """Everything that decides how the run goes on."""
    model = run.model
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        "cursor": asdict(run.cursor),
        "position": asdict(run.position),
        "kept": run.pruner.kept,
        "present": run.gates.present.kept,
        "model": tensors_of(model),
        "optimizer": {names[id(p)]: dict(state) for p, state in run.optimizer.state.items()},
        "scaler": run.trainer.scaler.state_dict(),
        "score": run.pruner.score.state() if run.cursor.phase in ("Tick", "Tock") else {},
        "ema": run.ema.average if run.ema is not None else None,
    }


@torch.no_grad()
def restore(run: Run, state: dict[str, Any]) -> None:
    """Put a new run to where another one was."""
    for name, value in state["cursor"].items():
        setattr(run.cursor, name, value)
    run.position = Position(**state["position"])
    run.pruner.kept = state["kept"]
    run.gates.mask_(state["kept"])
    run.gates.cut_(state["present"], run.optimizer)
    if run.cursor.phase in ("FineTune", "Finished"):
        run.begin_finetune()
    else:
        run.pruner.score.begin(run.gates)
    tensors = tensors_of(run.model)
    for name, value in state["model"].items():
        tensors[name].copy_(value)
    for name, values in state["optimizer"].items():
        parameter = tensors[name]
        run.optimizer.state[parameter].update(
            {key: placed(run.optimizer, parameter, key, value) for key, value in values.items()}
        )
    run.trainer.scaler.load_state_dict(state["scaler"])
    for name, value in state["score"].items():
        run.pruner.score.state()[name].copy_(value)
    if run.ema is not None and state["ema"] is not None:
        for own, value in zip(run.ema.average, state["ema"], strict=True):
            own.copy_(value)
    run._keep_state()
