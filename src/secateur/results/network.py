"""Networks as users name them: a run or its result, a name, or a name with a file of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.example import Example
from secateur.channels.guard import explain, undisturbed
from secateur.errors import InvalidData, InvalidModel
from secateur.files import read_json
from secateur.models.lookup import build_network, example_for, find_builder, input_size
from secateur.models.weights import load_weights_
from secateur.results.load import load_with_example


def open_network(
    name: str, build: Callable[[], Any] | str | None = None, shape: tuple[int, ...] | None = None
) -> tuple[nn.Module, Any]:
    """The network, in evaluation mode, and an example of its input: tensors, of which the first axis is the batch.

    name: a run or a result; a network's name, with random weights; or NETWORK=FILE, with weights from the file.
    build: what makes the whole network, for a result of the user's own code, or its package.module:callable.
    """
    network, equals, weights = name.partition("=")
    if Path(name).is_dir():
        model, example = load_with_example(name, build)
        if example is None and shape is None:
            shape = _input_of(Path(name))
            if shape is None and input_size(model) is None:
                raise InvalidModel(f"{name} does not tell the shape of its input", remedy="Give the shape")
    elif not equals and (name.startswith(".") or "/" in name):
        raise InvalidData(f"there is neither a run nor a result at {name}")
    else:
        model, example = build_network(find_builder(network), network)
        if equals:
            load_weights_(model, weights)
    if example is None or shape is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            example = example_for(model, shape)
    check_tensors(Example.of(example), name)
    return model.eval(), example


def check_tensors(call: Example, name: str) -> None:
    """Raise if the network takes anything but tensors."""
    if not all(isinstance(value, Tensor) for value in (*call.args, *call.kwargs.values())):
        raise InvalidModel(f"{name} takes more than tensors, so it can be neither timed nor exported")


def check_runs(model: nn.Module, example: Any, name: str) -> None:
    """Raise if the network does not take the example."""
    try:
        with undisturbed(model), torch.no_grad():
            Example.of(example)(model)
    except Exception as error:  # the user's forward pass may raise anything
        raise InvalidModel(
            f"{name} raised on an input of {Example.of(example)}",
            got=explain(error),
            remedy="Give the shape that it takes, or let a callable return a secateur.Job, which has an example",
        ) from error


def _input_of(folder: Path) -> tuple[int, ...] | None:
    """The shape of the example that the run had."""
    for path in (folder / "result" / "summary.json", folder / "summary.json"):
        if path.is_file():
            summary = read_json(path)
            shape = summary.get("input")
            if shape is None and "input" in summary:
                remedy = "Name a build that returns a secateur.Job, which has them"
                raise InvalidModel(f"{folder} takes several tensors", remedy=remedy)
            if shape is None:
                return None
            if not isinstance(shape, list) or not all(type(size) is int and 0 < size < 2**16 for size in shape):
                raise InvalidData(f"{path} is damaged", got=f"an input of {shape!r:.80}", wanted="a shape")
            return tuple(shape)
    return None
