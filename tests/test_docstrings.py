"""The examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import secateur

MODULES = [m.name for m in pkgutil.walk_packages(secateur.__path__, "secateur.") if not m.name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    torch.manual_seed(0)
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0
