"""Any task: a toy detector with two heads, one for the class and one for the box, pruned to half of its MACs.

A task is a loss over the model and a batch, and metrics over the model. Nothing else is asked of the model: here it
returns a dict, and its batches are dicts too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur

SIZE = 24


class Detector(nn.Module):
    """A shared trunk; the class is read off the whole image, the box as centre and size."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inner, outer in [(1, 16), (16, 32), (32, 48)]:
            layers += [nn.Conv2d(inner, outer, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.kind = nn.Sequential(nn.Conv2d(48, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 9, 2))
        self.box = nn.Sequential(nn.Conv2d(48, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 9, 4))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = self.trunk(images)
        return {"kind": self.kind(features), "box": self.box(features).sigmoid()}


def draw(count: int, seed: int) -> dict[str, Tensor]:
    """Full and hollow squares somewhere in the picture."""
    generator = torch.Generator().manual_seed(seed)
    side = torch.randint(6, 13, (count,), generator=generator)
    left, top = ((torch.rand(count, generator=generator) * (SIZE - side)).long() for _ in range(2))
    kind = torch.randint(0, 2, (count,), generator=generator)
    rows, columns = torch.arange(SIZE)[:, None], torch.arange(SIZE)[None]
    images = 0.3 * torch.randn(count, 1, SIZE, SIZE, generator=generator)
    for i in range(count):
        down, right = rows - top[i], columns - left[i]
        inside = (down >= 0) & (down < side[i]) & (right >= 0) & (right < side[i])
        core = (down >= 2) & (down < side[i] - 2) & (right >= 2) & (right < side[i] - 2)
        images[i, 0][inside & ~core if kind[i] else inside] += 1.5
    box = torch.stack([left + side / 2, top + side / 2, side, side], 1) / SIZE
    return {"images": images, "kind": kind, "box": box}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model(batch["images"])
    return F.cross_entropy(found["kind"], batch["kind"]) + 5 * F.smooth_l1_loss(found["box"], batch["box"], beta=0.05)


def evaluate(model: nn.Module) -> dict[str, float]:
    batch = draw(256, seed=1)
    found = model(batch["images"])
    right = (found["kind"].argmax(1) == batch["kind"]).float().mean()
    pixels = (found["box"] - batch["box"]).abs().mean() * SIZE
    return {"accuracy": 100 * float(right), "box error (pixels)": float(pixels)}


torch.manual_seed(0)
batches = [draw(64, seed=100 + number) for number in range(16)]
model = Detector()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(8):
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

task = secateur.Task(batches, loss, evaluate)
example = torch.randn(1, 1, SIZE, SIZE)
settings = secateur.TickTock.of(keep_macs=0.5, tick_removes=0.1, tock_every=3, tock_epochs=1, finetune_epochs=6)
result = secateur.prune(model, example, task, settings=settings, progress=print)
print(result)
