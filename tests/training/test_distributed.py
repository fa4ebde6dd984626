"""Errors that occur because another process has ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from secateur.training.distributed import losing_processes

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from secateur.errors import LostProcess
from secateur.training.distributed import World, losing_processes
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
world, model = World.current(), torch.nn.Linear(3, 2)
wrapped = world.wrap(model, partial=False)
wrapped(torch.ones(1, 3) * (rank + 1)).sum().backward()
assert model.weight.grad.unique().tolist() == [1.5]
assert world.average(torch.tensor(float(rank))) == 0.5
loss = wrapped(torch.ones(1, 3)).sum()
if rank == 1:
    os._exit(0)
lost = []
for work in (lambda: world.average(torch.ones(1)), loss.backward):
    try:
        with losing_processes("Resume"):
            work()
    except LostProcess as error:
        lost.append(error.remedy)
assert lost == ["Resume", "Resume"]
os._exit(3)
"""


def test_the_end_of_another_process_has_an_error_of_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    jobs = [subprocess.Popen([*command, str(r), str(tmp_path / "store")], env=environment) for r in range(2)]
    assert [job.wait(60) for job in jobs] == [3, 0]


def test_errors_of_the_model_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="own"), losing_processes("Resume"):
        raise RuntimeError("own")
