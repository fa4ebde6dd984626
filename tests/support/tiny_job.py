"""A job of a second: `secateur prune tiny_job:build`."""

import torch
from torch import nn

from secateur import Job, TickTock, classification
from secateur.data.arrays import Arrays
from secateur.pruning.scores import Random


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


def choosing() -> Job:
    """The same with images to choose by."""
    job = build()
    images = torch.rand(32, 2, 6, 6)
    held_out = Arrays(images, (images.sum((1, 2, 3)) > 36).long(), 32)
    return Job(job.model, job.example, classification(job.task.train, job.task.train, held_out=held_out))


class WithSettings:
    """A callable that has settings."""

    def __init__(self, settings: object) -> None:
        self.settings = settings

    def __call__(self) -> Job:
        return build()


with_settings = WithSettings(
    TickTock.of(keep_params=0.6, optimizer="adamw", finetune_epochs=2, finetune_lr=3e-3, finetune_lr_low=1e-4)
)
with_a_dict = WithSettings({"optimizer": "adamw"})
with_a_score = WithSettings(TickTock.of(keep_macs=0.5, score=Random(3)))


def build_network() -> nn.Module:
    return nn.Conv2d(2, 8, 3)


def nothing() -> None:
    """A mistake."""
