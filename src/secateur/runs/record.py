"""A run in a folder: what it must remember to continue, and whether a folder holds the same run."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from secateur.channels.guard import check_extra_state
from secateur.channels.shrink import copy_model, tensors_of
from secateur.errors import InvalidData, InvalidSetting, RunInUse
from secateur.files import serialize, write_atomic, write_synced
from secateur.models.weights import load_weights_
from secateur.runs.events import Event, Finished, from_dict
from secateur.runs.settings import TickTock
from secateur.settings import defaults_of
from secateur.training.checkpoint import REFUSALS, RunFolder, as_it_was, read_checkpoint, read_config
from secateur.training.settings import Training

if TYPE_CHECKING:
    from secateur.runs.run import Run

PATIENCE = 40
"""After a checkpoint that took a second there is no other for this many: they cost at most 3% of a run."""
ORIGINAL, WHOLE, START_PLAN = "original.safetensors", "whole.safetensors", "start_plan.json"
"""In the folder: the network that the run starts from; if that is already pruned, the whole one, and what was cut."""
PRUNED = "pruned"
"""The checkpoint from which a run with a smaller budget can continue."""
KINDS = {"prune": TickTock, "train": Training}
"""The settings of a run by its kind, as config.json names it."""


class Record:
    """Writes down a run, and brings one that was stopped back to where it was."""

    def __init__(self, run: Run, path: str | Path, about: dict[str, Any], compared: dict[str, Any]) -> None:
        check_extra_state(run.model)
        self.run = run
        self.path = Path(path)
        self.folder: RunFolder | None = None
        self.not_before = 0.0
        run.record = self
        with as_it_was(self.path, ORIGINAL, WHOLE, START_PLAN) if run.world.leads else nullcontext():
            try:
                self.folder = RunFolder(path) if run.world.leads else None
                self._open(about, compared)
            except BaseException:
                self.finish()
                raise

    def _open(self, about: dict[str, Any], compared: dict[str, Any]) -> None:
        """Begin, or load the last checkpoint."""
        run, state = self.run, None
        if self.folder is not None:
            engine = run.engine.to_dict()
            mine = {
                "kind": kind_of(run.settings),
                "settings": run.settings.to_dict(),
                "engine": {name: engine[name] for name in ("accumulate", "clip_norm", "precision")},
                "channels": [[group.name, group.size] for group in run.graph.groups],
                "example": self._sizes(),
                "weights": hashlib.sha256(serialize(self._given())).hexdigest(),
                **compared,
            }
            if (self.path / "config.json").exists():
                check_same(self.folder.read_config(), mine, self.path)
                check_can_resume(self.path)
                state = self.folder.load()
            else:
                self._begin(mine, {**about, "engine": engine})
        state = run.world.tell(state)
        if state is not None:
            events = run.world.tell(self.folder and self.folder.read_events())
            try:
                run.history = [from_dict(event) for event in events]
            except (AttributeError, KeyError, TypeError) as error:
                raise InvalidData(f"{self.path / 'events.jsonl'} holds what is no event of a run: {error}") from error
            run.load_state_dict(state)

    def _given(self) -> dict[str, Tensor]:
        """The tensors of the network that the run starts from."""
        run = self.run
        return tensors_of(run.whole if run.started_whole and run.whole is not None else run.model)

    def _begin(self, mine: dict[str, Any], about: dict[str, Any]) -> None:
        run, folder = self.run, self.folder
        assert folder is not None
        folder.write(ORIGINAL, serialize(self._given()))
        if not run.started_whole:
            folder.write(START_PLAN, run.started_with.to_json())
            if run.whole is not None:
                folder.write(WHOLE, serialize(tensors_of(run.whole)))
        graph = run.graph
        folder.write_config({**mine, **about, "layers": graph.widths, "macs": graph.macs, "batches": run.num_batches})

    def _sizes(self) -> list[list[int]]:
        """The shapes of the example that the network was analysed with, without the batch."""
        examples = self.run.graph.calls.get("eval", ())[:1]
        return [list(tensor.shape[1:]) for example in examples for tensor in example.tensors]

    def note(self, event: Event) -> None:
        if self.folder is not None and not isinstance(event, Finished):
            self.folder.append_event(event.to_dict())

    def save(self, needed: bool) -> None:
        """Write a checkpoint, unless the last one is recent and this one is not needed."""
        now = time.perf_counter()
        if not self.run.world.tell(needed or now >= self.not_before):
            return
        self.run.align_()  # as it will be when the run is resumed
        if self.folder is not None:
            self.folder.save(self.run.state_dict())
            self.not_before = time.perf_counter() + PATIENCE * (time.perf_counter() - now)
        self.run.world.wait()

    def keep_pruned(self, state: dict[str, Any]) -> None:
        """Keep the checkpoint from which a run with a smaller budget can continue."""
        if self.folder is not None:
            self.folder.save(state, PRUNED)

    def keep_network(self, phase: str) -> None:
        """Keep the whole network that a phase has trained."""
        if self.folder is not None:
            self.folder.write(f"{phase}.safetensors", serialize(tensors_of(self.run.model)))
        self.run.world.wait()

    def load_network(self, phase: str, model: nn.Module) -> None:
        """Give the model the weights that `keep_network` has kept; its tensors keep their memory formats."""
        read = copy_model(model)
        load_weights_(read, self.path / f"{phase}.safetensors", exact=True)
        kept = tensors_of(read)
        for name, tensor in tensors_of(model).items():
            tensor.data.copy_(kept[name])

    def finish(self) -> None:
        if self.folder is not None:
            self.folder.close()


def kind_of(settings: TickTock | Training) -> str:
    return next(kind for kind, settings_class in KINDS.items() if isinstance(settings, settings_class))


def read_settings(config: dict[str, Any], path: Path) -> TickTock | Training:
    """The settings that config.json holds."""
    try:
        return KINDS[config["kind"]].of(**config["settings"])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        remedy = "Start a new run in another folder"
        raise InvalidData(
            f"{path / 'config.json'} is damaged, or of another version: {error}", remedy=remedy
        ) from error


def differences(begun: Any, wanted: Any, name: str = "") -> list[str]:
    """The names of the values in `wanted` that are others in `begun`; what `wanted` does not name is not compared.

    >>> differences({"settings": {"seed": 1, "lr": 0.1}, "kind": "train"}, {"settings": {"seed": 2, "lr": 0.1}})
    ['seed']
    """
    if isinstance(wanted, dict) and isinstance(begun, dict):
        return [other for key in wanted for other in differences(begun.get(key), wanted[key], key)]
    return [] if begun == wanted else [name]


def check_same(begun: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    """Raise if a folder holds another run than the one that is wanted."""
    wanted = json.loads(json.dumps(wanted))
    if begun.get("kind") in KINDS and isinstance(begun.get("settings"), dict):
        # Settings that were not there when the run began.
        begun = {
            **begun,
            "settings": {**json.loads(json.dumps(defaults_of(KINDS[begun["kind"]]))), **begun["settings"]},
        }
    if other := differences(begun, wanted):
        raise InvalidSetting(
            f"{path} holds another run",
            got=f"other {', '.join(other)}",
            remedy="Resume it with what it was started with, or choose another folder",
        )


def check_can_resume(path: Path) -> None:
    """Raise if a run is finished and cannot be resumed: it would begin again, and its events would be lost."""
    checkpoints = (path / "checkpoints").glob("*")
    if (path / "result" / "summary.json").is_file() and not any(each.name.isdigit() for each in checkpoints):
        remedy = f"Its result is in {path / 'result'}: secateur.load reads it"
        raise InvalidSetting(f"{path} is finished, and its checkpoints are gone", remedy=remedy)


def continue_run(source: str | Path, target: str | Path, settings: TickTock) -> None:
    """Make a folder in which the same call as for `source`, with these settings, continues from the end of its pruning.

    `source` stays as it is. The settings may have a smaller budget and differ in what follows; the optimizer and the
    kind of gates stay.
    """
    source, target = Path(source), Path(target)
    config, kept = read_config(source), source / "checkpoints" / PRUNED
    before = read_settings(config, source)
    if not isinstance(before, TickTock) or not kept.is_dir():
        raise InvalidSetting(
            f"{source} has no checkpoint of the end of its pruning", remedy="Let it finish first, or prune anew"
        )
    fixed = ("optimizer", "filter_scale", "retrain_epochs")
    if other := [name for name in fixed if before.to_dict()[name] != settings.to_dict()[name]]:
        raise InvalidSetting(f"{source} was pruned with other settings", got=f"another {', '.join(other)}")
    if (target / "config.json").exists():
        raise InvalidSetting(f"{target} holds a run already", remedy="Resume that, or choose another folder")
    files = _files_of(source)
    with (
        as_it_was(target, *(path.name for path in files)),
        RunFolder(target) as folder,
        (source / "events.jsonl").open("rb") as events,
    ):
        try:
            _, length = read_checkpoint(kept, events.fileno())
        except REFUSALS as error:
            raise InvalidData(f"{kept} is damaged: {error}", remedy="Prune the whole network anew") from error
        lines = events.read(length)
        _check_smaller(source, settings, lines)
        write_synced(target / "events.jsonl", lines)
        for path in files:
            write_atomic(target / path.name, partial(shutil.copyfile, path))
        for path in kept.iterdir():
            write_atomic(target / "checkpoints" / f"{1:08}" / path.name, partial(shutil.copyfile, path))
        folder.write_config({**config, "settings": settings.to_dict()})


@contextmanager
def continued(source: str | Path, target: str | Path, settings: Any) -> Iterator[None]:
    """`continue_run`; if the run cannot start then, remove what was put into the folder."""
    source, target = Path(source), Path(target)
    with as_it_was(target, *(path.name for path in _files_of(source))):
        continue_run(source, target, settings)
        try:
            yield
        except RunInUse:
            raise  # another process has taken it up
        except BaseException:
            (target / "config.json").unlink(missing_ok=True)
            shutil.rmtree(target / "checkpoints", ignore_errors=True)
            raise


def _files_of(source: Path) -> list[Path]:
    """What a run that continues another needs of it, beside its checkpoint."""
    return [file for pattern in ("*.safetensors", "latency.json", "split.json") for file in source.glob(pattern)]


def _check_smaller(source: Path, settings: TickTock, lines: bytes) -> None:
    """Raise if the budget leaves nothing to remove."""
    try:
        history = [from_dict(json.loads(line)) for line in lines.splitlines()]
        first, last = history[0], history[-1]
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise InvalidData(f"{source / 'events.jsonl'} is damaged: {error}", remedy="Prune anew") from error
    counts, share = settings.budget.counts, settings.budget.share
    left = getattr(last, counts, 0) / max(1, getattr(first, counts, 0))
    if counts != "latency" and share >= left:
        what = f"{source} is already smaller than the budget"
        raise InvalidSetting(what, got=f"{left:.1%} of the {settings.budget.unit}", wanted=f"a budget below {left:.1%}")
