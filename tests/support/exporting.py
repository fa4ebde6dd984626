"""Exports of many small networks in one process."""

from collections.abc import Iterator
from functools import cache

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_table() -> Iterator[None]:
    """PyTorch reads its tables of operators, ONNX's from their sources, for every export: here once."""
    import torch._export.utils
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        once = cache(torch._export.utils._materialize_cpp_cia_ops)
        patch.setattr(torch._export.utils, "_materialize_cpp_cia_ops", once)
        yield
