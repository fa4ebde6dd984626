"""Several processes that train one model, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secateur.errors import InvalidSetting, LostProcess


@dataclass(frozen=True)
class World:
    """The processes of a run; a single process is a world of size 1."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def current() -> World:
        """As torch.distributed is set up, if it is."""
        if dist.is_available() and dist.is_initialized():
            return World(dist.get_rank(), dist.get_world_size())
        return World()

    @property
    def leads(self) -> bool:
        """Whether this process decides and writes files."""
        return self.rank == 0

    def wrap(self, model: nn.Module, partial: bool) -> nn.Module | None:
        """The model with gradients averaged over the processes; None in a world of size 1.

        partial: a forward pass may not use all parameters.
        """
        if self.size == 1:
            return None
        if not any(p.requires_grad for p in model.parameters()):
            raise InvalidSetting("no parameter of the model is trained, so there is no gradient to average")
        devices = [p.device for p in model.parameters()][:1] if next(model.parameters()).is_cuda else None
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=devices, find_unused_parameters=partial)
        if dist.get_backend() == "gloo":  # its errors have no type of their own; those of NCCL have
            wrapped.register_comm_hook(None, _average_gradients)
        return wrapped

    def can_sync(self, model: nn.Module) -> bool:
        """Whether batch norms can use the batches of all processes, which torch supports on GPUs only."""
        return self.size > 1 and next(model.parameters()).is_cuda

    def average(self, tensor: Tensor) -> Tensor:
        """The mean over all processes, bit-identical in each."""
        if self.size > 1:
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
        if self.size > 1:
            for tensor in tensors:
                moved = tensor.detach().to(self._device()).contiguous()
                with _collective():
                    dist.broadcast(moved, 0)
                tensor.copy_(moved)

    def tell(self, value: Any) -> Any:
        """The leading process's plain data, in every process."""
        if self.size == 1:
            return value
        box = [value]
        with _collective():
            dist.broadcast_object_list(box, 0, device=self._device())
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every process's plain data, in every process."""
        values = [value] * self.size
        if self.size > 1:
            with _collective():
                dist.all_gather_object(values, value)
        return values

    def smallest(self, tensor: Tensor) -> Tensor:
        """The smallest value over all processes, in place."""
        if self.size > 1:
            with _collective():
                dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return tensor

    def any(self, number: int | None) -> int | None:
        """The largest number that any process has, or None."""
        if self.size > 1:
            held = torch.tensor(number or 0, device=self._device())
            with _collective():
                dist.all_reduce(held, dist.ReduceOp.MAX)
            number = int(held) or None
        return number

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
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
        dist.init_process_group("nccl" if cuda else "gloo")
    return World.current()


@contextmanager
def losing_processes(remedy: str) -> Iterator[None]:
    """Raise `LostProcess` with this remedy for errors that occur because another process has ended."""
    try:
        yield
    except RuntimeError as error:
        if not _failures and not isinstance(error, dist.DistError | _LostConnection):
            raise
        raise LostProcess("another process of this run has ended", remedy=remedy) from error


class _LostConnection(RuntimeError):
    """A collective operation has failed."""


_failures: list[BaseException] = []
"""Of collective operations in a backward pass, which reraises them as plain runtime errors."""


@contextmanager
def _collective() -> Iterator[None]:
    try:
        yield
    except dist.DistError:
        raise
    except RuntimeError as error:
        raise _LostConnection(str(error)) from error


def _average_gradients(state, bucket):  # torch checks annotations, and does not know them as text
    """As DistributedDataParallel does by itself, and note a failure."""
    gradients = bucket.buffer().mul_(1 / dist.get_world_size())
    work: Any = dist.all_reduce(gradients, async_op=True)

    def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        try:
            return future.value()[0]
        except RuntimeError as error:
            _failures.append(error)
            raise

    return work.get_future().then(finish)


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
