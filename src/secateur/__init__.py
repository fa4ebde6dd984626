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
        InvalidPlan,
        MissingExtra,
        NotEquivalent,
        SecateurError,
        UnknownName,
    )

__version__ = "0.1.0"

__all__ = [
    "ChannelGraph",
    "ChannelGroup",
    "Cost",
    "FrozenChannels",
    "InvalidExample",
    "InvalidModel",
    "InvalidPlan",
    "Member",
    "MissingExtra",
    "NotEquivalent",
    "Plan",
    "SecateurError",
    "UnknownName",
    "Verification",
    "analyze",
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
    "InvalidExample": "errors",
    "InvalidModel": "errors",
    "InvalidPlan": "errors",
    "Member": "channels.groups",
    "MissingExtra": "errors",
    "NotEquivalent": "errors",
    "Plan": "channels.plan",
    "SecateurError": "errors",
    "UnknownName": "errors",
    "Verification": "channels.verify",
    "analyze": "channels.analyze",
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
