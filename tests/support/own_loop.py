"""A training loop of a user's own that can be killed: it writes a checkpoint after some steps, and goes on from it."""

import sys
from pathlib import Path
from typing import Any

import killable
import torch
import torch.nn.functional as F

from secateur import Budget, Pruner
from secateur.data.arrays import Arrays

STEPS, EVERY, PRUNED = 60, 4, 10
"""Steps, and after how many of them the loop is saved and the network is pruned."""


def main(arguments: list[str]) -> None:
    """Train and prune; the weights and the loss of every step end in the file `done`.

    arguments: the folder, and the name of the score.
    """
    folder, score = Path(arguments[0]), arguments[1]
    torch.manual_seed(0)
    job = killable.build()
    assert isinstance(job.task.train, Arrays)
    images, labels = job.task.train.images, job.task.train.labels
    model = job.model.train()
    pruner = Pruner(model, job.example, score=score)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses: list[float] = []
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "rates": rates}
    if (folder / "saved").exists():
        saved = torch.load(folder / "saved", weights_only=True)
        pruner.load_state_dict(saved["pruner"], optimizer)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["random"])
        losses = saved["losses"]
    while len(losses) < STEPS:
        optimizer.zero_grad()
        chosen = torch.randint(len(images), (8,))
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        pruner.observe()
        pruner.add_l1_(1e-4)
        optimizer.step()
        rates.step()
        losses.append(loss.item())
        if len(losses) % PRUNED == 0:
            pruner.prune(0.1, Budget(macs=0.5), optimizer=optimizer, cut=len(losses) % (2 * PRUNED) == 0)
        if len(losses) % EVERY == 0:
            state = {name: part.state_dict() for name, part in parts.items()} | {"pruner": pruner.state_dict()}
            write(folder / "saved", {**state, "random": torch.get_rng_state(), "losses": losses})
    write(folder / "done", {"losses": losses, "model": pruner.finish().state_dict()})


def write(path: Path, state: Any) -> None:
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)


if __name__ == "__main__":
    main(sys.argv[1:])
