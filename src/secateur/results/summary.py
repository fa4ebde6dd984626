"""The summary of a run: its settings, its outcome, and the hardware."""

from __future__ import annotations

import os
import platform
import re
from typing import Any

import torch

from secateur.results.structure import Layer, layers_after
from secateur.runs.events import Result
from secateur.runs.record import kind_of

FORMAT = {"format": "secateur-summary", "version": 1}


def summarize(result: Result, about: dict[str, Any]) -> dict[str, Any]:
    """Plain data, ready for JSON."""
    before, after = result.before, result.after
    branches = [branch.name for branch in result.plan.removed_branches]
    device = next(result.model.parameters()).device
    return {
        "input": shape_of(result.plan.graph.input),
        **about,
        **FORMAT,
        "kind": kind_of(result.settings),
        "settings": result.settings.to_dict(),
        "before": {"macs": before.macs, "params": before.params, "metrics": result.metrics_before},
        "after": {"macs": after.macs, "params": after.params, "metrics": result.metrics},
        "seconds": sum(event.seconds for event in result.history),
        "layers": [[layer.name, layer.before, layer.after] for layer in layers_of(result)],
        **({"removed_branches": branches} if branches else {}),
        **({"verification": result.verification.to_dict()} if result.verification is not None else {}),
        "hardware": device_name(device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def shape_of(text: str) -> list[int] | None:
    """The shape of an example that is one tensor, from text such as 1x3x32x32; None for others."""
    return [int(size) for size in text.split("x")] if re.fullmatch(r"\d+(x\d+)*", text) else None


def layers_of(result: Result) -> list[Layer]:
    """Every layer that can lose filters."""
    graph, kept = result.plan.graph, result.plan.kept
    removed = {g.name: g.size - int(kept[g.span].sum()) for g in graph.groups}
    gone = {module for branch in result.plan.removed_branches for module in branch.modules}
    return layers_after(graph.widths, removed, gone)


def device_name(device: torch.device) -> str:
    """The name of the GPU, or the number of cores and the architecture."""
    return (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()}-core {platform.machine()}"
    )
