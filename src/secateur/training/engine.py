"""How steps are done on the hardware: precision, layout, graphs. Torch is imported where it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from secateur.errors import InvalidSetting
from secateur.training.kinds import check_kinds

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What makes training fast or fit, and leaves the recipe as it is."""

    precision: Precision = "fp32"
    """Number format of the forward pass (autocast); weights, gates and scores stay in single precision."""

    channels_last: bool = False
    """Lay images out with channels last, as tensor cores like them."""

    accumulate: int = 1
    """Batches per optimizer step."""

    clip_norm: float | None = None
    """Scale gradients down to this norm where they are larger."""

    graphs: bool = True
    """Whole steps are captured as CUDA graphs where that is possible; --no-graphs: never."""

    tune: bool = True
    """cuDNN tries its algorithms, seconds for each shape; --no-tune: it takes one that rounds alike every time."""

    compile: bool = False
    """Compile the model with torch.compile for Tocks and fine-tuning; takes a minute, worth it for long runs."""

    sync_batchnorm: bool = False
    """With several processes, normalise over the global batch (CUDA only)."""

    checkpoint_steps: int = 500
    """Steps between checkpoints of a run that lives in a folder; phases end with one too."""

    def __post_init__(self) -> None:
        check_kinds(self)
        if self.accumulate < 1 or self.checkpoint_steps < 1:
            raise InvalidSetting("accumulate and checkpoint_steps must be 1 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InvalidSetting(f"clip_norm must be above 0, got {self.clip_norm}")

    def advice(self, device: str) -> str | None:
        """What would make training faster on such a device."""
        if device == "cuda" and self.precision != "fp32" and not self.channels_last:
            return f"note: on a GPU convolutional networks train in {self.precision} much faster with --channels-last"
        return None

    @contextmanager
    def algorithms(self) -> Iterator[None]:
        """cuDNN with the choice that `tune` leaves it."""
        import torch

        cudnn: Any = torch.backends.cudnn
        before = cudnn.benchmark, cudnn.deterministic
        cudnn.benchmark, cudnn.deterministic = self.tune, cudnn.deterministic or not self.tune
        try:
            yield
        finally:
            cudnn.benchmark, cudnn.deterministic = before

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
