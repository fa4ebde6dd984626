"""Secateur: prune the channels of convolutional networks, exactly."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from secateur.channels.analyze import analyze
    from secateur.channels.cost import Cost
    from secateur.channels.groups import ChannelGraph, ChannelGroup, FrozenChannels, Member
    from secateur.channels.plan import Plan
    from secateur.channels.shrink import shrink, shrink_
    from secateur.channels.verify import Verification, verify
    from secateur.errors import (
        CannotExport,
        DamagedResult,
        DamagedRun,
        Diverged,
        Interrupted,
        InvalidArgument,
        InvalidData,
        InvalidExample,
        InvalidModel,
        InvalidOptimizer,
        InvalidPlan,
        InvalidSetting,
        InvalidTask,
        MissingExtra,
        NonFiniteLoss,
        NotEquivalent,
        RunInUse,
        SecateurError,
        UnknownName,
        UnreachableBudget,
    )
    from secateur.pruning.gates import Gates, insert_gates_, merge_gates_
    from secateur.pruning.latency import LatencyTable, measure_latency
    from secateur.pruning.pruner import Pruner, Removal
    from secateur.pruning.scores import Oracle, Score
    from secateur.recipes.jobs import Job
    from secateur.results.artifact import save
    from secateur.results.load import load
    from secateur.runs.events import Event, FineTune, Finished, Result, Start, Tick, Tock
    from secateur.runs.record import prune_further
    from secateur.runs.settings import TickTock
    from secateur.training.distributed import World
    from secateur.training.engine import Engine
    from secateur.training.task import Task, classification, segmentation

__version__ = "0.1.0"

__all__ = [
    "CannotExport",
    "ChannelGraph",
    "ChannelGroup",
    "Cost",
    "DamagedResult",
    "DamagedRun",
    "Diverged",
    "Engine",
    "Event",
    "FineTune",
    "Finished",
    "FrozenChannels",
    "Gates",
    "Interrupted",
    "InvalidArgument",
    "InvalidData",
    "InvalidExample",
    "InvalidModel",
    "InvalidOptimizer",
    "InvalidPlan",
    "InvalidSetting",
    "InvalidTask",
    "Job",
    "LatencyTable",
    "Member",
    "MissingExtra",
    "NonFiniteLoss",
    "NotEquivalent",
    "Oracle",
    "Plan",
    "Pruner",
    "Removal",
    "Result",
    "RunInUse",
    "Score",
    "SecateurError",
    "Start",
    "Task",
    "Tick",
    "TickTock",
    "Tock",
    "UnknownName",
    "UnreachableBudget",
    "Verification",
    "World",
    "analyze",
    "classification",
    "insert_gates_",
    "load",
    "measure_latency",
    "merge_gates_",
    "prune_further",
    "save",
    "segmentation",
    "shrink",
    "shrink_",
    "verify",
]

# Where each public name lives; resolved on first use, so that `import secateur` does not load torch.
_HOME = {
    "ChannelGraph": "channels.groups",
    "ChannelGroup": "channels.groups",
    "Cost": "channels.cost",
    "CannotExport": "errors",
    "DamagedResult": "errors",
    "DamagedRun": "errors",
    "Diverged": "errors",
    "Engine": "training.engine",
    "Event": "runs.events",
    "FineTune": "runs.events",
    "Finished": "runs.events",
    "FrozenChannels": "channels.groups",
    "Gates": "pruning.gates",
    "Interrupted": "errors",
    "InvalidArgument": "errors",
    "InvalidExample": "errors",
    "InvalidModel": "errors",
    "InvalidOptimizer": "errors",
    "InvalidPlan": "errors",
    "InvalidSetting": "errors",
    "InvalidData": "errors",
    "InvalidTask": "errors",
    "Job": "recipes.jobs",
    "Member": "channels.groups",
    "MissingExtra": "errors",
    "NonFiniteLoss": "errors",
    "NotEquivalent": "errors",
    "Oracle": "pruning.scores",
    "Plan": "channels.plan",
    "Pruner": "pruning.pruner",
    "Removal": "pruning.pruner",
    "Result": "runs.events",
    "RunInUse": "errors",
    "Score": "pruning.scores",
    "SecateurError": "errors",
    "Start": "runs.events",
    "Task": "training.task",
    "Tick": "runs.events",
    "TickTock": "runs.settings",
    "prune": "runs.prune",
    "train": "runs.prune",
    "Tock": "runs.events",
    "UnknownName": "errors",
    "UnreachableBudget": "errors",
    "Verification": "channels.verify",
    "World": "training.distributed",
    "analyze": "channels.analyze",
    "classification": "training.task",
    "insert_gates_": "pruning.gates",
    "merge_gates_": "pruning.gates",
    "LatencyTable": "pruning.latency",
    "load": "results.load",
    "measure_latency": "pruning.latency",
    "continue_run": "runs.record",
    "save": "results.artifact",
    "segmentation": "training.task",
    "shrink": "channels.shrink",
    "shrink_": "channels.shrink",
    "verify": "channels.verify",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'secateur' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"secateur.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
