"""What a run learns from: the labels, and the whole network or another teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from secateur.channels.cost import is_kept
from secateur.channels.groups import ChannelGraph
from secateur.channels.shrink import copy_model
from secateur.errors import InvalidSetting
from secateur.modes import evaluating
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
        features_of(run, teacher, learning.distill_features)


def loss_of(run: Run, learning: Learning, features: bool = False) -> Loss:
    """The loss of the task, with a teacher where the settings say so.

    features: whether its features may count too, as long as the network keeps its channels.
    """
    teacher = run.whole if run.teacher is None else run.teacher
    if not learning.distill or teacher is None:
        return run.task.loss
    teacher = run.copied(teacher)
    compared = None
    if features and learning.distill_features:
        compared = features_of(run, teacher, learning.distill_features)
    amount, temperature = learning.distill, learning.distill_temperature
    return distilled(run.task.loss, teacher, amount, temperature, run.task.output, compared)


def features_of(run: Run, teacher: nn.Module, weight: float) -> Features:
    """Those of the present network of a run."""
    # Masked channels are there, and do not count.
    present = run.pruner.gates.present.kept if run.pruner is not None else run.kept
    return find_features(run.model, teacher, run.graph, present, run.kept, weight)


def find_features(
    model: nn.Module, teacher: nn.Module, graph: ChannelGraph, present: Tensor, kept: Tensor, weight: float
) -> Features:
    """Those of the batch norm or convolution that the model runs last, before the layers whose output is its own.

    graph: of the whole network.
    present: the channels of the graph that the model has.
    kept: those that are not masked either.
    """
    layer = _last_layer(model, graph)
    other = dict(teacher.named_modules()).get(layer)
    if other is None:
        raise InvalidSetting(f"the teacher has no layer {layer}, whose features are compared", remedy=WITHOUT)
    channels = graph.axes.get((f"{layer}.weight", 0))
    width = getattr(other, "num_features", getattr(other, "out_channels", 0))
    if channels is None:
        channels = torch.full((width,), -1, dtype=torch.long, device="cpu")
    if len(channels) != width:
        got, what = f"{width} channels of {layer}", "features of this teacher cannot be compared"
        raise InvalidSetting(what, got=got, wanted=len(channels), remedy=WITHOUT)
    left, device = is_kept(channels, kept), device_of(model)
    own = left[is_kept(channels, present)].nonzero()[:, 0]
    return Features(layer, own.to(device), left.nonzero()[:, 0].to(device), weight)


@torch.no_grad()
def _last_layer(model: nn.Module, graph: ChannelGraph) -> str:
    copied = copy_model(model)
    ran: list[str] = []
    for name, module in copied.named_modules():
        if isinstance(module, _NormBase | _ConvNd) and f"{name}.weight" not in graph.final:
            module.register_forward_hook(lambda module, args, given, name=name: ran.append(name))
    with evaluating(copied):
        graph.calls["eval"][0].copied().on(device_of(copied))(copied)
    if not ran:
        what = "there is no batch norm and no convolution whose features could be compared"
        raise InvalidSetting(what, remedy=WITHOUT)
    return ran[-1]
