"""The probe: cut a little of every group, run, and compare with the masked network.

Labels do not know sizes that Python code states (`split([8, 8])`, `view(-1, 576)`) or computes from a shape. Groups
that raise or differ when cut are frozen, with the error as the reason. All groups are cut at once, groups of equal size
by different numbers: first without the arithmetic, to see whether the forward pass runs, then to compare numbers. Only
on failure are the groups searched for the ones that cause it.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from secateur.channels.amounts import Amounts, equal_widths, leaves_one, other_ways, parted, unequal_amounts
from secateur.channels.example import Calls
from secateur.channels.groups import Branch, ChannelGraph, ChannelGroup
from secateur.channels.guard import collecting_later, explain
from secateur.channels.leftovers import leftovers
from secateur.channels.plan import Plan
from secateur.channels.reasons import Kind, Reason
from secateur.channels.rehearsal import run
from secateur.channels.shrink import shrink
from secateur.channels.subject import DoesNotRun, Subject
from secateur.channels.verify import NUDGES, compare, precision_for
from secateur.words import counted

Where = Literal["anywhere", "first", "last"]
"""Which channels of a group to cut."""
Some = TypeVar("Some", ChannelGroup, Branch)
HOLDS_ORIGINAL = "a hook or lambda that holds the model holds the original, make it a method"
SHARED = Reason(Kind.NOT_COPIED, "it would run layers of the original, since a module keeps a function that calls them")


@dataclass(frozen=True)
class Failure:
    """Why a cut fails, and the innermost module that was running, where known."""

    reason: Reason
    module: str | None = None


Attempt = Callable[["Probe", Plan], Failure | None]


def remembered(attempt: Attempt) -> Attempt:
    """Try the same cuts once only: graphs with other attributes often come to the same."""

    @wraps(attempt)
    def asked(probe: Probe, plan: Plan) -> Failure | None:
        key = attempt.__name__, plan.cuts().key, plan.exact, plan.without
        if key not in probe.subject.answers:
            probe.subject.answers[key] = attempt(probe, plan)
        return probe.subject.answers[key]

    return asked


@dataclass(frozen=True)
class Probe:
    """Tries cuts of one network on copies of it."""

    subject: Subject
    graph: ChannelGraph
    say: Callable[[str], object]

    def failures(self) -> dict[str, Reason]:
        """The groups that cannot be cut, by name, with the reason."""
        if self._shares():
            return {group.name: SHARED for group in self._groups}
        found: dict[str, Reason] = {}
        attempts = deque(self._attempts())
        passed = 0
        while passed < len(attempts):
            attempt, amounts, where = attempts[0]
            groups = [group for group in self._groups if group.name not in found]
            failed = self._search(groups, lambda some, a=attempt, n=amounts, w=where: a(self._plan(some, n, w)))
            found.update(failed)
            # Groups that work together with others may fail without them.
            passed = 1 if failed else passed + 1
            attempts.rotate(-1)
        return found

    def _shares(self) -> bool:
        """Whether a copy runs layers of the original model, e.g. by a function that holds them in a closure."""
        if self.subject.is_meta:
            return False
        tensors = [*self.subject.model.parameters(), *self.subject.model.buffers()]
        addresses = {t.data_ptr() for t in tensors if t.layout is torch.strided and t.numel()}
        with suppress(Exception):
            return any(seen.addresses & addresses for seen in self.subject.whole)
        return False

    def first_failure(self) -> Failure | None:
        """What goes wrong first when all groups are cut."""
        if self._shares():
            return Failure(SHARED)
        tried = (attempt(self._plan(self._groups, amounts, where)) for attempt, amounts, where in self._attempts())
        return next((failure for failure in tried if failure is not None), None)

    def _attempts(self) -> list[tuple[Callable[[Plan], Failure | None], Amounts, Where]]:
        """Ways to try a cut, how much to cut of each group, and where: a single channel, then more or less of each than
        of its like; then a comparison in numbers, and whether the code goes the same way at other widths.
        """
        unequal, equal = unequal_amounts(self._groups), equal_widths(self._groups)
        apart = [amounts for amounts in parted(unequal[0], self.graph.padded) if any(amounts.values())]
        compared = [*unequal[:-1], *apart]
        shapes: list[Amounts] = [dict.fromkeys(equal, 1), unequal[-1]]
        flips = self.subject.comparisons.flips(self.graph, self._groups)
        if self.subject.is_meta:
            return [(self.runs, amounts, "anywhere") for amounts in (*shapes, *compared, equal, *flips)]
        alike = [equal] if any(equal.values()) else []
        if leaves_one(self._groups, unequal[0]):
            alike.append(unequal[-1])
        ways = [*other_ways(self._groups, self.graph.frozen, self.graph.shapes), *flips]
        # Where numbers agree, it does not matter which way the code goes.
        ways = [amounts for n, amounts in enumerate(ways) if amounts not in (*compared, *alike, *ways[:n])]
        return [
            *((self.runs, amounts, "anywhere") for amounts in shapes),
            *((self.agrees, amounts, "anywhere") for amounts in compared),
            # Code that moves zeros at another width may be right by luck where groups are cut anywhere.
            *((self.roughly_agrees, unequal[0], where) for where in ("first", "last") if self.graph.padded),
            *((self.roughly_agrees, amounts, "anywhere") for amounts in alike),
            *((self.goes_alike, amounts, "anywhere") for amounts in ways if any(amounts.values())),
        ]

    def bound_branches(self) -> dict[str, Reason]:
        """The branches that cannot go, by name, with the reason."""
        if self._shares():
            return {branch.name: SHARED for branch in self.graph.branches}
        found: dict[str, Reason] = {}
        for branches in _apart(self.graph.branches):
            with suppress(Exception):  # what cannot run is found below
                left = {} if self.subject.is_meta else leftovers(self.subject, self.graph, branches)
                found |= {name: Reason(Kind.NOT_NEUTRAL, f"{value:.1e}") for name, value in left.items()}
            for branch in branches:
                alone = Plan(self.graph, self.graph.all_kept(), frozenset([branch.name]))
                if branch.addend is None and (failure := self._goes_without(alone)) is not None:
                    found[branch.name] = failure.reason
            branches = [branch for branch in branches if branch.name not in found]
            # Those without which it does not run are found without the arithmetic.
            for ask in (self._runs_without, self._goes_without):

                def attempt(some: Sequence[Branch], ask: Callable[[Plan], Failure | None] = ask) -> Failure | None:
                    names = frozenset(branch.name for branch in some)
                    return ask(Plan(self.graph, self.graph.all_kept(), names))

                while branches and (failure := attempt(branches)) is not None:
                    self.say(f"probing: {counted(len(branches), 'branch', 'branches')}")
                    found |= _bisect(branches, attempt) or {branch.name: failure.reason for branch in branches}
                    branches = [branch for branch in branches if branch.name not in found]
        return found

    @remembered
    @collecting_later()
    def _runs_without(self, plan: Plan) -> Failure | None:
        """Why the network does not run without some branches, as far as that is certain without the arithmetic."""
        return self._tries(plan)[1]

    @remembered
    @collecting_later()
    def _goes_without(self, plan: Plan) -> Failure | None:
        """Whether the network without some branches computes what it does with zeros for their parameters."""
        if self.subject.is_meta:
            return self.runs(plan)
        failure = self._runs_without(plan)
        if failure is not None:
            return failure
        smaller = self.subject.smaller_calls
        with suppress(Exception):
            # The sizes of channels do not change: a smaller picture shows the same.
            if smaller and compare(self.subject.perturbed, plan, smaller, precision=torch.float32, nudges=0).agrees:
                return None
        failure = self._compare(plan)
        if failure is None:
            return None
        kind = {Kind.DIFFERS: Kind.NOT_NEUTRAL}.get(failure.reason.kind, Kind.NEEDED)
        return Failure(Reason(kind, failure.reason.detail), failure.module)

    def works(self, channels: Tensor) -> Failure | None:
        """A quick answer for the groups of these channels: whether they can be cut without the others."""
        groups = [group for group in self._groups if group.has_any(channels)]
        if not groups:
            return None
        unequal = unequal_amounts(self._groups)
        ways = [unequal[0], *([unequal[-1]] if leaves_one(groups, unequal[0]) else [])]
        attempts = [self.runs] if self.subject.is_meta else [self.runs, self._roughly_works]
        plans = [self._plan(groups, amounts) for amounts in ways]
        return next((failure for plan in plans for attempt in attempts if (failure := attempt(plan))), None)

    @property
    def _groups(self) -> list[ChannelGroup]:
        return [group for group in self.graph.groups if group.size > group.at_least]

    def _plan(self, groups: Sequence[ChannelGroup], amounts: Amounts, where: Where = "anywhere") -> Plan:
        generator = torch.Generator().manual_seed(len(groups))
        removed = []
        for group in groups:
            order = torch.arange(group.size, device="cpu")
            if where == "anywhere":
                order = torch.randperm(group.size, generator=generator, device="cpu")
            elif where == "last":
                order = order.flip(0)
            removed.append(group.start + order[: amounts[group.name]])
        kept = self.graph.all_kept()
        kept[torch.cat(removed or [kept.nonzero()[:0, 0]])] = False
        return Plan(self.graph, kept)

    @remembered
    @collecting_later()
    def runs(self, plan: Plan) -> Failure | None:
        """Whether the shrunk network runs."""
        ran, failure = self._tries(plan)
        if ran or failure is not None:
            return failure
        # Some operators fail on zeros: only an error with the arithmetic counts.
        work = shrink(self.subject.template, plan)
        for mode, (example, *_) in self.subject.calls.items():
            try:
                run(work, example, mode)
            except Exception as error:
                # Any error of the user's forward pass is an answer.
                return _failed(plan, error)
        return None

    def _tries(self, plan: Plan) -> tuple[bool, Failure | None]:
        """Whether the shrunk network runs without the arithmetic, and why not with it, where that is certain."""
        try:
            self.subject.runs_of(plan)
        except DoesNotRun as failed:
            return False, _failed(plan, failed.error) if failed.certain else None
        except Exception:
            return False, None
        return True, None

    @remembered
    @collecting_later()
    def goes_alike(self, plan: Plan) -> Failure | None:
        """Whether the shrunk network runs the same operators; if it does not, whether it computes the same."""
        try:
            cut, whole = self.subject.runs_of(plan), self.subject.whole
            same = [seen.operators for seen in cut] == [seen.operators for seen in whole]
        except Exception:
            # An error that is not due to missing values shows up in the comparison too.
            same = False
        return None if same else self.agrees(plan)

    @remembered
    @collecting_later()
    def roughly_agrees(self, plan: Plan) -> Failure | None:
        """The same in half the time, where differences are large if there are any."""
        if self.subject.agrees_on_smaller(plan, torch.float32):
            return None
        return self._compare(plan, torch.float32, nudges=0) and self._compare(plan)

    @remembered
    @collecting_later()
    def _roughly_works(self, plan: Plan) -> Failure | None:
        """The same, only up to the first mode in which it does not agree."""
        if self.subject.agrees_on_smaller(plan, torch.float32):
            return None
        for mode, examples in self.subject.calls.items():
            calls = {mode: examples}
            if self._compare(plan, torch.float32, 0, calls) and (failure := self._compare(plan, calls=calls)):
                return failure
        return None

    @remembered
    @collecting_later()
    def agrees(self, plan: Plan) -> Failure | None:
        """Whether the shrunk network computes what the masked one does."""
        return None if self.subject.agrees_on_smaller(plan, precision_for(self.graph)) else self._compare(plan)

    def _compare(
        self, plan: Plan, precision: torch.dtype | None = None, nudges: int = NUDGES, calls: Calls | None = None
    ) -> Failure | None:
        precision, calls = precision or precision_for(self.graph), calls or self.subject.calls
        try:
            result = compare(self.subject.perturbed, plan, calls, precision=precision, nudges=nudges)
        except Exception as error:
            return Failure(Reason(Kind.FIXED_SIZE, explain(error)), _running(error))
        if plan.exact and not result.agrees:
            return Failure(Reason(Kind.DIFFERS, f"{result.difference:.1e}"))
        return None

    def _search(
        self, groups: list[ChannelGroup], attempt: Callable[[Sequence[ChannelGroup]], Failure | None]
    ) -> dict[str, Reason]:
        """Find failing groups until the rest works together."""
        found: dict[str, Reason] = {}
        while groups:
            failure = attempt(groups)
            if failure is None:
                break
            if not found and (broken := self.runs(self._plan([], {}))) is not None:
                return {group.name: broken.reason for group in groups}
            self.say(f"probing: {counted(len(groups), 'group')} to go, {len(found)} frozen")
            guilty = _bisect(_near(groups, failure.module), attempt) or _bisect(groups, attempt)
            found.update(guilty or {group.name: failure.reason for group in _smallest(groups, attempt)})
            groups = [group for group in groups if group.name not in found]
        return found


def _failed(plan: Plan, error: Exception) -> Failure:
    """Why the network that was cut by this plan does not run."""
    if plan.without:
        return Failure(Reason(Kind.NEEDED, explain(error)), _running(error))
    if plan.remaining:
        return Failure(Reason(Kind.FIXED_SIZE, explain(error)), _running(error))
    return Failure(Reason(Kind.NOT_COPIED, f"{explain(error)} ({HOLDS_ORIGINAL})"))


def _apart(branches: Sequence[Branch]) -> list[list[Branch]]:
    """Branches in as few lists as needed for no block in a list to lie in another, or be the same."""
    lists: list[list[Branch]] = []
    for branch in branches:
        path = f"{branch.block}."
        free = (some for some in lists if not any(_are_nested(path, f"{other.block}.") for other in some))
        chosen = next(free, None)
        if chosen is None:
            lists.append(chosen := [])
        chosen.append(branch)
    return lists


def _are_nested(path: str, other: str) -> bool:
    return path.startswith(other) or other.startswith(path)


def _bisect(groups: Sequence[Some], attempt: Callable[[Sequence[Some]], Failure | None]) -> dict[str, Reason]:
    """The groups, or branches, that fail alone, found by bisection."""
    failure = attempt(groups) if groups else None
    if failure is None:
        return {}
    if len(groups) == 1:
        return {groups[0].name: failure.reason}
    middle = len(groups) // 2
    return _bisect(groups[:middle], attempt) | _bisect(groups[middle:], attempt)


def _smallest(
    groups: Sequence[ChannelGroup], attempt: Callable[[Sequence[ChannelGroup]], Failure | None]
) -> Sequence[ChannelGroup]:
    """Of groups that fail only together: as few as still fail."""
    step = len(groups) // 2
    while step:
        rests = ([*groups[:start], *groups[start + step :]] for start in range(0, len(groups), step))
        fewer = next((rest for rest in rests if rest and attempt(rest) is not None), None)
        groups, step = (groups, step // 2) if fewer is None else (fewer, min(step, len(fewer) // 2))
    return groups


def _near(groups: Sequence[ChannelGroup], module: str | None) -> list[ChannelGroup]:
    """Groups with members in this module, or else in the nearest one around it."""
    while module:
        near = [g for g in groups if any(m.tensor.startswith(f"{module}.") for m in g.members)]
        if near:
            return near
        module = module.rpartition(".")[0]
    return []


def _running(error: BaseException) -> str | None:
    """The innermost module whose code was running when the error was raised."""
    running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [module for module in running if isinstance(module, nn.Module)]
    names = {id(module): name for name, module in modules[0].named_modules()} if modules else {}
    return next((names[id(module)] for module in reversed(modules) if id(module) in names), None)
