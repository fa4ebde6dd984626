"""Weights from files, which anybody may have written: nothing but tensors is read, and all is checked before use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from secateur.channels.plan import read_plan
from secateur.channels.shrink import tensors_of
from secateur.errors import InvalidData, unknown_name
from secateur.files import read_json

WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training programs put the weights."""


SAME_CLASSES = "Give weights of the same widths, trained for the same classes"


@dataclass(frozen=True)
class NewHead:
    """A classifier whose weights are not those of the file."""

    layer: str
    classes: int
    before: int | None
    """The classes that the file has; None if it has no such layer."""

    def __str__(self) -> str:
        file = f"{self.before} classes" if self.before is not None else "no such layer"
        return f"{self.layer} is made anew, with random weights: {self.classes} classes, where the file has {file}"


@torch.no_grad()
def load_weights_(
    model: nn.Module, path: str | Path, *, exact: bool = False, new_head: str | None = None, if_needed: bool = False
) -> NewHead | None:
    """Give the model the weights in a file. If anything is wrong, the model stays as it is.

    exact: the file is of a result. It must hold every parameter and buffer of the model and nothing else; the model,
        which may be on the meta device, takes on its precision. Otherwise the file is anybody's state dict: a
        .safetensors file, or one of torch.save. A network with a method `adapt(state)` translates names of others: our
        ResNets those of the Gate Decorator paper's authors, VGG-16-M, FCN-32s and the networks on MobileNet-v2
        torchvision's vgg16_bn, vgg16 and mobilenet_v2.
    new_head: the name of the classifier. It stays as it is, and what the file has for it is ignored.
    if_needed: do so only if the classifier of the file has another number of classes, and differs in nothing else.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidData(f"there is no file {path}")
    if not exact:
        state, head = _read_state(model, path, new_head, if_needed)
        _check_values(model, state, path)
        whole = model.state_dict()  # with extra state that is not a tensor, and versions that MNASNet asks for
        whole.update(state)
        model.load_state_dict(whole)
        return head
    own = tensors_of(model)
    state = _read_exactly(model, own, path)
    _check_precision(own, state, path)
    _check_values(model, state, path)
    _replace_(model, {id(own[name]): tensor for name, tensor in state.items()})


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors in a file by name, without the prefixes of wrappers."""
    try:
        found: Any = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # torch refuses files in many ways, and suggests unsafe ones
        remedy = "Save one with torch.save(model.state_dict(), file), or as .safetensors"
        raise InvalidData(f"{path} is not a state dict that can be read safely", remedy=remedy) from error
    for key in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise InvalidData(f"{path} is not a state dict", got=type(found).__name__, wanted="tensors by name")
    # DataParallel and DistributedDataParallel add the one, torch.compile the other.
    return {str(name).replace("_orig_mod.", "").removeprefix("module."): tensor for name, tensor in found.items()}


def _read_state(
    model: nn.Module, path: Path, new_head: str | None, if_needed: bool
) -> tuple[dict[str, Tensor], NewHead | None]:
    """Anybody's state dict, made to fit the model's names, and the classifier that is not taken from it."""
    state = read_weights(path)
    if hasattr(model, "adapt"):
        try:
            state = model.adapt(state)  # pyright: ignore
        except (KeyError, ValueError, RuntimeError) as error:
            wanted = f"weights for a {type(model).__name__}"
            raise InvalidData(f"{path} is of another network", got=repr(error), wanted=wanted) from error
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    twins = {tensor.data_ptr(): state[name] for name, tensor in own.items() if name in state}
    for name, tensor in own.items():
        # A tensor under two names is in a .safetensors file once.
        if name not in state and tensor.numel() and tensor.data_ptr() in twins:
            state[name] = twins[tensor.data_ptr()]
        # Old versions of torch did not count batches.
        if name not in state and name.endswith("num_batches_tracked"):
            state[name] = tensor
    head = None
    if new_head is not None and (not if_needed or _has_other_classes(own, state, new_head)):
        state, head = _without_head(own, state, new_head)
    remedy = f"It is of a pruned network: name its folder {path.parent}" if _is_of_pruned(path) else SAME_CLASSES
    _check_shapes(model, own, {name: tuple(tensor.shape) for name, tensor in state.items()}, path, remedy)
    return state, head


def _has_other_classes(own: dict[str, Tensor], state: dict[str, Tensor], layer: str) -> bool:
    """Whether the tensors of the layer, and no others, differ in shape: in the first axis alone, all by the same."""
    other = [name for name in own if name in state and own[name].shape != state[name].shape]
    axes = {(own[name].shape[:1], state[name].shape[:1]) for name in other}
    alike = all(own[name].shape[1:] == state[name].shape[1:] for name in other)
    same_rank = all(own[name].dim() == state[name].dim() for name in other)
    return len(axes) == 1 and alike and same_rank and all(name.rpartition(".")[0] == layer for name in other)


def _without_head(own: dict[str, Tensor], state: dict[str, Tensor], layer: str) -> tuple[dict[str, Tensor], NewHead]:
    """The state with the model's own tensors for that layer."""
    inside = f"{layer}."
    mine = {name: tensor for name, tensor in own.items() if name.startswith(inside)}
    if not mine:
        known = list(dict.fromkeys(name.rpartition(".")[0] for name in own))
        raise unknown_name("layer with weights", layer, known[::-1])
    last = [name for name, tensor in mine.items() if tensor.dim()][-1]
    before = state[last].shape[0] if last in state and state[last].dim() else None
    others = {name: tensor for name, tensor in state.items() if not name.startswith(inside)}
    return {**others, **mine}, NewHead(layer, mine[last].shape[0], before)


def _read_exactly(model: nn.Module, own: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The tensors of a result; names and shapes are compared before any is read."""
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _check_shapes(model, own, shapes, path, SAME_CLASSES)
            return {name: file.get_tensor(name) for name in own}
    except (OSError, SafetensorError, KeyError, RuntimeError, ValueError, MemoryError) as error:
        if isinstance(error, InvalidData):
            raise
        raise InvalidData(f"{path} cannot be read", got=error) from error


def _check_shapes(
    model: nn.Module, own: Mapping[str, Tensor], found: Mapping[str, tuple[int, ...]], path: Path, remedy: str
) -> None:
    """Raise unless the file has the model's tensors and no others.

    remedy: for tensors of other shapes.
    """
    kind = type(model).__name__
    if missing := sorted(set(own) - set(found)):
        raise InvalidData(f"{path} has no {missing[0]}", wanted=f"weights of a {kind}")
    for name, tensor in own.items():
        if found[name] != tuple(tensor.shape):
            got, wanted = ("x".join(map(str, shape)) or "a number" for shape in (found[name], tensor.shape))
            raise InvalidData(f"{name} in {path} does not fit {kind}", got=got, wanted=wanted, remedy=remedy)
    if unknown := sorted(set(found) - set(own)):
        raise InvalidData(f"{path} has {unknown[0]!r:.80}", wanted=f"only tensors that a {kind} has")


def _is_of_pruned(path: Path) -> bool:
    """Whether the file is that of a result, whose plan has cut the network."""
    plan = path.parent / "plan.json"
    if path.name != "model.safetensors" or not plan.is_file():
        return False
    try:
        saved = read_plan(read_json(plan))
    except ValueError:
        return False
    return bool(saved.groups or saved.branches)


def _check_precision(own: dict[str, Tensor], state: dict[str, Tensor], path: Path) -> None:
    """Raise for another data type; a network may be saved in another precision, but then all of it."""
    kinds: dict[torch.dtype, torch.dtype] = {}
    for name, tensor in state.items():
        found, wanted = tensor.dtype, own[name].dtype
        both_real = found.is_floating_point and wanted.is_floating_point
        if both_real or (found.is_complex and wanted.is_complex):
            wanted = kinds.setdefault(wanted, found)
        if found != wanted:
            raise InvalidData(f"{name} in {path} is of another data type", got=found, wanted=wanted)


def _check_values(model: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Raise for NaN, and for parameters that are infinite; buffers may be, as masks are."""
    parameters = dict(model.named_parameters())
    for name, tensor in state.items():
        if tensor.is_floating_point() and bool(tensor.isnan().any() | (name in parameters and tensor.isinf().any())):
            raise InvalidData(f"{name} in {path} is not finite", remedy="Load a sound checkpoint")


def _replace_(model: nn.Module, values: dict[int, Tensor]) -> None:
    """Put new tensors in the places of old ones; what was one object under several names is one again."""
    new: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                if old is None:
                    continue
                if id(old) not in new:
                    value = values[id(old)] if old.is_meta else values[id(old)].to(old.device)
                    is_parameter = isinstance(old, nn.Parameter)
                    new[id(old)] = nn.Parameter(value, old.requires_grad) if is_parameter else value
                held[name] = new[id(old)]
