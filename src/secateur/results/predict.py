"""What a result says of photographs: the pruned network and, where its run has it, the whole one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.data.preprocessing import Preprocessing
from secateur.errors import InvalidData, InvalidSetting
from secateur.results.load import about, load, load_whole
from secateur.training.task import class_scores


@dataclass(frozen=True)
class Prediction:
    """The probability of every class of an image, for each network."""

    image: str
    probabilities: dict[str, dict[str, float]]
    """By network, "whole" and "pruned" or "network" alone; then by class, the most probable first."""

    def top(self, count: int) -> dict[str, dict[str, float]]:
        """The most probable classes of each network."""
        return {network: dict(list(classes.items())[:count]) for network, classes in self.probabilities.items()}

    def best(self, count: int) -> list[str]:
        """The classes that any of the networks finds most probable."""
        highest: dict[str, float] = {}
        for classes in self.probabilities.values():
            for name, value in classes.items():
                highest[name] = max(value, highest.get(name, 0.0))
        return sorted(highest, key=lambda name: -highest[name])[:count]


def predict(
    path: str | Path, images: Sequence[str | Path], build: Callable[[], Any] | str | None = None
) -> list[Prediction]:
    """What the network, or the networks, of a run or a result say of image files; `build` is that of `load`."""
    told = about(path)
    if told.preprocessing is None:
        what = f"{path} does not say what becomes of an image before its network sees it"
        remedy = "Save it with preprocessing=, as in secateur.save(result, folder, preprocessing=...)"
        raise InvalidSetting(what, remedy=remedy)
    whole, network = load_whole(path, build), load(path, build)
    networks = {"whole": whole, "pruned": network} if whole is not None else {"network": network}
    found = {
        name: _probabilities(model, images, told.preprocessing, told.classes, path) for name, model in networks.items()
    }
    return [Prediction(str(image), {name: found[name][i] for name in found}) for i, image in enumerate(images)]


@torch.no_grad()
def _probabilities(
    model: nn.Module,
    images: Sequence[str | Path],
    preprocessing: Preprocessing,
    classes: Sequence[str] | None,
    path: str | Path,
) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    for batch in preprocessing.batches(images):
        scores = class_scores(model, batch)
        if scores.dim() != 2 or (classes is not None and len(classes) != scores.shape[1]):
            wanted = f"a score for each of {len(classes)} classes" if classes is not None else "a score for each class"
            raise InvalidData(f"the network of {path} gives another output", got=tuple(scores.shape), wanted=wanted)
        if not bool(scores.isfinite().all()):
            raise InvalidData(f"the scores of the network of {path} are not finite", remedy="Train it anew")
        names = list(classes or (f"class {number}" for number in range(scores.shape[1])))
        for row in scores.softmax(1):
            values, order = row.sort(descending=True)
            rows.append({names[number]: value for number, value in zip(order.tolist(), values.tolist(), strict=True)})
    return rows
