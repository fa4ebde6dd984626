"""What two processes exchange, and the errors that occur because another process has ended."""

import socket
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forks import Fork, run_code
from torch import nn

from secateur.training.distributed import World, losing_processes

BEGIN = """
import os, torch, torch.distributed as dist
from torch import nn
from secateur.errors import LostProcess
from secateur.training.distributed import World, losing_processes
from secateur.training.engine import Engine
from secateur.training.loop import Trainer, Work
from secateur.training.shards import shard
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
world = World.current()
"""
GRADIENTS = """
wide = nn.Parameter(torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
single, double, frozen, never, once = (nn.Parameter(torch.zeros(2)) for _ in range(5))
double.data = double.data.double()
parameters = [wide, single, double, frozen.requires_grad_(False), never, once]
wide.grad = torch.empty_like(wide).copy_(torch.arange(48.0).view(4, 3, 2, 2) * (rank + 1))
single.grad, double.grad = torch.tensor([1.0, rank]), torch.tensor([0.1, rank], dtype=torch.float64)
world.average_gradients_(parameters)
assert torch.equal(wide.grad, torch.arange(48.0).view(4, 3, 2, 2) * 1.5)
assert wide.grad.is_contiguous(memory_format=torch.channels_last)
assert single.grad.tolist() == [1, 0.5] and double.grad.tolist() == [0.1, 0.5]
assert frozen.grad is never.grad is once.grad is None
if rank == 1:
    once.grad = torch.tensor([2.0, 4.0])
world.average_gradients_(parameters, partial=True)
assert once.grad.tolist() == [1, 2] and single.grad.tolist() == [1, 0.5]
assert frozen.grad is never.grad is None
assert [world.all(True), world.all(rank == 0), world.any(None), world.any(rank)] == [True, False, None, 1]
"""
EPOCH = """
def trained(batches, world, engine):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    seen = []
    note = lambda: seen.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    work = Work("test", loss, optimizer, rate=lambda step: 0.1, after_backward=note)
    Trainer(net, engine, world).epoch(batches, work)
    return torch.stack(seen), net

generator = torch.Generator().manual_seed(1)
sizes = (8, 7, 6, 3, 5)  # of which two divide evenly
data = [tuple(torch.randn(n, k, generator=generator).double() for k in (3, 1)) for n in sizes]
for engine in (Engine(), Engine(accumulate=2), Engine(clip_norm=0.1)):
    alone, one = trained(data, World(), engine)
    found, both = trained(shard(data, rank, 2), world, engine)
    assert len(found) == (3 if engine.accumulate == 2 else 5)
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-14)
    for mine, wanted in zip(both.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-14)
    first, second = world.gather([p.detach() for p in both.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
"""
LOST = """
parameter = nn.Parameter(torch.zeros(3))
parameter.grad = torch.ones(3)
assert world.average(torch.tensor(float(rank))) == 0.5
if rank == 1:
    os._exit(0)
lost = []
for work in (lambda: world.average(torch.ones(1)), lambda: world.average_gradients_([parameter])):
    try:
        with losing_processes("Resume"):
            work()
    except LostProcess as error:
        lost.append(error.remedy)
assert lost == ["Resume", "Resume"]
os._exit(0)
"""
STALLED = """
import os, signal
from datetime import timedelta
from secateur.errors import LostProcess
from secateur.training import distributed
distributed.PATIENCE = timedelta(seconds=3)
world = distributed.join()
world.wait()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    with distributed.losing_processes("Resume"):
        world.wait()
except LostProcess as error:
    os._exit(7 if error.remedy == "Resume" else 1)
"""


def test_two_processes(tmp_path: Path) -> None:
    code, store = BEGIN + GRADIENTS + EPOCH + LOST, tmp_path / "store"
    jobs = [Fork(partial(run_code, code, rank=rank, store=store), GLOO_SOCKET_IFNAME="lo") for rank in range(2)]
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0, 0]


def test_a_process_that_stands_still_is_not_waited_for_without_end() -> None:
    with socket.socket() as made:
        made.bind(("localhost", 0))
        port = str(made.getsockname()[1])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    jobs = [Fork(partial(run_code, STALLED, rank=rank), RANK=str(rank), **world) for rank in range(2)]
    jobs[0].join(60)
    still = jobs[1].exitcode is None
    jobs[1].kill()
    jobs[1].join()
    assert (jobs[0].exitcode, still) == (7, True)


def test_one_process_that_has_joined_does_what_several_do(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    for name in ("all_reduce", "broadcast"):
        monkeypatch.setattr(dist, name, lambda tensor, *_, name=name: sent.append(name))
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([0.1, 0.2])
    for world in (World(), World(joined=True)):
        world.average_gradients_([parameter])
        world.align_([parameter])
        assert world.all(True)
        assert sent == (["all_reduce", "broadcast", "all_reduce"] if world.joined else [])
    assert torch.equal(parameter.grad, torch.tensor([0.1, 0.2]))


def test_errors_of_the_model_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="own"), losing_processes("Resume"):
        raise RuntimeError("own")
