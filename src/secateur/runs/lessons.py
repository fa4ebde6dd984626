"""What a run learns from: the labels, and the whole network or another teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from secateur.channels.shrink import copy_model
from secateur.errors import InvalidSetting
from secateur.runs.before_scores import Place, find_place
from secateur.training.batches import device_of
from secateur.training.distill import distilled, scores_of
from secateur.training.features import WITHOUT, Features
from secateur.training.settings import Learning
from secateur.training.task import Loss

if TYPE_CHECKING:
    from secateur.runs.run import Run


@torch.no_grad()
def check_teacher(run: Run, teacher: nn.Module) -> None:
    """Raise if the run could not learn from it as its settings ask."""
    learning = run.settings.learning
    if not learning.distill:
        return
    for example in run.graph.calls.get("eval", ())[:1]:
        given = example.copied().on(device_of(teacher))
        scores_of(given(copy_model(teacher).eval()), run.task.output)
    if learning.distill_features:
        find_features(run, teacher, learning.distill_features)


def loss_of(run: Run, learning: Learning, features: bool = False) -> Loss:
    """The loss of the task, with a teacher where the settings say so.

    features: whether its features may count too, as long as the network keeps its channels.
    """
    teacher = run.whole if run.teacher is None else run.teacher
    if not learning.distill or teacher is None:
        return run.task.loss
    teacher = run.copied(teacher)
    weight = learning.distill_features
    compared = None
    if features and weight:
        compared = find_features(run, teacher, weight)
        run.progress(
            f"learning from the features that {'enter' if compared.entering else 'leave'} {compared.module}, too"
        )
    amount, temperature = learning.distill, learning.distill_temperature
    return distilled(run.task.loss, teacher, amount, temperature, run.task.output, compared)


def find_features(run: Run, teacher: nn.Module, weight: float) -> Features:
    """Those before the scores, on the channels that the present network of a run has."""
    graph, kept = run.graph, run.kept
    # Masked channels are there, and do not count.
    present = run.pruner.gates.present.kept if run.pruner is not None else kept
    place = find_place(run.model, graph)
    own, target = place.flags(present), place.flags(kept)
    found = Features(
        module=place.module,
        entering=place.entering,
        axis=place.axis,
        own=target[own].nonzero()[:, 0].to(device_of(run.model)),
        target=target.nonzero()[:, 0].to(device_of(run.model)),
        weight=weight,
    )
    _check(found, run, teacher, place)
    return found


def _check(features: Features, run: Run, teacher: nn.Module, place: Place) -> None:
    """Raise if the teacher has no such features."""
    if features.module not in dict(teacher.named_modules()):
        what = f"the teacher has no layer {features.module}, whose features are compared"
        raise InvalidSetting(what, remedy=WITHOUT)
    copied = copy_model(teacher).eval()
    with torch.no_grad(), features.watched(copied) as found:
        run.graph.calls["eval"][0].copied().on(device_of(copied))(copied)
    width = features.last(found).shape[features.axis]
    if width != place.width:
        what, got = "features of this teacher cannot be compared", f"{width} channels of {features.module}"
        raise InvalidSetting(what, got=got, wanted=place.width, remedy=WITHOUT)
