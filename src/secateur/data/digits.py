"""The 1,797 handwritten digits that come with scikit-learn: 8x8 pixels, ten classes, nothing to download."""

from __future__ import annotations

from typing import Any

import torch

from secateur.data.arrays import Arrays
from secateur.extras import import_extra


def digits(batch_size: int = 64) -> tuple[Arrays, Arrays]:
    """Training images (1,438, shifted by up to a pixel) and test images (every fifth, 359)."""
    load_digits = import_extra("sklearn.datasets", "demo").load_digits
    data: Any = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None]
    images = (images - 4.884) / 6.017  # mean and standard deviation of all pixels
    labels = torch.tensor(data.target, dtype=torch.long)
    test = torch.arange(labels.numel()) % 5 == 4
    train = Arrays(images[~test], labels[~test], batch_size, shuffle=True, crop=1)
    return train, Arrays(images[test], labels[test], 512)
