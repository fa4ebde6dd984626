"""Where the features of a network are: what the layer that gives the scores computes them from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from secateur.channels.cost import is_kept
from secateur.channels.groups import ChannelGraph
from secateur.channels.shrink import copy_model
from secateur.errors import InvalidSetting
from secateur.training.batches import device_of
from secateur.training.features import WITHOUT

CLOSE = 1e-3
"""Derivatives that differ by less, relatively, are equal: features may be computed in few bits."""


@dataclass(frozen=True)
class Place:
    """What a module is given, if `entering`, or gives, by its name; with the axis of the channels.

    width: of the whole network there.
    channels: of the graph, at each index; None where they always stay.
    """

    module: str
    entering: bool
    axis: int
    width: int
    channels: Tensor | None

    def flags(self, kept: Tensor) -> Tensor:
        """Which of the channels are among these of the graph."""
        if self.channels is None:
            return torch.ones(self.width, dtype=torch.bool, device="cpu")
        return is_kept(self.channels, kept)


def find_place(model: nn.Module, graph: ChannelGraph) -> Place:
    """The last output of a module before scores are computed of its channels: before they are averaged, where they are.

    Between it and the layer that gives the scores there may be what treats each channel alone and has no parameters.
    Where there is no such output, it is what enters that layer.

    graph: of the whole network, of which `model` may have some channels only.
    """
    names = sorted({name.rpartition(".")[0] for name in graph.final})
    copied = copy_model(model).eval()
    modules = dict(copied.named_modules())
    last: Any = modules.get(names[0]) if len(names) == 1 else None
    convolves = isinstance(last, _ConvNd) and not isinstance(last, _ConvTransposeNd) and last.groups == 1
    if not (convolves or type(last) is nn.Linear):
        wanted = "one linear layer or convolution that gives the scores"
        raise InvalidSetting("there are no features to compare", got=", ".join(names), wanted=wanted, remedy=WITHOUT)
    weight = f"{names[0]}.weight"
    axis, width, channels = 1 if convolves else -1, graph.shapes[weight][1], graph.axes.get((weight, 1))
    best, most = Place(names[0], True, axis, width, channels), 0
    for name, size in _outputs(copied, graph, last, last.weight.shape[1]):
        if not _leads(copied, graph, modules[name], last, axis):
            break
        if size > most:
            best, most = Place(name, False, 1, width, channels), size
    return best


def _outputs(model: nn.Module, graph: ChannelGraph, last: nn.Module, width: int) -> list[tuple[str, int]]:
    """Modules that run once, before the last layer, and give maps of so many channels; with the sizes, latest first."""
    found: dict[str, int] = {}
    several: set[str] = set()
    ended = False

    def note(name: str, given: Any) -> None:
        if name in found:
            several.add(name)
        elif not ended and isinstance(given, Tensor) and given.dim() > 2 and given.shape[1] == width:
            found[name] = given[0].numel()

    def end(module: nn.Module, args: Any) -> None:
        nonlocal ended
        ended = True

    hooks: list[Any] = [last.register_forward_pre_hook(end)]
    for name, module in model.named_modules():
        hooks.append(module.register_forward_hook(lambda module, args, given, name=name: note(name, given)))
    with torch.no_grad():
        graph.calls["eval"][0].copied().on(device_of(model))(model)
    for hook in hooks:
        hook.remove()
    return [(name, size) for name, size in reversed(found.items()) if name and name not in several]


def _leads(model: nn.Module, graph: ChannelGraph, module: nn.Module, last: nn.Module, axis: int) -> bool:
    """Whether what the last layer is given depends on what this one gives alone, and each channel on the same one."""
    leaves: list[Tensor] = []
    given: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    hooks = [
        module.register_forward_hook(cut),
        last.register_forward_pre_hook(lambda module, args: given.append(args[0])),
    ]
    parameters = [each.requires_grad_() for each in model.parameters() if each.is_floating_point()]
    try:
        with torch.enable_grad():
            graph.calls["eval"][0].copied().on(device_of(model))(model)
            if len(leaves) != 1 or len(given) != 1 or not given[0].requires_grad:
                return False
            generator = torch.Generator().manual_seed(0)
            factors = (torch.rand(given[0].shape[axis], generator=generator) + 0.5).to(given[0])
            shape = [-1 if place == axis % given[0].dim() else 1 for place in range(given[0].dim())]
            plain, *others = torch.autograd.grad(
                given[0].sum(), [leaves[0], *parameters], retain_graph=True, allow_unused=True
            )
            (scaled,) = torch.autograd.grad((given[0] * factors.view(shape)).sum(), leaves, allow_unused=True)
    except RuntimeError:  # as where the network writes to that tensor afterwards
        return False
    finally:
        for hook in hooks:
            hook.remove()
    if plain is None or scaled is None or not bool(plain.any()):
        return False
    if any(other is not None and bool(other.any()) for other in others):
        return False
    wanted = plain * factors.view(-1, *[1] * (plain.dim() - 2))
    return bool((scaled - wanted).abs().max() <= CLOSE * wanted.abs().max())
