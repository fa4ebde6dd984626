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
        InvalidExample,
        InvalidModel,
        InvalidOptimizer,
        InvalidPlan,
        InvalidSetting,
        InvalidTask,
        MissingExtra,
        NotEquivalent,
        SecateurError,
        UnknownName,
        UnreachableBudget,
    )
    from secateur.pruning.gates import Gates, insert_gates_, merge_gates_
    from secateur.pruning.pruner import Pruner, Removal
    from secateur.pruning.scores import Oracle, Score

__version__ = "0.1.0"

__all__ = [
    "ChannelGraph",
    "ChannelGroup",
    "Cost",
    "FrozenChannels",
    "Gates",
    "InvalidExample",
    "InvalidModel",
    "InvalidOptimizer",
    "InvalidPlan",
    "InvalidSetting",
    "InvalidTask",
    "Member",
    "MissingExtra",
    "NotEquivalent",
    "Oracle",
    "Plan",
    "Pruner",
    "Removal",
    "Score",
    "SecateurError",
    "UnknownName",
    "UnreachableBudget",
    "Verification",
    "analyze",
    "insert_gates_",
    "merge_gates_",
    "shrink",
    "shrink_",
    "verify",
]

# Where each public name lives; resolved on first use, so that `import secateur` does not load torch.
_HOME = {
    "ChannelGraph": "channels.groups",
    "ChannelGroup": "channels.groups",
    "Cost": "channels.cost",
    "FrozenChannels": "channels.groups",
    "Gates": "pruning.gates",
    "InvalidExample": "errors",
    "InvalidModel": "errors",
    "InvalidOptimizer": "errors",
    "InvalidPlan": "errors",
    "InvalidSetting": "errors",
    "InvalidTask": "errors",
    "Member": "channels.groups",
    "MissingExtra": "errors",
    "NotEquivalent": "errors",
    "Oracle": "pruning.scores",
    "Plan": "channels.plan",
    "Pruner": "pruning.pruner",
    "Removal": "pruning.pruner",
    "Score": "pruning.scores",
    "SecateurError": "errors",
    "UnknownName": "errors",
    "UnreachableBudget": "errors",
    "Verification": "channels.verify",
    "analyze": "channels.analyze",
    "insert_gates_": "pruning.gates",
    "merge_gates_": "pruning.gates",
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
