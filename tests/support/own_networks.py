"""A user's own code: networks and jobs that commands find as `own_networks:...`."""

from dataclasses import replace

import torch
from torch import nn

from secateur import Job, classification
from secateur.data.arrays import Arrays


def plain(num_classes: int = 2, width: float = 1.0, in_channels: int = 3) -> nn.Module:
    """Two convolutions with batch norm, one without."""
    wide = max(1, round(8 * width))
    return nn.Sequential(
        nn.Conv2d(in_channels, wide, 3, padding=1, bias=False),
        nn.BatchNorm2d(wide),
        nn.ReLU(),
        nn.Conv2d(wide, 2 * wide, 3, stride=2, bias=False),
        nn.BatchNorm2d(2 * wide),
        nn.ReLU(),
        nn.Conv2d(2 * wide, wide, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(wide, num_classes),
    )


def job(width: float = 1.0) -> Job:
    """210 images of two classes, half of each, in three batches."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(210, 3, 4, 4, generator=generator)
    labels = torch.arange(210) % 2
    images[labels == 1, 0] += 0.5
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = plain(width=width)
    return Job(model, images[:1], classification(Arrays(images, labels, 100, shuffle=True)))


def unseeded() -> Job:
    """Weights are left to chance."""
    return replace(job(), model=plain())


def job_of_one_width() -> Job:
    return job()


def without_task() -> Job:
    """A mistake."""
    return replace(job(), task=None)
