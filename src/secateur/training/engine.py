"""How training uses the hardware: precision, memory layout, CUDA graphs. No torch at import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from secateur.settings import Settings

Precision = Literal["fp32", "bf16", "fp16"]
Compile = Literal["auto", "always", "never"]


@dataclass(frozen=True, kw_only=True)
class Engine(Settings):
    """How training uses the hardware; the recipe stays the same."""

    precision: Precision = "fp32"
    """Number format of the forward pass (autocast); weights, gates and scores stay in single precision."""

    channels_last: bool = False
    """Use the channels-last memory format, which tensor cores are faster with."""

    accumulate: int = 1
    """Batches per optimizer step."""

    clip_norm: float | None = None
    """Clip the norm of the gradients at this value."""

    graphs: bool = True
    """Capture whole training steps as CUDA graphs where possible."""

    tune: bool = True
    """Let cuDNN benchmark its algorithms, which takes seconds per shape; otherwise it uses deterministic ones."""

    compile: Compile = "auto"
    """Compile the network with torch.compile, which takes a minute: always, never, or if captured steps win it back."""

    sync_batchnorm: bool = False
    """With several processes, normalise over the global batch (CUDA only)."""

    checkpoint_steps: int = 500
    """Steps between checkpoints of a run in a folder; there is one at the end of every phase too."""

    def check(self) -> None:
        self.require("1 or more", "accumulate", "checkpoint_steps", holds=lambda value: value >= 1)
        self.require("a number above 0", "clip_norm", holds=lambda value: value is None or value > 0)

    @contextmanager
    def algorithms(self) -> Iterator[None]:
        """Let cuDNN choose its algorithms as `tune` says."""
        import torch

        cudnn: Any = torch.backends.cudnn
        before = cudnn.benchmark, cudnn.deterministic
        cudnn.benchmark, cudnn.deterministic = self.tune, cudnn.deterministic or not self.tune
        try:
            yield
        finally:
            cudnn.benchmark, cudnn.deterministic = before
