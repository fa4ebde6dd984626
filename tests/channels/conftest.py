"""A network with a layer of every common kind, and a plan that cuts most of them."""

import pytest
from layers import PICTURES, network
from torch import nn

import secateur
from secateur import Plan


@pytest.fixture
def model() -> nn.Sequential:
    return network()


@pytest.fixture
def plan(model: nn.Sequential) -> Plan:
    return Plan.keep(secateur.analyze(model, PICTURES), {"0": [1, 2, 5], "4": [0, 3], "8": [0, 1, 7, 9]})
