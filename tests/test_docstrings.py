"""The examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import secateur

MODULES = [m.name for m in pkgutil.walk_packages(secateur.__path__, "secateur.") if not m.name.endswith("__main__")]
SLOW = {"secateur.integrations.lightning", "secateur.integrations.transformers"}
"""Their packages take long to import."""


@pytest.mark.parametrize("name", [pytest.param(m, marks=pytest.mark.slow) if m in SLOW else m for m in MODULES])
def test_examples_in_docstrings(name: str) -> None:
    torch.manual_seed(0)
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0
