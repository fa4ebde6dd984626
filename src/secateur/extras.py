"""Packages that only some users need."""

import importlib
from types import ModuleType

from secateur.errors import MissingExtra


def import_extra(module: str, extra: str) -> ModuleType:
    """The module, or an error that says how to get it; `extra` is the set of optional packages that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(f'{error.name} is not installed; run: pip install "secateur[{extra}]"') from error
    except Exception as error:  # compiled for another torch, it fails in ways of its own
        import torch

        raise MissingExtra(
            f"{module} does not import beside torch {torch.__version__} ({error}); install the two"
            " from the same place, in versions that fit each other"
        ) from error
