"""Compare masked with shrunk: zeroing channels and cutting them must give the same function."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.copies import copy_with
from secateur.channels.example import Calls, Example, in_precision
from secateur.channels.gaps import ROUNDING, Gap, gaps_between, gaps_of_sums
from secateur.channels.groups import ChannelGraph, ChannelGroup
from secateur.channels.guard import STATISTICS, check_example, check_module, explain
from secateur.channels.plan import Plan
from secateur.channels.rehearsal import Choice, Outcome, Product, Record, real, run
from secateur.channels.shrink import check_plan, shrunk, tensors_of
from secateur.errors import InvalidModel, NotEquivalent, SecateurError
from secateur.words import counted

LARGE, COSTLY = 150_000_000, 20_000_000_000
"""Networks with more parameters, or more MACs for the example, are compared in single precision."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative difference that counts as rounding, by the precision of the comparison."""
NUDGES = 4
"""How often to measure what rounding does to a result that differs."""


@dataclass(frozen=True)
class Verification:
    """The difference between masked and shrunk, relative to the largest output."""

    difference: float
    absolute: float
    outputs: int
    """How many numbers were compared."""
    modes: tuple[str, ...]
    precision: torch.dtype
    """Double, unless the model runs in single precision only."""
    exact: bool
    """False if the plan touches groups that were admitted as inexact."""
    chosen: bool = False
    """Whether intermediate results were compared, since the outputs tell little or depend on near ties: the sums over
    all channels of every convolution and matrix product."""

    @property
    def agrees(self) -> bool:
        """Whether the difference is rounding."""
        return self.difference <= TOLERANCES[self.precision]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {**vars(self), "modes": [*self.modes], "precision": str(self.precision).removeprefix("torch.")}

    def __str__(self) -> str:
        where = ", ".join(self.modes) + ("" if self.exact else ", inexact by request")
        return f"masked and shrunk differ by {self.difference:.1e} over {counted(self.outputs, 'output')} ({where})"


@torch.no_grad()
def mask_(model: nn.Module, plan: Plan) -> nn.Module:
    """Zero every slice that the plan removes, except those that only consume.

    All of a branch that goes is zeroed, norms' statistics aside, which makes the addend zero.
    """
    check_plan(model, plan)
    tensors = tensors_of(model)
    for name in plan.gone:
        if tensors[name].is_floating_point() and not name.endswith(STATISTICS):
            tensors[name].zero_()
    for name, axis, removed, role in plan.removed():
        if role != "consumes":
            tensors[name][(slice(None),) * axis + (removed.to(tensors[name].device),)] = 0
    return model


def verify(model: nn.Module, plan: Plan, example: Any) -> Verification:
    """Run masked against shrunk in double precision, in evaluation and in training mode (dropout off), and compare.

    Raises `NotEquivalent`, naming the groups, if they differ by more than rounding, unless the plan touches groups that
    were admitted as inexact.
    """
    check_module(model)
    call = Example.of(example)
    check_example(model, call)
    calls: Calls = {"eval": [call], "train": [call.repeated(), call]}
    with _not_equivalent("the shrunk network does not run on this example"):
        result = compare(model, plan, calls)
    if not result.outputs:
        raise NotEquivalent(
            "this example gives no outputs to compare", wanted="an example with outputs that are not zero"
        )
    _refuse_difference(result, model, plan, calls)
    return result


def confirm(model: nn.Module, plan: Plan) -> Verification | None:
    """Verify with the example of the plan's graph; raises if the network cannot be cut like that.

    None if nothing is cut, or the graph has no example.
    """
    device = next(model.parameters()).device
    calls = {mode: [example.on(device) for example in examples] for mode, examples in plan.graph.calls.items()}
    if not (plan.remaining or plan.without) or not calls:
        return None
    with _not_equivalent("the pruned network does not run"):
        result = compare(model, plan, calls, precision=precision_for(plan.graph))
    _refuse_difference(result, model, plan, calls)
    return result


@contextmanager
def _not_equivalent(what: str) -> Iterator[None]:
    """Turn errors of the model's code into `NotEquivalent`."""
    try:
        yield
    except SecateurError:
        raise
    except Exception as error:
        raise NotEquivalent(what, got=explain(error)) from error


def precision_for(graph: ChannelGraph) -> torch.dtype:
    return torch.float32 if graph.params > LARGE or graph.macs > COSTLY else torch.float64


def _refuse_difference(result: Verification, model: nn.Module, plan: Plan, calls: Calls) -> None:
    if result.exact and not result.agrees:
        groups = [group.name for group in plan.graph.groups if _is_guilty(model, plan, group, calls)]
        branches = [name for name in sorted(plan.without) if _is_guilty_branch(model, plan.graph, name, calls)]
        named = {"group": groups, "branch": branches}
        listed = [f"{kind} {', '.join(map(repr, names))}" for kind, names in named.items() if names]
        where = " and ".join(listed) or "these groups taken together"
        raise NotEquivalent(
            f"masked and shrunk differ because of {where}",
            got=f"a difference of {result.difference:.1e}",
            wanted=f"at most {TOLERANCES[result.precision]:.0e}",
            remedy="Leave it out with analyze(..., ignore=...), and please report the network",
        )


def _is_guilty(model: nn.Module, plan: Plan, group: ChannelGroup, calls: Calls) -> bool:
    kept = plan.graph.all_kept()
    kept[group.span] = plan.kept[group.span]
    return not bool(kept.all()) and not compare(model, Plan(plan.graph, kept), calls).agrees


def _is_guilty_branch(model: nn.Module, graph: ChannelGraph, name: str, calls: Calls) -> bool:
    return not compare(model, Plan(graph, graph.all_kept(), frozenset([name])), calls).agrees


def compare(
    model: nn.Module,
    plan: Plan,
    calls: Calls,
    *,
    precision: torch.dtype = torch.float64,
    nudges: int = NUDGES,
    record: Callable[[torch.dtype], Record] = Record,
) -> Verification:
    """Masked against shrunk, on copies of the model.

    nudges: how often at most to try what rounding does to a result that differs; with 0 it counts as it is.
    record: makes what watches each pass: first masked in every mode, then shrunk.
    """
    work = masked_copy(model, plan, precision)
    masked: dict[str, tuple[Example, Outcome]] = {}
    for mode, examples in calls.items():
        for example in examples:
            cast = example.to(precision)
            try:
                last = example is [*calls.values()][-1][-1]
                masked[mode] = cast, run(work, cast, mode, record(precision), last=last)
                break
            except Exception as error:
                # Nothing has been cut yet: the model cannot run in double precision, or cannot train on this example.
                if mode == "eval":
                    if precision == torch.float64:
                        return compare(model, plan, calls, precision=torch.float32, nudges=nudges)
                    raise InvalidModel("the model does not run on this example", got=explain(error)) from error
    single = None
    if precision == torch.float64 and masked.keys() != calls.keys():
        rest = {mode: examples for mode, examples in calls.items() if mode not in masked}
        single = compare(model, plan, rest, precision=torch.float32, nudges=nudges)
    work = _shrunk(model, plan, precision)
    leaves_one = any(indices.numel() == 1 for indices in plan.remaining.values())
    gaps: list[Gap] = []
    count = 0
    chosen = False
    for mode, (cast, expected) in masked.items():
        got = run(work, cast, mode, record(precision), last=mode == [*masked][-1])
        more = _nudged(lambda: masked_copy(model, plan, precision), cast, mode, precision)
        if plan.without:
            expected, got, more = _telling(expected), _telling(got), map(_telling, more)
        if leaves_one and (spared := _spared(expected, got, TOLERANCES[precision])):
            expected, more = expected.without(spared), (each.without(spared) for each in more)
        found, compared, led = _differences(expected, got, islice(more, nudges), TOLERANCES[precision])
        gaps += found
        count += sum(t.numel() for t in compared if bool(t.nan_to_num(0, 0, 0).any()))
        chosen |= led
    if single is not None and not single.agrees:
        return single
    return Verification(
        difference=max((gap.relative for gap in gaps), default=0.0),
        absolute=max((gap.absolute for gap in gaps), default=0.0),
        outputs=count,
        modes=(*masked, *(single.modes if single is not None else ())),
        precision=precision,
        exact=plan.exact,
        chosen=chosen,
    )


def _differences(
    expected: Outcome, got: Outcome, nudged: Iterator[Outcome], tolerance: float
) -> tuple[list[Gap], list[Tensor], bool]:
    """The gaps between two passes, the tensors that were compared, and whether those are intermediate results.

    nudged: the first pass with rounding, used where the gap may be nothing else.
    """
    places = _until_they_part(expected, got)
    ours, theirs = expected.sums(places), got.sums(places)
    tried: list[Outcome] = []
    while True:
        alike = [each.outputs for each in tried if not _choose_otherwise(expected, each)]
        found = gaps_between(expected.outputs, got.outputs, 0.01 / tolerance, alike)
        led = [each.sums([n for n in _until_they_part(expected, each) if n in places]) for each in tried]
        steps = [*gaps_of_sums(ours, theirs, led), *_gaps_of_factors(expected, got, tried)]
        if not _may_be_rounding([*(found or []), *steps], tolerance) or (more := next(nudged, None)) is None:
            break
        tried.append(more)
    wrong = found is None or any(gap.relative > tolerance for gap in found)
    parted = wrong and _choose_otherwise(expected, got)
    if parted:
        return steps, ours, True
    if found is None:
        shapes = [[tuple(t.shape) for t in outcome.outputs] for outcome in (expected, got)]
        raise NotEquivalent("masked and shrunk have outputs of different shapes", got=shapes[1], wanted=shapes[0])
    counts = [sum(isinstance(step, Product) for step in outcome.steps) for outcome in (expected, got)]
    if counts[1] > counts[0] and not _choose_otherwise(expected, got):
        raise NotEquivalent("the shrunk network computes more products", got=counts[1], wanted=counts[0])
    return [*found, *steps], ours if expected.blind else expected.outputs, expected.blind


def _gaps_of_factors(expected: Outcome, got: Outcome, nudged: Sequence[Outcome]) -> list[Gap]:
    """Of the numbers that two passes compute with; none where they run other operators."""
    names = [[name for name, _ in each.factors] for each in (expected, got)]
    if names[0] != names[1]:
        return []
    alike = (each for each in (expected, got, *nudged) if len(each.factors) == len(names[0]))
    ours, theirs, *led = ([torch.tensor([number]).double() for _, number in each.factors] for each in alike)
    return gaps_of_sums(ours, theirs, led)


def masked_copy(model: nn.Module, plan: Plan, precision: torch.dtype) -> nn.Module:
    """With zeros for what the plan removes."""
    contents = ((tensor, _cast(tensor.data, precision)) for tensor in tensors_of(model).values())
    copied = copy_with(model, [(tensor, data) for tensor, data in contents if data is not None])
    return mask_(_cast_rest_(copied, precision), plan)


def _shrunk(model: nn.Module, plan: Plan, precision: torch.dtype) -> nn.Module:
    return _cast_rest_(shrunk(model, plan, lambda tensor: _cast(tensor, precision)), precision)


def _cast(tensor: Tensor, precision: torch.dtype) -> Tensor | None:
    """The tensor in that precision, None if it is so already."""
    cast = in_precision(tensor, precision)
    return None if cast is tensor else cast


def _cast_rest_(model: nn.Module, precision: torch.dtype) -> nn.Module:
    """Let modules cast what they know of, where they do more than all do."""
    if any(type(module)._apply is not nn.Module._apply for module in model.modules()):
        model._apply(lambda tensor: in_precision(tensor, precision))
    return model


def _may_be_rounding(gaps: Sequence[Gap], tolerance: float) -> bool:
    """Whether the gaps that are too large may be rounding."""
    large = [gap for gap in gaps if gap.relative > tolerance]
    return bool(large) and not any(gap.absolute > 100 * ROUNDING * gap.moved > 0 for gap in large)


def _nudged(masked: Callable[[], nn.Module], example: Example, mode: str, precision: torch.dtype) -> Iterator[Outcome]:
    """Passes of the masked network with all parameters moved by about as much as rounding moves its results."""
    work = masked()
    generator = torch.Generator(device="cpu").manual_seed(0)
    while True:
        for tensor in (real(parameter.data) for parameter in work.parameters()):
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype, device="cpu")
                tensor.mul_(1 + 4 * torch.finfo(tensor.dtype).eps * noise.to(tensor.device))
        yield run(work, example, mode, Record(precision))


def _choose_otherwise(expected: Outcome, got: Outcome) -> bool:
    """Whether the two passes choose differently; choices per channel have other shapes and do not count."""
    pairs = zip(expected.choices, got.choices, strict=False)
    return len(expected.choices) != len(got.choices) or any(a != b for a, b in pairs if a.shape == b.shape)


def _telling(outcome: Outcome) -> Outcome:
    """The outcome without products that are zero everywhere, as those of a branch without weights are."""
    silent = {n for n, step in enumerate(outcome.steps) if isinstance(step, Product) and not bool(step.sums.any())}
    return outcome.without(silent)


def _spared(expected: Outcome, got: Outcome, tolerance: float) -> set[int]:
    """Which matrix products only the masked network does: torch.einsum does without one where a single channel is left.

    All that the shrunk one does must be among what the masked one does, in that order and with the same sums.
    """
    rest, spared = deque(got.steps), set[int]()
    for place, step in enumerate(expected.steps):
        if rest and _are_same(step, rest[0], tolerance):
            rest.popleft()
        elif isinstance(step, Product) and step.operator != "convolution":
            spared.add(place)
        else:
            return set()
    return set() if rest or expected.blind else spared


def _are_same(one: Product | Choice, other: Product | Choice, tolerance: float) -> bool:
    match one, other:
        case Product(), Product():
            gaps = gaps_between([one.sums], [other.sums]) or []
            return one.operator == other.operator and all(gap.relative <= tolerance for gap in gaps)
        case _:
            return type(one) is type(other)


def _until_they_part(expected: Outcome, got: Outcome) -> list[int]:
    """The steps of two passes that can be compared: all up to the first different choice, and its input."""
    places: list[int] = []
    for place, (a, b) in enumerate(zip(expected.steps, got.steps, strict=False)):
        match a, b:
            case Product(), Product():
                comparable = True
            case Choice(), Choice():
                comparable = a.shape == b.shape
            case _:
                break
        if comparable:
            places.append(place)
        if isinstance(a, Choice) and comparable and a != b:
            break
    return places
