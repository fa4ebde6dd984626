"""One result for all tests of this folder that do not change it."""

import pytest
import torch
from exporting import one_table  # noqa: F401
from one_result import build

import secateur


@pytest.fixture(scope="package")
def result() -> secateur.Result:
    model = build()
    data = [(torch.randn(8, 1, 8, 8), torch.arange(8) % 3) for _ in range(2)]
    settings = secateur.TickTock.one_shot(keep_macs=0.5, finetune_epochs=1, seed=3)
    return secateur.prune(model, data[0][0][:1], secateur.classification(data, data), settings=settings)
