"""A pruned network from its folder: build the whole one, cut it, fill in the weights. No pickle, no code from files."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from secateur.channels import plan as plans
from secateur.channels.plan import SavedPlan
from secateur.channels.shrink import cut_, tensors_of
from secateur.errors import DamagedResult, InvalidModel, InvalidPlan
from secateur.models.lookup import find_model, is_known, network_of
from secateur.results.structure import read_json

LARGEST_PLAN = 2**28
"""Bytes that a plan.json may have to be read."""
OPTIONS = {
    "num_classes": 10**6,
    "width": 1000,
    "depth": 1000,
    "shortcut": 0,
    "in_channels": 10**5,
    "in_chans": 10**5,
    "aux_logits": 1,
    "init_weights": 1,
}
"""What a file may ask a builder for, and the largest number; none of them makes it fetch or read anything."""
MOST_TIMES = 1000
"""How many times as large as its weights a whole network may be that has to be built for its values."""


def load(path: str | Path, build: Callable[[], Any] | None = None) -> nn.Module:
    """The pruned network that `save` has written, in evaluation mode, on the CPU.

    build: makes the whole network, as it was before pruning, or a `Job` with it; not needed where that is one of
        Secateur's, torchvision's or timm's and the result says which.
    """
    if build is not None:
        _check_build(build)
    folder = find_result(Path(path))
    plan = read_plan(folder / "plan.json")
    make = build if build is not None else _builder(plan.data, folder)
    with torch.random.fork_rng(devices=[]):
        # Constants of the user's own modules, if they were made on the meta device, would stay without values.
        model = _without_memory(make, folder) if build is None else None
        model = network_of(make(), "build")[0] if model is None else model
    _worded(folder, lambda: cut_(model, plan.cuts))
    fill_(model, folder / "model.safetensors")
    return model.eval()


def _check_build(build: Any) -> None:
    if not callable(build) or isinstance(build, nn.Module):
        raise InvalidModel(f"build is a function that makes the whole network, got {type(build).__name__}")
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise InvalidModel(f"build is called without arguments, and cannot be: {error}") from error
    except ValueError:
        pass  # what is written in C may not tell


def find_result(path: Path) -> Path:
    """The folder of the result, in a run's folder too."""
    for folder in (path / "result", path):
        if (folder / "plan.json").is_file():
            return folder
    hint = f": its run is not finished, secateur resume {path}" if (path / "config.json").is_file() else ""
    if hint and "order" not in read_json(path / "config.json"):
        hint = f": a run from Python leaves it to you, secateur.save(result, {str(path / 'result')!r})"
    raise DamagedResult(f"there is no result in {path}, which would have a plan.json and a model.safetensors{hint}")


def read_plan(path: Path) -> SavedPlan:
    """What plan.json says, checked for form only."""
    try:
        if path.stat().st_size > LARGEST_PLAN:
            raise ValueError(f"it has more than {LARGEST_PLAN:,} bytes")
        return plans.read_plan(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DamagedResult(f"cannot read {path}: {error}") from error


def _builder(plan: dict[str, Any], folder: Path) -> Callable[[], nn.Module]:
    """What builds the network that the plan names; a name from a file is never imported."""
    network = plan.get("network")
    if not isinstance(network, dict) or not isinstance(network.get("name"), str):
        raise InvalidModel(f"{folder} does not say which network it is of: name what makes it, as {_as_pruned(folder)}")
    name, options = network["name"], network.get("options", {})
    if not is_known(name):
        raise InvalidModel(f"{folder} is of {name!r:.80}, which is not ours: name what makes it, as build= or --build")
    if not isinstance(options, dict) or not set(options) <= set(OPTIONS):
        raise DamagedResult(f"{folder / 'plan.json'} asks for options that no result needs: {options!r:.80}")
    if not all(isinstance(value, str) or _is_small(value, OPTIONS[key]) for key, value in options.items()):
        raise DamagedResult(f"{folder / 'plan.json'} asks for what is not plain or too large: {options!r:.80}")
    return lambda: find_model(name, **options)


def _as_pruned(folder: Path) -> str:
    """How to name what makes the network; by the name under which the run was given it, which is not imported."""
    path = folder / "summary.json"
    order = read_json(path).get("order") if path.is_file() else None
    recipe = order.get("recipe") if isinstance(order, dict) else None
    if not isinstance(recipe, str) or not re.fullmatch(r"[\w.]{1,80}:\w{1,80}", recipe):
        return "build= or --build"
    return f"--build {recipe}, or build={recipe.partition(':')[2]} in Python"


def _is_small(value: Any, largest: int) -> bool:
    return isinstance(value, int | float) and 0 <= value <= largest


def _without_memory(build: Callable[[], nn.Module], folder: Path) -> nn.Module | None:
    """The whole network without memory for its tensors, all of which will come from the file; None if it needs some."""
    try:
        with torch.device("meta"):
            model = build()
    except InvalidModel as error:
        if "meta" in str(error):  # code that looks at values cannot be run without any
            return None
        raise DamagedResult(f"the network that {folder / 'plan.json'} names cannot be made: {error}") from error
    if not _has_own_values(model):
        return model
    weights = folder / "model.safetensors"
    size = weights.stat().st_size if weights.is_file() else 0
    if sum(tensor.nbytes for tensor in tensors_of(model).values()) > MOST_TIMES * size:
        raise DamagedResult(f"{folder / 'plan.json'} names a network that is much larger than what {weights} is of")
    return None


def _has_own_values(model: nn.Module) -> bool:
    """Whether a module computes tensors when it is built that no state dict holds."""
    return any(
        module._non_persistent_buffers_set or any(isinstance(value, Tensor) for value in vars(module).values())
        for module in model.modules()
    )


def _worded(folder: Path, change: Callable[[], object]) -> None:
    try:
        change()
    except InvalidPlan as error:
        raise DamagedResult(f"{folder / 'plan.json'} does not fit the network: {error}") from error


@torch.no_grad()
def fill_(model: nn.Module, path: Path) -> None:
    """Give every parameter and buffer what the file has for it; all of the file is checked before it is read."""
    own = tensors_of(model)
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            if missing := sorted(set(own) - names):
                raise DamagedResult(
                    f"{path} has no {missing[0]}: is it of another network than {type(model).__name__}?"
                )
            if unknown := sorted(names - set(own)):
                raise DamagedResult(f"{path} has {unknown[0]!r:.80}, which {type(model).__name__} does not")
            for name, tensor in own.items():
                found = tuple(file.get_slice(name).get_shape())
                if found != tuple(tensor.shape):
                    shapes = ("x".join(map(str, shape)) or "a number" for shape in (found, tensor.shape))
                    raise DamagedResult("{} in {} is {}, and should be {}".format(name, path, *shapes))
            loaded = {name: file.get_tensor(name) for name in own}
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise DamagedResult(f"cannot read {path}: {error}") from error
    parameters = dict(model.named_parameters())
    # A network may have been pruned in another precision than it is built in, but then all of it.
    kinds: dict[torch.dtype, torch.dtype] = {}
    for name, tensor in loaded.items():
        found, wanted = tensor.dtype, own[name].dtype
        both_real = found.is_floating_point and wanted.is_floating_point
        if both_real or (found.is_complex and wanted.is_complex):
            wanted = kinds.setdefault(wanted, found)
        if found != wanted:
            raise DamagedResult(f"{name} in {path} is of {found}, and should be of {wanted}")
        if tensor.is_floating_point() and bool(tensor.isnan().any() | (name in parameters and tensor.isinf().any())):
            raise DamagedResult(f"{name} in {path} holds values that are no numbers")
    _replace_(model, {id(own[name]): tensor for name, tensor in loaded.items()})


def _replace_(model: nn.Module, values: dict[int, Tensor]) -> None:
    """Put new tensors in the places of old ones; what was one object under several names is one again."""
    new: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                if old is None:
                    continue
                if id(old) not in new:
                    value = values[id(old)]
                    is_parameter = isinstance(old, nn.Parameter)
                    new[id(old)] = nn.Parameter(value, old.requires_grad) if is_parameter else value
                held[name] = new[id(old)]
