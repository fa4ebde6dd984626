"""What must hold for every network, whatever it is made of."""

from __future__ import annotations

import copy
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cases import Case, Found, assert_unchanged, bits, flat, gap_of, outputs, state_of
from oracle import masked, random_plan
from torch import Tensor, nn

import secateur
from secateur import ChannelGraph, InvalidModel, Plan, SecateurError, TickTock
from secateur.runs.events import Result


@dataclass
class Outcome:
    """What happened to one network."""

    refused: str = ""
    """The error that says why the network cannot be pruned."""
    channels: int = 0
    plans: int = 0
    branches: int = 0
    done: set[str] = field(default_factory=set)
    kinds: tuple[str, ...] = ()


def check(case: Case, probe: bool, parts: Collection[str], some: Collection[str] | None = None) -> Outcome:
    """Analyse it and compare plans, those with these names or all, and check these parts; raises `Found`."""
    network, outcome = case.network, Outcome(kinds=tuple(getattr(case.network, "kinds", ())))
    before = state_of(network)
    try:
        graph = secateur.analyze(network, case.example, probe=probe)
    except SecateurError as error:
        if not error.what or len(str(error)) < 20:
            raise Found(f"an error that says little: {error}") from error
        outcome.refused = str(error)
        return outcome
    finally:
        assert_unchanged(network, before, "analyze has changed")
    str(graph), graph.to_dict()
    outcome.channels, outcome.branches = graph.num_channels, len(graph.branches)
    for name, plan in plans(graph, case.seed, probe).items():
        if some is not None and name not in some:
            continue
        outcome.plans += 1
        if not torch.equal(Plan.from_json(graph, plan.to_json()).kept, plan.kept):
            raise Found(f"a plan is read as another one, {name}")
        cut = secateur.shrink(case.precise, plan)
        modes = ("eval",) if plan.without and "paths" in case.flags else ("eval", "train")
        case.same(masked_by(case.precise, plan), cut, f"masked and shrunk, {name}", modes)
        if not {"uncounted", "single"} & case.flags and name in ("random", "least") and not graph.partial:
            params = sum(p.numel() for p in cut.parameters())
            if params != plan.cost.params:
                raise Found(f"parameters, {name}: {plan.cost.params}, in truth {params}")
    for name in parts if graph.num_channels else ():
        PARTS[name](case, graph, outcome)
    before.pop("random")
    assert_unchanged(network, before, "what follows the analysis has changed")
    return outcome


def plans(graph: ChannelGraph, seed: int, probed: bool) -> dict[str, Plan]:
    """Nothing, a third, most at random, as few as may be, and branches where they were tried."""
    least = graph.all_kept()
    for group in graph.groups:
        least[group.span] = False
        least[group.start + seed % group.size :][: group.at_least] = True
        missing = group.at_least - int(least[group.span].sum())
        least[group.start : group.start + max(0, missing)] = True
    found = {
        "nothing": Plan.keep(graph, {}),
        "random": Plan.random(graph, 0.35, seed),
        "most": random_plan(graph, seed, 0.75),
        "least": Plan(graph, least),
    }
    if probed and graph.branches:
        own = random.Random(seed)
        some = [branch.name for branch in graph.branches if own.random() < 0.6] or [graph.branches[0].name]
        found["branches"] = Plan(graph, graph.all_kept(), frozenset(some))
        found["branches and channels"] = Plan(graph, Plan.random(graph, 0.3, seed).kept, frozenset(some))
    return found


def masked_by(network: nn.Module, plan: Plan) -> nn.Module:
    """Zeros for what goes; of a branch for all that the plan lists as gone, but statistics."""
    model = masked(network, plan)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in plan.gone:
        if tensors[name].is_floating_point() and not name.endswith(("running_mean", "running_var")):
            tensors[name].data.zero_()
    return model


def check_gates(case: Case, graph: ChannelGraph, outcome: Outcome) -> None:
    gated = copy.deepcopy(case.precise)
    try:
        gates = secateur.insert_gates_(gated, graph)
    except InvalidModel:
        return
    case.same(copy.deepcopy(case.precise), copy.deepcopy(gated), "gates are not the identity")
    kept = Plan.random(graph, 0.4, case.seed).kept
    for group in graph.groups:
        if group.name in graph.ungated or gates.loose(group):
            kept[group.span] = True
    gates.mask_(kept)
    case.same(masked_by(case.precise, Plan(graph, kept)), copy.deepcopy(gated), "masks of gates")
    gates.mask_(graph.all_kept())
    secateur.merge_gates_(gated)
    case.same(copy.deepcopy(case.precise), gated, "merged gates are not the identity")
    if list(gated.state_dict()) != list(case.precise.state_dict()):
        raise Found("merging leaves other tensors")
    outcome.done.add("gates")


def check_repair(case: Case, graph: ChannelGraph, outcome: Outcome) -> None:
    """No layer that is fitted does worse on all images than its plain cut does, with the same inputs."""
    plan = Plan.random(graph, 0.4, case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    batches = [tuple(torch.randn(12, *t.shape[1:], generator=generator, dtype=t.dtype) for t in case.example)]
    plain_cut = secateur.shrink(case.network, plan)
    repaired = secateur.repair(case.network, plan, batches)
    if [(n, t.shape, t.dtype) for n, t in repaired.state_dict().items()] != [
        (n, t.shape, t.dtype) for n, t in plain_cut.state_dict().items()
    ]:
        raise Found("repair gives tensors of other names or shapes")
    for name, tensor in repaired.named_parameters():
        if not bool(tensor.isfinite().all()):
            raise Found(f"repair gives {name} values that are not finite")
    outcome.done.add("repair")
    if next(repaired.parameters()).dtype != torch.float64 or "single" in case.flags:
        return
    owners = Counter(id(p) for m in repaired.modules() for p in vars(m)["_parameters"].values())
    modules = [
        name
        for name, m in repaired.named_modules()
        if type(m) in (nn.Conv2d, nn.Linear)
        and not (m._forward_hooks or m._forward_pre_hooks)
        and owners[id(m.weight)] == 1
    ]
    seen = [record(m, modules, batches[0]) for m in (case.network, repaired)]
    kept = plan.cuts().kept
    weights, plain_weights = dict(repaired.named_parameters()), dict(plain_cut.named_parameters())
    for name in modules:
        weight = weights.get(f"{name}.weight")
        calls = [s.get(name, []) for s in seen]
        if weight is None or any(len(c) != 1 for c in calls) or torch.equal(weight, plain_weights[f"{name}.weight"]):
            continue
        (_, wanted), (given, got) = calls[0][0], calls[1][0]
        channels = graph.axes.get((f"{name}.weight", 1))
        if channels is not None and len(channels) > len(channels.unique()) + 1:
            continue  # behind a flatten, the inputs are fitted, and measured on the images held out alone
        rows = kept.get(f"{name}.weight", {}).get(0)
        axis = -1 if isinstance(repaired.get_submodule(name), nn.Linear) else 1
        wanted = wanted if rows is None else wanted.index_select(axis, rows)
        with torch.no_grad():
            was = plain_cut.get_submodule(name)(given)
        after, before = float((got - wanted).square().sum()), float((was - wanted).square().sum())
        if not after <= before * (1 + 1e-6) + 1e-12 * float(wanted.square().sum()):
            raise Found(f"repair makes {name} worse: {after:.6g}, plain {before:.6g}")
        outcome.done.add("repair measured")


def record(model: nn.Module, names: Sequence[str], example: Sequence[Tensor]) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Inputs and outputs of these modules."""
    model = copy.deepcopy(model).eval()
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name in names:

        def note(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            found.setdefault(name, []).append((args[0].detach().clone(), output.detach().clone()))

        model.get_submodule(name).register_forward_hook(note)
    torch.manual_seed(0)
    with torch.no_grad():
        model(*(t.clone() for t in example))
    return found


def check_folder(case: Case, graph: ChannelGraph, outcome: Outcome) -> None:
    plan = Plan.random(graph, 0.5, case.seed)
    cut = secateur.shrink(case.network, plan)
    result = Result(model=cut, plan=plan, settings=TickTock.of(keep_macs=0.5), history=())

    def build() -> nn.Module:
        """With other values in all that a file holds."""
        network = copy.deepcopy(case.network)
        with torch.no_grad():
            for tensor in network.state_dict().values():
                tensor.mul_(3 if tensor.is_floating_point() else 1)
        return network

    with tempfile.TemporaryDirectory() as folder:
        secateur.save(result, folder)
        loaded = secateur.load(folder, build)
    one, other = cut.state_dict(), loaded.state_dict()
    if list(one) != list(other) or any(bits(one[name]) != bits(other[name]) for name in one):
        raise Found("a saved network is loaded with other values")
    alike = all(one[name].stride() == other[name].stride() for name in one)  # files do not hold memory formats
    for a, b in zip(outputs(cut, case.example, "eval"), outputs(loaded, case.example, "eval"), strict=True):
        if bits(a) != bits(b) and (alike or gap_of(a, b) > 1e-6 * float(a.abs().max())):
            raise Found("a loaded network gives other outputs")
    outcome.done.add("folder")


def check_again(case: Case, graph: ChannelGraph, outcome: Outcome) -> None:
    """Another analysis finds the same as the one before, and the check that users have raises no false alarm."""
    first, second = (secateur.analyze(case.network, case.example).to_dict() for _ in range(2))
    if first != second:
        raise Found("another analysis finds something else")
    secateur.verify(case.network, Plan.random(graph, 0.4, case.seed), case.example)
    outcome.done.add("verified")


def runs_backward(model: nn.Module, case: Case) -> bool:
    try:
        sum(t.square().mean() for t in flat(model(*case.precise_example))).backward()
    except RuntimeError:
        return False
    return True


def reaches_loss(case: Case, graph: ChannelGraph) -> bool:
    """Whether a layer that gates are put on has a gradient; results may be unused, or made whole numbers."""
    plain = copy.deepcopy(case.precise).eval().requires_grad_()
    runs_backward(plain, case)
    gated = (group for group in graph.groups if group.name not in graph.ungated)
    makers = {member.tensor for group in gated for member in group.members if member.role == "produces"}
    return any(name in makers and tensor.grad is not None for name, tensor in plain.named_parameters())


def check_loop(case: Case, graph: ChannelGraph, outcome: Outcome) -> None:
    """Gates that decide in a loop of the user's own, without a step of training, cut what the plan says."""
    model = copy.deepcopy(case.precise)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    try:
        pruner = secateur.Pruner(model, graph=graph)
    except InvalidModel:
        return
    model.eval()
    if not runs_backward(model, case):
        if runs_backward(copy.deepcopy(case.precise).eval().requires_grad_(), case):
            raise Found("gates cannot be differentiated, and the network can")
        return
    if all(phi.grad is None for phi in pruner.gates.phis):
        if reaches_loss(case, graph):
            raise Found("no gate has a gradient, and a layer with gates has")
        return
    pruner.observe()
    pruner.prune(fraction=0.3)
    kept = pruner.kept.clone()
    model = pruner.finish()
    # It has run once, which some networks remember.
    whole = copy.deepcopy(case.precise).eval()
    with torch.no_grad():
        whole(*case.precise_example)
    case.same(masked_by(whole, Plan(graph, kept)), model, "a loop of one's own", ("eval",))
    outcome.done.add("loop")


def check_program(case: Case, graph: ChannelGraph, outcome: Outcome) -> None:
    """An exported program gives what the network gives; what torch cannot export is refused with an error of ours."""
    cut = secateur.shrink(case.network, Plan.random(graph, 0.5, case.seed)).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.pt2"
        try:
            secateur.export(cut, path, case.example)
        except SecateurError:
            outcome.done.add("export refused")
            return
        if case.example[0].dtype != torch.float64:
            return
        program = torch.export.load(path).module()
        with torch.no_grad():
            expected, got = flat(cut(*case.example)), flat(program(*case.example))
    for a, b in zip(expected, got, strict=True):
        if gap_of(a, b) > 1e-6 * max(1e-3, float(a.abs().max())):
            raise Found("an exported program gives other outputs")
    outcome.done.add("export")


PARTS: dict[str, Callable[[Case, ChannelGraph, Outcome], None]] = {
    "gates": check_gates,
    "repair": check_repair,
    "folder": check_folder,
    "loop": check_loop,
    "again": check_again,
    "program": check_program,
}
