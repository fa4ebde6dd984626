"""Weights from files that anybody may have written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from secateur.errors import InvalidModel

WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training programs put the weights."""


def load_weights_(model: nn.Module, path: str | Path) -> None:
    """Load a state dict: a .safetensors file, or one of torch.save, of which only tensors are read.

    A network with a method `adapt(state)` may translate from the names of others: our ResNets from those of the Gate
    Decorator paper's authors, VGG-16-M and FCN-32s from torchvision's vgg16_bn and vgg16.
    """
    path = Path(path)
    state = read_weights(path)
    if hasattr(model, "adapt"):
        state = model.adapt(state)  # pyright: ignore
    own = model.state_dict()
    twins = {tensor.data_ptr(): state[name] for name, tensor in own.items() if name in state}
    for name, tensor in own.items():
        # A tensor under two names is in a .safetensors file once.
        if name not in state and tensor.numel() and tensor.data_ptr() in twins:
            state[name] = twins[tensor.data_ptr()]
        # Files of old versions of torch do not count batches.
        if name not in state and name.endswith("num_batches_tracked"):
            state[name] = tensor
        if name not in state:
            raise InvalidModel(f"{path} has no {name}: is it of another network than {type(model).__name__}?")
        if state[name].shape != tensor.shape:
            found, wanted = ("x".join(map(str, t.shape)) or "a number" for t in (state[name], tensor))
            remedy = "give weights of the same widths, trained for the same classes"
            if is_of_result(path):
                remedy = f"it is of a pruned network, name its folder {path.parent}"
            raise InvalidModel(f"{name} in {path} is {found}, and {type(model).__name__} wants {wanted}: {remedy}")
    if unknown := sorted(set(state) - set(own)):
        raise InvalidModel(f"{path} has {unknown[0]}, which {type(model).__name__} does not")
    model.load_state_dict(state)


def is_of_result(path: Path) -> bool:
    """Whether the file is part of a result, of which the plan says what was cut."""
    return path.name == "model.safetensors" and (path.parent / "plan.json").is_file()


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name."""
    if not path.is_file():
        raise InvalidModel(f"there is no file {path}")
    try:
        found: Any = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise InvalidModel(f"{path} cannot be read: {error}") from error
    except Exception as error:  # torch has many ways to refuse a file
        remedy = "save one with torch.save(model.state_dict(), file), or as .safetensors"
        raise InvalidModel(f"{path} is not a state dict that can be read safely: {remedy}") from error
    for key in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise InvalidModel(f"{path} holds no state dict, that is tensors by name")
    # Of DataParallel and DistributedDataParallel; of torch.compile.
    return {str(name).replace("_orig_mod.", "").removeprefix("module."): tensor for name, tensor in found.items()}
