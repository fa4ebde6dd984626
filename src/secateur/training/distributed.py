"""Many processes that train one model, as torchrun starts them."""

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
    """The processes; a single one is a world of its own."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def current() -> World:
        """As torch.distributed has been set up, if it has."""
        if dist.is_available() and dist.is_initialized():
            return World(dist.get_rank(), dist.get_world_size())
        return World()

    @property
    def leads(self) -> bool:
        """Whether this is the process that decides and writes."""
        return self.rank == 0

    def wrap(self, model: nn.Module, partial: bool) -> nn.Module | None:
        """The model with gradients averaged over the processes; None for a single one.

        partial: a forward pass may not reach all of it.
        """
        if self.size == 1:
            return None
        if not any(p.requires_grad for p in model.parameters()):
            raise InvalidSetting("nothing of the model trains, so that there is nothing to average")
        devices = [p.device for p in model.parameters()][:1] if next(model.parameters()).is_cuda else None
        return nn.parallel.DistributedDataParallel(model, device_ids=devices, find_unused_parameters=partial)

    def can_sync(self, model: nn.Module) -> bool:
        """Whether batch norms can look at the batches of all processes: torch can do that on GPUs only."""
        return self.size > 1 and next(model.parameters()).is_cuda

    def average(self, tensor: Tensor) -> Tensor:
        """The mean over all processes, to the last bit the same for each."""
        if self.size > 1:
            # Over the device of the back end: NCCL knows no other.
            moved = tensor.detach().to(self._device(), copy=True)
            dist.all_reduce(moved)
            moved /= self.size
            dist.broadcast(moved, 0)
            tensor = moved.to(tensor.device)
        return tensor

    @torch.no_grad()
    def align_(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes what the leading one has."""
        if self.size > 1:
            for tensor in tensors:
                moved = tensor.detach().to(self._device()).contiguous()
                dist.broadcast(moved, 0)
                tensor.copy_(moved)

    def tell(self, value: Any) -> Any:
        """Plain data of the leading process, for all."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, device=self._device())
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Plain data of every process, for all."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def smallest(self, tensor: Tensor) -> Tensor:
        """The smallest value over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MIN)
        return tensor

    def any(self, number: int | None) -> int | None:
        """The largest number that a process has, if one has any."""
        if self.size > 1:
            held = torch.tensor(number or 0, device=self._device())
            dist.all_reduce(held, dist.ReduceOp.MAX)
            number = int(held) or None
        return number

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def _device(self) -> torch.device:
        cuda = dist.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def join() -> World:
    """Join the processes that torchrun has started, on CUDA if there is; a world of one without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ and "WORLD_SIZE" not in os.environ:
        return World()
    if not dist.is_initialized():
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if cuda else "gloo")
    return World.current()


@contextmanager
def worded(remedy: str) -> Iterator[None]:
    """What a process says when another one has ended, in words, with what to do then."""
    try:
        yield
    except RuntimeError as error:
        if World.current().size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise LostProcess(f"another process of this run has ended; {remedy}") from error


def leave() -> None:
    """Part from the other processes at the end."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def sync_batchnorm_(model: nn.Module) -> dict[nn.Module, type[nn.Module]]:
    """Make torch's batch norms normalise over the batches of all processes; what they were, for `unsync_batchnorm_`.

    They remain the same modules. Subclasses are left alone: what they do beside would be lost.
    """
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    before: dict[nn.Module, type[nn.Module]] = {m: type(m) for m in model.modules() if type(m) in plain}
    for module in before:
        module.__class__ = nn.SyncBatchNorm
        vars(module)["process_group"] = None
    return before


def unsync_batchnorm_(before: dict[nn.Module, type[nn.Module]]) -> None:
    """Give batch norms, without gates, their own class back."""
    for module, own in before.items():
        module.__class__ = own
        del vars(module)["process_group"]
    before.clear()
