"""Networks as users name them: a run or its result, a name, or a name with a file of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.example import Example
from secateur.channels.guard import explain
from secateur.errors import DamagedResult, InvalidExample, InvalidModel
from secateur.models.lookup import example_for, find_subject, knows_its_input
from secateur.models.weights import load_weights_
from secateur.results.load import load
from secateur.results.structure import read_json


def open_network(name: str, build: str | None = None, shape: tuple[int, ...] | None = None) -> tuple[nn.Module, Any]:
    """The network, in evaluation mode, and an example of its input: tensors, of which the first axis is the batch.

    name: a run or a result; a network's name, with random weights; or NETWORK=FILE, with weights from the file.
    build: package.module:callable that makes the whole network, for a result of the user's own code.
    """
    path = Path(name)
    network, equals, weights = name.partition("=")
    own: Any = None
    if path.is_dir():
        examples: list[Any] = [None]
        model = load(path, build=_builder(build, examples) if build is not None else None)
        own = examples[-1]
        shape = shape or (_input_of(path) if own is None else None)
        if own is None and shape is None and not knows_its_input(model):
            raise InvalidExample(f"{name} does not tell the shape of its input: name it, as --input 1x3x224x224")
    elif not equals and (name.startswith(".") or "/" in name):
        raise InvalidModel(f"there is no run, and no result, at {name}")
    else:
        model, own = find_subject(network)
        if equals:
            load_weights_(model, weights)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        example = own if own is not None and shape is None else example_for(model, shape)
    call = Example.of(example)
    if not all(isinstance(value, Tensor) for value in (*call.args, *call.kwargs.values())):
        raise InvalidExample(f"{name} takes more than tensors, and such networks can be neither timed nor exported")
    return model.eval(), example


def check_runs(model: nn.Module, example: Any, name: str) -> None:
    """Raise if the network does not take the example."""
    try:
        with torch.no_grad():
            Example.of(example)(model)
    except Exception as error:  # anything may come out of a user's forward pass
        remedy = "name the shape that it takes, as --input 1x3x224x224, or let a callable return a secateur.Job"
        raise InvalidExample(
            f"{name} raised on an input of {Example.of(example)}: {explain(error)}; {remedy}"
        ) from error


def _builder(name: str, examples: list[Any]) -> Callable[[], nn.Module]:
    """What makes the network: the callable, or the `model` of the job that it returns, whose example is kept too."""
    if ":" not in name:
        raise InvalidModel(f"build is package.module:callable, got {name!r}")

    def build() -> nn.Module:
        model, example = find_subject(name)
        examples.append(example)
        return model

    return build


def _input_of(folder: Path) -> tuple[int, ...] | None:
    """The shape of the example that the run was done with."""
    for path in (folder / "result" / "summary.json", folder / "summary.json"):
        if path.is_file():
            summary = read_json(path)
            shape = summary.get("input")
            if shape is None and "input" in summary:
                raise InvalidExample(
                    f"{folder} takes several tensors: name a build that returns a secateur.Job, which has them"
                )
            if shape is None:
                return None
            if not isinstance(shape, list) or not all(type(size) is int and 0 < size < 2**16 for size in shape):
                raise DamagedResult(f"{path} tells an input of {shape!r:.80}")
            return tuple(shape)
    return None
