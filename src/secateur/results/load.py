"""A pruned network from its folder: build the whole one, cut it, fill in the weights. No pickle, no code from files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels import plan as plans
from secateur.channels.plan import SavedPlan
from secateur.channels.shrink import cut_, tensors_of
from secateur.data.preprocessing import Preprocessing
from secateur.errors import InvalidData, InvalidModel, InvalidSetting
from secateur.files import read_json
from secateur.models.lookup import build_network, check_callable, find_callable, find_model, is_known
from secateur.models.weights import load_weights_
from secateur.runs.record import ORIGINAL, START_PLAN, WHOLE

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


def load(path: str | Path, build: Callable[[], Any] | str | None = None) -> nn.Module:
    """The pruned network that `save` has written, in evaluation mode, on the CPU.

    build: makes the whole network, as it was before pruning, or a `Job` with it: a function, or its name as
        `package.module:callable`. Not needed for networks of Secateur, torchvision and timm that the result names.
    """
    return load_with_example(path, build)[0]


def load_with_example(path: str | Path, build: Callable[[], Any] | str | None = None) -> tuple[nn.Module, Any]:
    """The same, and the example of the job that `build` makes, or None."""
    folder = find_result(Path(path))
    plan = read_plan(folder / "plan.json")
    model, example = _build(plan, folder, build)
    try:
        cut_(model, plan.cuts)
    except InvalidSetting as error:
        raise InvalidData(f"{folder / 'plan.json'} does not fit the network", got=error) from error
    load_weights_(model, folder / "model.safetensors", exact=True)
    return model.eval(), example


def load_whole(path: str | Path, build: Callable[[], Any] | str | None = None) -> nn.Module | None:
    """The network before it was pruned, if the folder of its run has it; the arguments are those of `load`."""
    folder = find_result(Path(path))
    plan, weights = read_plan(folder / "plan.json"), find_whole(folder)
    if weights is None or not (plan.groups or plan.branches):
        return None
    model, _ = _build(plan, folder, build)
    load_weights_(model, weights, exact=True)
    return model.eval()


@dataclass(frozen=True, kw_only=True)
class About:
    """What a result tells beside the network."""

    classes: Sequence[str] | None
    """The name of each class, in the order of the network's outputs."""
    preprocessing: Preprocessing | None
    """What becomes of a photograph before the network sees it."""

    @property
    def metadata(self) -> dict[str, str]:
        """The same as text, for files that hold text by name: JSON."""
        found: dict[str, Any] = {"classes": list(self.classes) if self.classes is not None else None}
        if self.preprocessing is not None:
            found["preprocessing"] = self.preprocessing.to_dict()
        return {name: json.dumps(value) for name, value in found.items() if value is not None}


def about(path: str | Path) -> About:
    """The class names and the preprocessing of a result, as far as it has them."""
    file = find_result(Path(path)) / "summary.json"
    found = read_json(file) if file.is_file() else {}
    classes, preprocessing = found.get("classes"), found.get("preprocessing")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise InvalidData(f"{file} is damaged", got=f"classes {classes!r:.80}", wanted="names")
    if preprocessing is not None:
        if not isinstance(preprocessing, dict):
            raise InvalidData(f"{file} is damaged", got=f"preprocessing {preprocessing!r:.80}", wanted="an object")
        preprocessing = Preprocessing.from_dict(preprocessing)
    return About(classes=tuple(classes) if classes is not None else None, preprocessing=preprocessing)


def find_whole(result: Path) -> Path | None:
    """The weights of the whole network that a run has pruned, or that its own start was pruned from.

    A repaired network has them in the folder of its result.
    """
    if (result / WHOLE).is_file():
        return result / WHOLE
    run = result.parent
    if not (run / "config.json").is_file():
        return None
    names = [WHOLE] if (run / START_PLAN).is_file() else ["retrain.safetensors", "baseline.safetensors", ORIGINAL]
    return next((run / name for name in names if (run / name).is_file()), None)


def _build(plan: SavedPlan, folder: Path, build: Callable[[], Any] | str | None) -> tuple[nn.Module, Any]:
    """The whole network, with any weights, and the example of the job that `build` makes, or None."""
    name = build if isinstance(build, str) else "build"
    builder = find_callable(*build.split(":", 1)) if isinstance(build, str) and ":" in build else build
    with torch.random.fork_rng(devices=[]):
        if builder is None:
            return _build_named(plan.data, folder), None
        check_callable(builder, name)
        # Not on the meta device, where constants of the user's own modules would stay without values.
        return build_network(builder, name)


def find_result(path: Path) -> Path:
    """The folder of the result, in a run's folder too."""
    for folder in (path / "result", path):
        if (folder / "plan.json").is_file():
            return folder
    remedy = None
    if (path / "config.json").is_file():
        remedy = "Its run is not finished: resume it"
        if "order" not in read_json(path / "config.json"):
            remedy = f"A run from Python leaves it to you: secateur.save(result, {str(path / 'result')!r})"
    raise InvalidData(f"there is no result in {path}", wanted="a plan.json and a model.safetensors", remedy=remedy)


def read_plan(path: Path) -> SavedPlan:
    """What plan.json says, checked for form only."""
    data = read_json(path)
    try:
        return plans.read_plan(data)
    except ValueError as error:
        raise InvalidData(f"{path} is damaged, or of another version", got=error) from error


def _build_named(plan: dict[str, Any], folder: Path) -> nn.Module:
    """The whole network that the plan names, without memory for its tensors if it can be; no name is imported."""
    network = plan.get("network")
    if not isinstance(network, dict) or not isinstance(network.get("name"), str):
        raise InvalidModel(f"{folder} does not say which network it is of", remedy=_how_to_build(folder))
    name, options = network["name"], network.get("options", {})
    if not is_known(name):
        raise InvalidModel(f"{folder} is of {name!r:.80}, which is not ours", remedy=_how_to_build(folder))
    if not isinstance(options, dict) or not all(_is_plain(key, value) for key, value in options.items()):
        got = f"{options!r:.80}"
        raise InvalidData(f"{folder / 'plan.json'} asks for options that no result needs", got=got)
    try:
        with torch.device("meta"):
            model = find_model(name, **options)
    except InvalidModel as error:
        # Code that looks at values cannot run without any.
        if not isinstance(error.__cause__, RuntimeError | TypeError):
            raise InvalidData(f"the network of {folder / 'plan.json'} cannot be built", got=error) from error
        model = None
    if model is not None and not _has_own_values(model):
        return model
    weights = folder / "model.safetensors"
    size = weights.stat().st_size if weights.is_file() else 0
    if model is not None and sum(tensor.nbytes for tensor in tensors_of(model).values()) > MOST_TIMES * size:
        raise InvalidData(f"{folder / 'plan.json'} names a network that is much larger than {weights}")
    return find_model(name, **options)


def _how_to_build(folder: Path) -> str:
    """How to name what makes the network: as the run was given it, which is not imported from here."""
    path = folder / "summary.json"
    order = read_json(path).get("order") if path.is_file() else None
    recipe = order.get("recipe") if isinstance(order, dict) else None
    if isinstance(recipe, str) and re.fullmatch(r"[\w.]{1,80}:\w{1,80}", recipe):
        return f"Pass build={recipe!r}, which built it for the run"
    return "Pass build=, a function that makes the network as it was before pruning, or package.module:callable"


def _is_plain(option: Any, value: Any) -> bool:
    """Whether this is an option that a file may ask for."""
    return option in OPTIONS and (
        isinstance(value, str) or (isinstance(value, int | float) and 0 <= value <= OPTIONS[option])
    )


def _has_own_values(model: nn.Module) -> bool:
    """Whether a module computes tensors when it is built that no state dict holds."""
    return any(
        module._non_persistent_buffers_set or any(isinstance(value, Tensor) for value in vars(module).values())
        for module in model.modules()
    )
