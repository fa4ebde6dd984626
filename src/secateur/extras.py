"""Packages that only some users need."""

import importlib
from types import ModuleType

from secateur.errors import MissingExtra


def import_extra(module: str, extra: str) -> ModuleType:
    """The module, or an error with the command that installs it; `extra` is the set of optional packages."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        remedy = f'Run: pip install "secateur[{extra}]"'
        raise MissingExtra(f"{error.name} is not installed", remedy=remedy) from error
    except Exception as error:  # compiled for another torch, it may raise anything
        import torch

        what = f"{module} cannot be imported with torch {torch.__version__}"
        raise MissingExtra(what, got=error, remedy="Install matching versions of the two from one source") from error
