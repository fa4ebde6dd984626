"""Many processes that train one model, as torchrun starts them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secateur.errors import InvalidSetting


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

    def wrap(self, model: nn.Module) -> nn.Module | None:
        """The model with gradients averaged over the processes; None for a single one."""
        if self.size == 1:
            return None
        if not any(p.requires_grad for p in model.parameters()):
            raise InvalidSetting("nothing of the model trains, so that there is nothing to average")
        devices = [p.device for p in model.parameters()][:1] if next(model.parameters()).is_cuda else None
        # Layers that a batch does not reach, as auxiliary heads, would make torch wait for ever.
        return nn.parallel.DistributedDataParallel(model, device_ids=devices, find_unused_parameters=True)

    def agree(self, tensor: Tensor) -> Tensor:
        """What the leading process has."""
        if self.size > 1:
            # Over the device of the back end: NCCL knows no other.
            moved = tensor.to(self._device())
            dist.broadcast(moved, 0)
            tensor = moved.to(tensor.device)
        return tensor

    def tell(self, value: Any) -> Any:
        """Plain data of the leading process, for all."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, device=self._device())
        return box[0]

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest value over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

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
