"""What Secateur needs: `build` returns the network, an example of its input, and the task."""

import torch
from network import ShapeNet
from torch.utils.data import DataLoader, TensorDataset

import secateur

SIZE = 16


def draw(count: int, seed: int) -> TensorDataset:
    """Frames, discs and crosses in noisy images."""
    generator = torch.Generator().manual_seed(seed)
    radius = torch.randint(3, 6, (count, 1, 1), generator=generator)
    row, column = (torch.randint(5, 11, (count, 1, 1), generator=generator) for _ in range(2))
    down, right = (torch.arange(SIZE)[:, None] - row).abs(), (torch.arange(SIZE)[None] - column).abs()
    frame = torch.maximum(down, right) == radius
    disc = down**2 + right**2 <= radius**2
    cross = (torch.minimum(down, right) == 0) & (torch.maximum(down, right) <= radius)
    labels = torch.randint(0, 3, (count,), generator=generator)
    images = torch.stack([frame, disc, cross])[labels, torch.arange(count)].float()
    images += 0.4 * torch.randn(count, SIZE, SIZE, generator=generator)
    return TensorDataset(images[:, None], labels)


def build(width: float = 1.0) -> secateur.Job:
    """The whole network with random weights; `width` is for `--width` and `--narrow-to` only."""
    train = DataLoader(draw(1024, seed=0), batch_size=64, shuffle=True)
    test = DataLoader(draw(512, seed=1), batch_size=512)
    example = torch.randn(1, 1, SIZE, SIZE)
    return secateur.Job(ShapeNet(width=width), example, secateur.classification(train, test))
