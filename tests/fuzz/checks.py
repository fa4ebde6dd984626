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

import sizes  # noqa: F401  # registers its steps, and those of strange
import torch
from grammar import Network, inputs, numbers_of
from oracle import TOLERANCE, masked, random_plan, randomize_
from torch import Tensor, nn

import secateur
from secateur import ChannelGraph, InvalidModel, Plan, SecateurError, TickTock
from secateur.randomness import random_state
from secateur.runs.events import Result


class Found(AssertionError):
    """Something that must hold does not."""


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


def bits(tensor: Tensor) -> Any:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tuple(tensor.shape), tensor.dtype, plain.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def plain(value: Any) -> Any:
    """What can be compared of an attribute."""
    if isinstance(value, Tensor):
        return id(value), bits(value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def state_of(model: nn.Module) -> dict[str, Any]:
    """All of a model, and of the random generators: attributes, hooks and flags too."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        state |= {f"{name}:{key}": plain(value) for key, value in vars(module).items()}
    state |= {f"flags of {n}": (p.requires_grad, p.grad is None, p._version) for n, p in model.named_parameters()}
    state["keys"] = list(model.state_dict())
    state["random"] = {key: bits(v) if isinstance(v, Tensor) else repr(v) for key, v in random_state().items()}
    return state


def assert_unchanged(model: nn.Module, before: dict[str, Any], what: str) -> None:
    after = state_of(model)
    changed = sorted((before.keys() ^ after.keys()) - {"random"})
    changed += [key for key, value in before.items() if key in after and after[key] != value]
    if changed:
        raise Found(f"{what} {changed[:3]}")


def outputs(model: nn.Module, example: Sequence[Tensor], mode: str) -> list[Tensor]:
    model.train(mode == "train")
    for module in model.modules():
        if "Dropout" in type(module).__name__:
            module.eval()
    torch.manual_seed(0)
    random.seed(0)
    with torch.no_grad():
        return flat(model(*(t.clone() for t in example)))


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [tensor for item in values for tensor in flat(item)]


@dataclass
class Case:
    """A network with its example, and what is allowed for it."""

    seed: int
    network: nn.Module
    example: tuple[Tensor, ...]
    flags: set[str]

    def __post_init__(self) -> None:
        self.precise = copy.deepcopy(self.network).double()
        """What masked and cut are compared on."""
        self.precise_example = tuple(t.double() for t in self.example)

    @property
    def tolerance(self) -> float:
        return 1e-4 if "single" in self.flags else TOLERANCE

    def same(self, one: nn.Module, other: nn.Module, what: str, modes: Sequence[str] = ("eval", "train")) -> None:
        """Equal up to rounding; what rounding does is measured where they differ. The networks run, and may change."""
        if "noisy" in self.flags:
            modes = [mode for mode in modes if mode == "eval"]
        for mode in modes:
            try:
                expected = outputs(one, self.precise_example, mode)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue  # the masked network cannot run in this mode, e.g. training with one value
            got = outputs(other, self.precise_example, mode)
            if [t.shape for t in got] != [t.shape for t in expected]:
                raise Found(f"{what}: other shapes in {mode}")
            for a, b in zip(expected, got, strict=True):
                gap, scale = gap_of(a, b), float(a.abs().nan_to_num(0, 0, 0).max()) if a.numel() else 0.0
                if gap > self.tolerance * max(scale, 1e-3) and gap > 100 * self.rounding(one, mode):
                    raise Found(f"{what}: differ by {gap:.1e} of {scale:.1e} in {mode}")

    def rounding(self, model: nn.Module, mode: str) -> float:
        """How far the last places of the inputs move the outputs."""
        moved = 0.0
        base = outputs(copy.deepcopy(model), self.precise_example, mode)
        for sign in (1, -1):
            nudged = tuple(t * (1 + sign * 4e-16) + sign * 1e-16 for t in self.precise_example)
            other = outputs(copy.deepcopy(model), nudged, mode)
            moved = max([moved, *(gap_of(a, b) for a, b in zip(base, other, strict=True))])
        return moved


def gap_of(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    if bool((a.isnan() != b.isnan()).any()):
        return float("inf")
    return float(torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(0.0, float("inf"), 0).max())


def case_of(seed: int, steps: Sequence[str], numbers: Sequence[int] | None = None) -> Case:
    torch.manual_seed(seed)
    random.seed(seed)
    numbers = numbers_of(seed) if numbers is None else numbers
    network = Network(numbers, steps)
    own = random.Random(sum(numbers) + seed)
    orthogonal = any("parametrizations" in n for n, _ in network.named_modules())
    if not orthogonal:
        randomize_(network, seed)
    example = inputs(seed)
    treatment = own.choice(["none"] * 6 + ["channels last", "single", "half"])
    if treatment == "channels last":
        for tensor in network.state_dict().values():
            if tensor.dim() == 4:
                tensor.data = tensor.to(memory_format=torch.channels_last)
        example = tuple(t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in example)
    elif treatment != "none":
        dtype = torch.float32 if treatment == "single" else torch.bfloat16
        network.to(dtype)
        example = tuple(t.to(dtype) for t in example)
    if own.random() < 0.2:
        for parameter in own.sample(list(network.parameters()), 2):
            parameter.requires_grad_(False)
    network.train(own.random() < 0.5)
    for module in network.modules():
        if own.random() < 0.05:
            module.eval()
    return Case(seed, network, example, network.flags)


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
