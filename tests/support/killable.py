"""A job with everything that a run must remember: dropout, batch norm, and random augmentation of every source.

`secateur prune killable:build` finds it when started in this folder.
"""

import random

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur import Job, classification
from secateur.data.arrays import Arrays


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.inner = nn.Conv2d(16, 24, 3, padding=1, bias=False)
        self.inner_norm = nn.BatchNorm2d(24)
        self.outer = nn.Conv2d(24, 16, 1)
        self.bare = nn.Conv2d(16, 12, 3, stride=2)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(12, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(images)))
        x = F.relu(x + self.outer(F.relu(self.inner_norm(self.inner(x)))))
        return self.last(self.dropout(F.relu(self.bare(x)).mean((2, 3))))


def brighten(images: Tensor) -> Tensor:
    """Python's random numbers and numpy's."""
    return images * random.uniform(0.9, 1.1) + float(numpy.random.normal(0, 0.05))


def build() -> Job:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(256, 2, 8, 8, generator=generator)
    labels = F.avg_pool2d(images.sum(1, keepdim=True), 4).flatten(1).argmax(1)
    train = Arrays(images, labels, 16, shuffle=True, augment=brighten, crop=1, flip=True)
    return Job(Net(), images[:1], classification(train, Arrays(images[:128], labels[:128], 128)))
