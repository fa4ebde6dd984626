"""Secateur: prune the channels of convolutional networks, exactly."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from secateur.channels.analyze import analyze
    from secateur.channels.groups import ChannelGraph
    from secateur.channels.plan import Plan
    from secateur.channels.shrink import shrink, shrink_
    from secateur.channels.unused import drop_unused_
    from secateur.channels.verify import verify
    from secateur.errors import (
        Diverged,
        InvalidData,
        InvalidModel,
        InvalidSetting,
        NotEquivalent,
        SecateurError,
        UnreachableBudget,
    )
    from secateur.pruning.gates import insert_gates_, merge_gates_
    from secateur.pruning.measure import measure_latency
    from secateur.pruning.pruner import Pruner
    from secateur.pruning.repair import repair
    from secateur.pruning.scores import Score
    from secateur.pruning.settings import Budget, Limits
    from secateur.recipes.jobs import Job
    from secateur.results.artifact import save
    from secateur.results.load import load
    from secateur.runs.events import Event, Result
    from secateur.runs.prune import prune, train
    from secateur.runs.settings import Ticks, TickTock, Tocks
    from secateur.training.engine import Engine
    from secateur.training.settings import Learning, Schedule, Training
    from secateur.training.task import Task, classification, segmentation

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "ChannelGraph",
    "Diverged",
    "Engine",
    "Event",
    "InvalidData",
    "InvalidModel",
    "InvalidSetting",
    "Job",
    "Learning",
    "Limits",
    "NotEquivalent",
    "Plan",
    "Pruner",
    "Result",
    "Schedule",
    "Score",
    "SecateurError",
    "Task",
    "TickTock",
    "Ticks",
    "Tocks",
    "Training",
    "UnreachableBudget",
    "analyze",
    "classification",
    "drop_unused_",
    "insert_gates_",
    "load",
    "measure_latency",
    "merge_gates_",
    "prune",
    "repair",
    "save",
    "segmentation",
    "shrink",
    "shrink_",
    "train",
    "verify",
]

# Where the public names live. They are imported on first use, so that `import secateur` does not load torch.
_HOMES = {
    "channels.analyze": ("analyze",),
    "channels.groups": ("ChannelGraph",),
    "channels.plan": ("Plan",),
    "channels.shrink": ("shrink", "shrink_"),
    "channels.unused": ("drop_unused_",),
    "channels.verify": ("verify",),
    "errors": (
        "Diverged",
        "InvalidData",
        "InvalidModel",
        "InvalidSetting",
        "NotEquivalent",
        "SecateurError",
        "UnreachableBudget",
    ),
    "pruning.gates": ("insert_gates_", "merge_gates_"),
    "pruning.measure": ("measure_latency",),
    "pruning.pruner": ("Pruner",),
    "pruning.repair": ("repair",),
    "pruning.scores": ("Score",),
    "pruning.settings": ("Budget", "Limits"),
    "recipes.jobs": ("Job",),
    "results.artifact": ("save",),
    "results.load": ("load",),
    "runs.events": ("Event", "Result"),
    "runs.prune": ("prune", "train"),
    "runs.settings": ("TickTock", "Ticks", "Tocks"),
    "training.engine": ("Engine",),
    "training.settings": ("Learning", "Schedule", "Training"),
    "training.task": ("Task", "classification", "segmentation"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'secateur' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"secateur.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
