"""A training step captured as a CUDA graph: hundreds of kernels started by one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from secateur.training.batches import map_tensors

WARM_UP = 3


class GraphedStep:
    """Replays `step` for batches of one shape.

    step: a whole training step that reads its batch and writes to tensors only.
    kept: every tensor it writes to beside the optimizer's; they are left as they were before the warm-up.
    """

    def __init__(
        self, step: Callable[[Any], None], batch: Any, kept: list[Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        self.inputs = map_tensors(batch, torch.clone)
        self.graph = torch.cuda.CUDAGraph()
        random = torch.cuda.get_rng_state()
        known = [*kept, *_state_of(optimizer)]
        saved = [tensor.detach().clone() for tensor in known]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step(self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            for tensor, before in zip(known, saved, strict=True):
                tensor.copy_(before)
            before = {id(tensor) for tensor in known}
            for tensor in _state_of(optimizer):
                if id(tensor) not in before:
                    tensor.zero_()  # made by the warm-up; optimizers start theirs at zero
        torch.cuda.set_rng_state(random)
        with torch.cuda.graph(self.graph):
            step(self.inputs)

    @staticmethod
    def can_hold(batch: Any) -> bool:
        """Whether the batch is tensors on a GPU and nothing that Python would look at."""
        tensors = leaves_of(batch)
        return bool(tensors) and all(isinstance(t, Tensor) and t.is_cuda for t in tensors)

    def fits(self, batch: Any) -> bool:
        """Whether this batch has the shapes that were captured."""
        mine, theirs = leaves_of(self.inputs), leaves_of(batch)
        return len(mine) == len(theirs) and all(
            isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
            for a, b in zip(mine, theirs, strict=True)
        )

    def __call__(self, batch: Any) -> None:
        for own, given in zip(leaves_of(self.inputs), leaves_of(batch), strict=True):
            own.copy_(given, non_blocking=True)
        self.graph.replay()


def leaves_of(value: Any) -> list[Any]:
    """Everything in the nest that is no tuple, list or dict, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves_of(item)]
    return [value]


def _state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
