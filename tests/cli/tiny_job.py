"""A job of a second: `secateur prune tiny_job:build`."""

import torch
from torch import nn

from secateur import Job, classification
from secateur.data.arrays import Arrays


def build() -> Job:
    torch.manual_seed(0)
    images = torch.rand(64, 2, 6, 6)
    labels = (images.sum((1, 2, 3)) > 36).long()
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 2),
    )
    return Job(model, images[:1], classification(Arrays(images, labels, 16, shuffle=True), Arrays(images, labels, 64)))


def build_network() -> nn.Module:
    return nn.Conv2d(2, 8, 3)


def nothing() -> None:
    """A mistake."""
