"""One of two processes that train together: python one_of_two.py RANK FOLDER; leaves its gradients in the folder."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from gated import IMAGE, gate, network
from torch.nn.parallel import DistributedDataParallel


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = network().eval()
    gates = gate(model)
    wrapped = DistributedDataParallel(model)
    wrapped(IMAGE.chunk(2)[rank]).square().mean().backward()
    torch.save([phi.grad for phi in gates.phis], folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
