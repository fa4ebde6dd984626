"""Pictures of segmentation: the image, the truth, and each network's classes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.modes import evaluating
from secateur.results.figures import draw_pictures
from secateur.training.batches import device_of
from secateur.training.entries import output_of, pair

ROWS = 4
"""The number of images."""


def draw_predictions(networks: dict[str, nn.Module], test: Iterable[Any], path: Path) -> None:
    """Draw the first image of each of the first batches, its labels, and each network's classes."""
    rows = []
    for batch, _ in zip(test, range(ROWS), strict=False):
        images, labels = pair(batch)
        seen = [_classes(network, images[:1]) for network in networks.values()]
        rows.append([_picture(images[0]), labels[0].cpu().numpy(), *seen])
    draw_pictures(rows, ["image", "truth", *networks], path)


@torch.no_grad()
def _classes(network: nn.Module, images: Tensor) -> Any:
    with evaluating(network):
        return output_of(network, images.to(device_of(network))).argmax(1)[0].cpu().numpy()


def _picture(image: Tensor) -> Any:
    """The image scaled from its own minimum to its maximum, whatever its normalization."""
    low, high = image.amin(), image.amax()
    return ((image - low) / (high - low).clamp_min(1e-9)).permute(1, 2, 0).cpu().numpy()
