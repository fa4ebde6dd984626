"""What the tests of image files share."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from secateur.data.layout import Layout
from secateur.data.maps import compose

LAYOUT = Layout("Birds", "train/\n  robin.jpg", "birds.zip")
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def noise(width: int = 40, height: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write(path: Path, image: Image.Image | np.ndarray, **options: Any) -> str:
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(path, **options)
    return str(path)


def to_bytes(pixels: Tensor) -> Tensor:
    """What the normalised numbers were, height x width x colour."""
    values = (pixels.movedim(0, -1) * STD + MEAN) * 255
    assert torch.allclose(values, values.round(), atol=1e-3)
    return values.round().to(torch.uint8)


def as_tested(image: Image.Image) -> Tensor:
    """The view of a test, as torchvision computes it."""
    return compose(v2.Resize((256, 256)), v2.CenterCrop(224))(image)


def alike(one: Tensor, other: Tensor, levels: int = 0) -> bool:
    """Whether normalised images are the same, up to so many levels of 255."""
    return one.shape == other.shape and bool(((one - other).abs() * 255 * STD[:, None, None] < levels + 0.01).all())
