"""Analyse a model: watch a forward pass, couple channels, freeze the ones that must stay, and probe the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from secateur.channels.branches import as_branches, find_branches
from secateur.channels.build import build_graph
from secateur.channels.comparisons import layers_noting
from secateur.channels.example import Calls, Example, tensors_within
from secateur.channels.flow import Flow
from secateur.channels.groups import ChannelGraph, owner
from secateur.channels.guard import check_model, explain, undisturbed
from secateur.channels.labels import Role
from secateur.channels.probe import Probe
from secateur.channels.reasons import Kind, Reason
from secateur.channels.settle import settle
from secateur.channels.subject import Subject
from secateur.channels.trace import Watch
from secateur.channels.unused import find_unused, is_within
from secateur.errors import InvalidModel, InvalidSetting, unknown_name

ALONE = RLock()
"""Held while a forward pass is watched: what is replaced in torch meanwhile, all threads see."""
Ignore = Callable[[str, nn.Module], bool] | Iterable[str | nn.Module] | str | nn.Module


def analyze(
    model: nn.Module,
    example: Any,
    *,
    ignore: Ignore = (),
    inexact: bool = False,
    probe: bool = True,
    progress: Callable[[str], object] | None = None,
) -> ChannelGraph:
    """Find all channels that can be removed, which ones are coupled, and why the others must stay.

    example: what the model is called with: a tensor, a tuple of positional or a dict of keyword arguments.
    ignore: layers whose filters stay: modules, their names with wildcards, or a function of name and module. A module
        includes everything in it.
    inexact: allow channels that pass layer norm, group norm and the like, where removing is not the same as zeroing.
    probe: try the cuts on a copy, freeze what fails, e.g. because the code uses fixed sizes, and find the attributes of
        modules that must follow a cut. Without it only the attributes of torch's own layers follow, and a cut is wrong
        where code computes with a width, as attention with one head does: call `verify`.
    progress: called with a line of text for each step.

    The model is left exactly as it was.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    >>> analyze(net, torch.randn(1, 3, 8, 8))
    ChannelGraph(1 group, 8 channels, 1 frozen layer)
    """
    say = progress or (lambda text: None)
    call = Example.of(example)
    check_model(model, call)
    say("watching a forward pass")
    watch = Watch(model, inexact)
    calls, notes, flows = _watch_modes(watch, model, call)
    ignored = _freeze_ignored(watch, model, ignore)
    found, bound = find_branches(model, flows, watch.asked_training, ignored)
    _freeze_unused(watch)
    unused = any(not leaf.used and isinstance(leaf.tensor, nn.Parameter) for leaf in watch.leaves.values())
    leaves_out = unused or watch.values_matter or bool(notes)
    # Where training mode cannot run, nothing is known of what it uses.
    silent = (
        () if notes else find_unused(model, watch.ran, [leaf.tensor for leaf in watch.leaves.values() if leaf.used])
    )
    notes += _notes_on(watch, model, silent)
    build = partial(build_graph, watch, str(call), tuple(notes), calls, leaves_out)
    if not probe:
        graph = build()
        return replace(graph, branches=as_branches(graph, found), bound=bound, unused=silent)
    say("probing the cuts")
    subject = Subject(model, calls, watch.values_matter, watch.comparisons)
    graph = settle(watch, subject, build, say)
    graph = replace(graph, branches=as_branches(graph, found), bound=bound)
    failed = Probe(subject, graph, say).bound_branches()
    branches = tuple(branch for branch in graph.branches if branch.name not in failed)
    return replace(graph, branches=branches, bound=failed | bound, unused=silent)


def _watch_modes(watch: Watch, model: nn.Module, call: Example) -> tuple[Calls, list[str], dict[str, Flow]]:
    """Watch evaluation mode, and training mode where that may run differently.

    Gives what to call the model with in each, notes, and what was computed from what in each.
    """
    notes: list[str] = []
    with ALONE, undisturbed(model), torch.no_grad():
        model.eval()  # not what it returns: some forget to return the model where they write it themselves
        output, tensors = _watch(watch, model, call)
        if not tensors:
            kind = type(output).__name__
            raise InvalidModel("the model's output holds no tensor", got=kind, wanted="tensors, or containers of them")
        products, flows = watch.products, {"eval": watch.flow}
        unused_in_evaluation = [leaf for leaf in watch.leaves.values() if not leaf.used]
        switched = any(type(module).train is not nn.Module.train for module in model.modules())
        calls: Calls = {"eval": [call.varied()]}
        if watch.training_matters or switched:
            model.train()
            for training in (call.repeated(), call):
                try:
                    _watch(watch, model, training)
                    calls["train"] = [training.varied()]
                    flows["train"] = watch.flow
                    break
                except InvalidModel as error:
                    failure = explain(error.__cause__ or error)
            else:
                for leaf in unused_in_evaluation:
                    leaf.used = False
                notes.append(f"training mode cannot run on this example: {failure}")
        watch.products = products
    return calls, notes, flows


def _notes_on(watch: Watch, model: nn.Module, unused: tuple[str, ...]) -> list[str]:
    """What the user should know about this analysis.

    unused: modules of which no part has run.
    """
    notes = list(watch.failures)
    if watch.values_matter:
        notes.append("the code depends on values: only the branches that this example takes were analysed")
    heard = {owner(leaf.name) for leaf in watch.leaves.values() if leaf.used or watch.is_idle(leaf)}
    quiet = {owner(leaf.name) for leaf in watch.leaves.values()} - heard
    silent = sorted({next((module for module in unused if is_within(name, [module])), name) for name in quiet})
    if silent:
        remedy = "pass an example that runs them, or keep what feeds them, by ignore or at_least"
        notes.append(
            f"modules that do not run on this example, so that their inputs may be cut: {', '.join(silent)}; {remedy}"
        )
    uncounted = [name for name, module in model.named_modules() if isinstance(module, nn.RNNBase)]
    if uncounted:
        notes.append(f"the MACs of recurrent layers are not counted: {', '.join(uncounted)}")
    computed = [name for name, module in model.named_modules() if _computes_weights(module)]
    if computed:
        remedy = "torch.nn.utils.parametrize.remove_parametrizations or remove_weight_norm makes them plain"
        notes.append(
            f"weights that are computed in the forward pass may have to stay ({', '.join(computed)}): {remedy}"
        )
    return notes


def _watch(watch: Watch, model: nn.Module, example: Example) -> tuple[Any, list[Tensor]]:
    """Watch one forward pass, freeze the channels of its output, and return the output with the tensors in it.

    Without the arithmetic if possible; with it where the code looks at values or fails on zeros. With sizes that note
    what they are compared with, unless the code takes no others than torch's own.
    """
    output, tensors = None, list[Tensor]()
    used = [leaf.used for leaf in watch.leaves.values()]
    for watch.shapes_only, watch.sizes_noted in ((True, True), (False, True), (False, False)):
        watch.products, watch.flow = [], Flow(watch.leaves)
        for leaf, before in zip(watch.leaves.values(), used, strict=True):
            leaf.used = before
        try:
            noting = watch.comparisons.noting(watch.axes_seen)
            with watch.following_modules(), _unfused(model), noting, layers_noting(model), watch:
                output = example.copied()(model)
                tensors = tensors_within(output)
        except Exception as error:
            # Anything may come out of a user's forward pass.
            if not watch.sizes_noted:
                what = f"the forward pass raised an error on input {example}"
                remedy = "Pass an example of the shape, type and device that the model takes"
                raise InvalidModel(what, got=explain(error), remedy=remedy) from error
        else:
            watch.values_matter |= watch.constants.changed
            if not (watch.shapes_only and watch.values_matter):
                break
    watch.flow.returns(tensors)
    for tensor in tensors:
        state = watch.state(tensor)
        watch.freeze(state, Reason(Kind.OUTPUT))
        watch.layers.final |= state.made if state is not None else frozenset()
    return output, tensors


@contextmanager
def _unfused(model: nn.Module) -> Iterator[None]:
    """Run an LSTM as separate operators: on a CPU oneDNN would run one operator without a rule."""
    onednn: Any = torch.backends.mkldnn
    before = onednn.enabled
    onednn.enabled = before and not any(isinstance(module, nn.LSTM) for module in model.modules())
    try:
        yield
    finally:
        onednn.enabled = before


def _computes_weights(module: nn.Module) -> bool:
    old = any(isinstance(hook, (WeightNorm, SpectralNorm)) for hook in module._forward_pre_hooks.values())
    return old or is_parametrized(module)


def _freeze_ignored(watch: Watch, model: nn.Module, ignore: Ignore) -> set[str]:
    """Freeze the filters of these modules, and give the modules' names."""
    modules = dict(model.named_modules())
    if isinstance(ignore, (str, nn.Module)) or not (callable(ignore) or isinstance(ignore, Iterable)):
        ignore = [ignore]
    if callable(ignore):
        chosen = {name for name, module in modules.items() if ignore(name, module)}
    else:
        chosen = {name for each in ignore for name in _names_of(each, modules)}
    if not chosen:
        return chosen
    roles = watch.table.roles()
    for leaf in watch.leaves.values():
        path = owner(leaf.name) if "." in leaf.name else ""
        if any(f"{path}.".startswith(f"{name}." if name else "") for name in chosen):
            for axis in leaf.state.axes:
                if isinstance(axis, Tensor):
                    made = axis[roles[axis >> 1] >= Role.PASSES]
                    watch.table.freeze(made, Reason(Kind.IGNORED))
    return chosen


def _names_of(ignored: Any, modules: dict[str, nn.Module]) -> list[str]:
    if isinstance(ignored, nn.Module):
        found = [name for name, module in modules.items() if module is ignored]
        if not found:
            raise InvalidSetting("ignore names a module that is not part of the model", got=type(ignored).__name__)
        return found
    if not isinstance(ignored, str):
        wanted = "modules, names of modules, or a function of name and module"
        raise InvalidSetting("ignore has the wrong type", got=type(ignored).__name__, wanted=wanted)
    found = [name for name in modules if fnmatchcase(name, ignored)]
    if not found:
        raise unknown_name("layer", ignored, [name for name in modules if name])
    return found


def _freeze_unused(watch: Watch) -> None:
    """Freeze parameters that no operator used, and parameters that share memory."""
    owners: dict[int, Any] = {}
    roles = watch.table.roles()
    for leaf in watch.leaves.values():
        for axis in leaf.state.axes if not leaf.used else ():
            if isinstance(axis, Tensor):
                # What it was seen to consume before training mode raised may follow its source.
                watch.table.freeze(axis[roles[axis >> 1] != Role.CONSUMES], Reason(Kind.UNUSED))
        if leaf.tensor.numel() and leaf.tensor.layout is torch.strided:
            other = owners.setdefault(leaf.tensor.untyped_storage()._cdata, leaf)
            if other is not leaf:
                watch.freeze(leaf.state, Reason(Kind.SHARED_MEMORY, other.name))
                watch.freeze(other.state, Reason(Kind.SHARED_MEMORY, leaf.name))
