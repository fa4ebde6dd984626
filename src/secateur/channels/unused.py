"""Modules that never run: find them, and drop them on request."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from secateur.channels.copies import copy_model
from secateur.channels.groups import ChannelGraph, check_graph
from secateur.channels.guard import explain
from secateur.channels.rehearsal import Outcome, run
from secateur.channels.shrink import check_same_network
from secateur.errors import InvalidModel

REMEDY = "Keep the modules, or pass an example that shows what needs them"


def find_unused(model: nn.Module, ran: Collection[str], used: Iterable[Tensor]) -> tuple[str, ...]:
    """The outermost modules with parameters of which no part has run.

    ran: names of the modules that were called.
    used: parameters and buffers that an operator was given.
    """
    running = {*ran, ""}
    alive = {id(tensor) for tensor in used}
    for name, module in model.named_modules(remove_duplicate=False):
        own = (*module._parameters.values(), *module._buffers.values())
        if name in running or any(id(tensor) in alive for tensor in own):
            while name:
                running.add(name)
                name = name.rpartition(".")[0]
    found: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if name not in running and not is_within(name, found) and any(True for _ in module.parameters()):
            found.append(name)
    return tuple(found)


def is_within(name: str, modules: Iterable[str]) -> bool:
    """Whether it is one of these modules, or a part of one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def drop_unused_(model: nn.Module, graph: ChannelGraph) -> nn.Module:
    """Put `nn.Identity` in the place of the modules that never ran (`graph.unused`), and return the model.

    Other inputs may run them: drop them only if you know that none will. The model must give the same outputs without
    them, in evaluation and training mode; raises before anything is changed otherwise. Analyse the model again after
    that. What loads a saved result, `secateur.load(folder, build=build)`, must drop them in `build`, too.
    """
    check_same_network(model, check_graph(graph))
    if not graph.unused:
        return model
    for mode, (example, *_) in graph.calls.items():
        call = example.on(next(model.parameters()).device)
        expected = run(copy_model(model), call, mode, last=True)
        try:
            got = run(_drop_(copy_model(model), graph.unused), call, mode, last=True)
        except Exception as error:
            what = f"the model does not run without {', '.join(graph.unused)}"
            raise InvalidModel(what, got=explain(error), remedy=REMEDY) from error
        if not _are_equal(expected, got):
            raise InvalidModel(f"the model computes something else without {', '.join(graph.unused)}", remedy=REMEDY)
    return _drop_(model, graph.unused)


def _drop_(model: nn.Module, names: Iterable[str]) -> nn.Module:
    for name in names:
        path, _, last = name.rpartition(".")
        left = nn.Identity().train(model.get_submodule(name).training)
        model.get_submodule(path)._modules[last] = left
    return model


def _are_equal(expected: Outcome, got: Outcome) -> bool:
    pairs = list(zip(expected.outputs, got.outputs, strict=False))
    if len(expected.outputs) != len(got.outputs) or any(a.shape != b.shape for a, b in pairs):
        return False
    return all(a.is_meta or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)
