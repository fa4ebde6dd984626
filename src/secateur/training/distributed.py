"""Several processes that train one model, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secateur.errors import LostProcess

PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others. The leading one evaluates meanwhile, which takes minutes."""


@dataclass(frozen=True)
class World:
    """The processes of a run; a single process is a world of size 1."""

    rank: int = 0
    size: int = 1
    joined: bool = False
    """Whether torch.distributed is set up; then a single process does what each of several would."""

    @staticmethod
    def current() -> World:
        """As torch.distributed is set up, if it is."""
        if dist.is_available() and dist.is_initialized():
            return World(dist.get_rank(), dist.get_world_size(), joined=True)
        return World()

    @property
    def leads(self) -> bool:
        """Whether this process decides and writes files."""
        return self.rank == 0

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold what the processes exchange."""
        return not self.joined or dist.get_backend() == "nccl"

    def can_sync(self, model: nn.Module) -> bool:
        """Whether batch norms can use the batches of all processes, which torch supports on GPUs only."""
        return self.size > 1 and next(model.parameters()).is_cuda

    @torch.no_grad()
    def average_gradients_(self, parameters: Iterable[nn.Parameter], partial: bool = False) -> None:
        """Give every process the mean gradients of all.

        partial: the processes may have used other parameters each. What only some have used has a gradient of zeros in
        the others; what none has used has none.
        """
        if not self.joined:
            return
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if partial:
            used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=self._device())
            with _collective():
                dist.all_reduce(used, dist.ReduceOp.MAX)
            for parameter, somewhere in zip(parameters, used.tolist(), strict=True):
                if somewhere and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        self.average_([parameter.grad for parameter in parameters if parameter.grad is not None])

    @torch.no_grad()
    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over all processes, bit-identical in each: one message for each dtype.

        With NCCL all is done on the device, so that a CUDA graph can hold it. The same tensor must have the same memory
        format in all processes.
        """
        if not self.joined:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            part = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.empty(sum(t.numel() for t in part), dtype=dtype, device=self._device())
            places = _views(flat, part)
            torch._foreach_copy_(places, part)  # pyright: ignore[reportPrivateImportUsage]
            flat *= 1 / self.size
            with _collective():
                dist.all_reduce(flat)
            torch._foreach_copy_(part, places)  # pyright: ignore[reportPrivateImportUsage]

    def average(self, tensor: Tensor) -> Tensor:
        """The mean over all processes, bit-identical in each."""
        if self.joined:
            # On the device of the back end; NCCL knows no other.
            moved = tensor.detach().to(self._device(), copy=True)
            with _collective():
                dist.all_reduce(moved)
                moved /= self.size
                dist.broadcast(moved, 0)
            tensor = moved.to(tensor.device)
        return tensor

    @torch.no_grad()
    def align_(self, tensors: Iterable[Tensor]) -> None:
        """Copy the leading process's tensors to all others."""
        if self.joined:
            for tensor in tensors:
                moved = tensor.detach().to(self._device()).contiguous()
                with _collective():
                    dist.broadcast(moved, 0)
                tensor.copy_(moved)

    def tell(self, value: Any) -> Any:
        """The leading process's plain data, in every process."""
        if not self.joined:
            return value
        box = [value]
        with _collective():
            dist.broadcast_object_list(box, 0, device=self._device())
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every process's plain data, in every process."""
        values = [value] * self.size
        if self.joined:
            with _collective():
                dist.all_gather_object(values, value)
        return values

    def smallest(self, tensor: Tensor) -> Tensor:
        """The smallest value over all processes, in place."""
        if self.joined:
            with _collective():
                dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return tensor

    def any(self, number: int | None) -> int | None:
        """The largest number that any process has, or None."""
        if self.joined:
            held = torch.tensor(number or 0, device=self._device())
            with _collective():
                dist.all_reduce(held, dist.ReduceOp.MAX)
            number = int(held) or None
        return number

    def all(self, holds: bool) -> bool:
        """Whether it holds in every process."""
        return self.any(None if holds else 1) is None

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.joined:
            with _collective():
                dist.barrier()

    def _device(self) -> torch.device:
        cuda = dist.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def join() -> World:
    """Join the processes that torchrun has started, on CUDA if there is one; a world of size 1 without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ and "WORLD_SIZE" not in os.environ:
        return World()
    if not dist.is_initialized():
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            # Processes would tell each other of buffers while they capture, and wait for one that has failed to.
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        dist.init_process_group("nccl" if cuda else "gloo", timeout=PATIENCE)
    return World.current()


@contextmanager
def losing_processes(remedy: str) -> Iterator[None]:
    """Raise `LostProcess` with this remedy for errors that occur because another process has ended or stands still."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError | _LostConnection):
            raise
        minutes = int(PATIENCE.total_seconds() // 60)
        what = f"another process of this run has ended, or has not answered for {minutes} minutes"
        raise LostProcess(what, remedy=remedy) from error


class _LostConnection(RuntimeError):
    """A collective operation has failed."""


@contextmanager
def _collective() -> Iterator[None]:
    try:
        yield
    except dist.DistError:
        raise
    except RuntimeError as error:
        raise _LostConnection(str(error)) from error


def _views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Parts of `flat`, each as large as a tensor and in its memory format, which copies are fastest between."""
    ends = accumulate(tensor.numel() for tensor in tensors)
    return [
        flat.as_strided(t.shape, torch.empty_like(t, device="meta").stride(), end - t.numel())
        for t, end in zip(tensors, ends, strict=True)
    ]


def leave() -> None:
    """Leave the other processes at the end."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def sync_batchnorm_(model: nn.Module) -> dict[nn.Module, type[nn.Module]]:
    """Let torch's batch norms normalise over the batches of all processes; returns their classes for
    `unsync_batchnorm_`.

    They remain the same modules. Subclasses stay as they are, since what they add would be lost.
    """
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    before: dict[nn.Module, type[nn.Module]] = {m: type(m) for m in model.modules() if type(m) in plain}
    for module in before:
        module.__class__ = nn.SyncBatchNorm
        vars(module)["process_group"] = None
    return before


def unsync_batchnorm_(before: dict[nn.Module, type[nn.Module]]) -> None:
    """Give batch norms, without gates, their own classes back."""
    for module, own in before.items():
        module.__class__ = own
        del vars(module)["process_group"]
    before.clear()
