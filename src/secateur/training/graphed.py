"""A training step captured as a CUDA graph, which launches hundreds of kernels with one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from secateur.nested import map_tensors

WARM_UP = 3


class GraphedStep:
    """Replays `step` for batches of one shape.

    step: a whole training step of the model that reads its batch and writes to tensors only.
    forward: its forward pass.
    others: every tensor that it writes to, apart from the model's and the optimizer's. Capturing leaves all unchanged.
    """

    def __init__(
        self,
        step: Callable[[Any], None],
        forward: Callable[[Any], None],
        batch: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        others: list[Tensor],
    ) -> None:
        self.inputs = map_tensors(batch, torch.clone)
        self.graph = torch.cuda.CUDAGraph()
        random = torch.cuda.get_rng_state()
        known = [*model.parameters(), *model.buffers(), *others, *_state_of(optimizer)]
        saved = [tensor.detach().clone() for tensor in known]
        counters = Counters(model)
        stream = torch.cuda.Stream()
        try:
            forward(self.inputs)
            counters.learn()
            stream.wait_stream(torch.cuda.current_stream())
            # A model that was compiled with its counters would be compiled again without, which a capture forbids.
            with torch.cuda.stream(stream), counters.taken_over():
                for _ in range(WARM_UP):
                    step(self.inputs)
        finally:
            torch.cuda.current_stream().wait_stream(stream)
            with torch.no_grad():
                for tensor, before in zip(known, saved, strict=True):
                    tensor.copy_(before)
                before = {id(tensor) for tensor in known}
                for tensor in _state_of(optimizer):
                    if id(tensor) not in before:
                        tensor.zero_()  # made by the warm-up; the optimizers that are captured start at zero
            torch.cuda.set_rng_state(random)
        outside = torch.cuda.current_stream()
        try:
            with counters.taken_over(), torch.cuda.graph(self.graph):
                step(self.inputs)
                counters.advance()
        except RuntimeError:
            _leave_capture(outside)
            raise

    @staticmethod
    def can_hold(batch: Any) -> bool:
        """Whether the batch consists of tensors on a GPU only."""
        leaves = leaves_of(batch)
        return bool(leaves) and all(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves)

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


class Counters:
    """The norms' counters of batches, advanced together instead of by one kernel each."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [
            module
            for module in model.modules()
            if isinstance(module, _NormBase) and module.num_batches_tracked is not None and module.momentum is not None
        ]
        self.counters: list[Tensor] = [module.num_batches_tracked for module in self.modules]  # pyright: ignore
        self.before = [counter.clone() for counter in self.counters]

    def learn(self) -> None:
        """Find out from a forward pass how far a step advances each."""
        passed = torch.stack(self.counters) - torch.stack(self.before) if self.counters else torch.zeros(0)
        self.advances = passed.tolist()

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """Keep the norms from counting."""
        for module in self.modules:
            module._buffers["num_batches_tracked"] = None
        try:
            yield
        finally:
            for module, counter in zip(self.modules, self.counters, strict=True):
                module._buffers["num_batches_tracked"] = counter

    def advance(self) -> None:
        if self.counters:
            torch._foreach_add_(self.counters, self.advances)  # pyright: ignore[reportPrivateImportUsage]


def leaves_of(value: Any) -> list[Any]:
    """Everything within tuples, lists and dicts, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves_of(item)]
    return [value]


def _leave_capture(outside: torch.cuda.Stream) -> None:
    """End a failed capture: torch's generators, and perhaps the stream, stay in it until another one succeeds."""
    torch.cuda.set_stream(outside)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")


def _state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
