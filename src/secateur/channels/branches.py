"""Find branches that can go: addends of a sum that nothing else reads, in blocks that are a plain chain without them.

In `relu(shortcut(x) + branch(x))` the branch can go. The block is then replaced by a plain `nn.Sequential` of what is
left, here the shortcut and the activation.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from secateur.channels.blocks import ACTIVATIONS, BlockCut, Link
from secateur.channels.cost import is_kept
from secateur.channels.flow import Flow, ModuleCall, Step
from secateur.channels.groups import Branch, ChannelGraph, owner
from secateur.channels.reasons import Kind, Reason
from secateur.channels.rehearsal import CHOICES
from secateur.channels.shrink import tensors_of

HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


class Stays(Exception):
    """A branch that cannot go, with the reason."""

    def __init__(self, kind: Kind, detail: str = "") -> None:
        super().__init__(kind)
        self.reason = Reason(kind, detail)


@dataclass(frozen=True)
class Found:
    """A branch in one forward pass."""

    cut: BlockCut
    addends: tuple[str, ...]
    """Modules whose output is the addend."""
    rows: tuple[int, ...]
    ends: tuple[str, ...]
    """The modules whose parameters the addend comes from without others between, in the order in which they run."""


class Finder:
    """Looks for branches in one forward pass of a model."""

    def __init__(self, model: nn.Module, flow: Flow) -> None:
        self.flow = flow
        self.steps = flow.steps
        self.modules = dict(model.named_modules())
        self.tensors = tensors_of(model)
        self._paths: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(name)
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self._names: dict[int, list[str]] = {}
        for name, tensor in named:
            self._names.setdefault(id(tensor), []).append(name)

    def find(self) -> tuple[list[Found], dict[str, Reason]]:
        """The branches that can go, and the reasons for those that stay, by the module that adds."""
        found, stay = list[Found](), dict[str, Reason]()
        for number, step in enumerate(self.steps):
            if not step.is_sum:
                continue
            for addend, other in (step.reads, step.reads[::-1]):
                body = self._body(number, addend)
                if not any(isinstance(self.tensors[name], nn.Parameter) for s in body for name in self.steps[s].leaves):
                    continue
                try:
                    found.append(self._branch(number, addend, other, body))
                except Stays as error:
                    adder = self.flow.calls[step.call].module if step.call >= 0 else None
                    stay.setdefault(adder or "", error.reason)
        return found, stay

    def _body(self, number: int, addend: int) -> set[int]:
        """The steps whose results only serve to compute this addend of that sum."""
        flow, body = self.flow, set[int]()
        waiting = [-flow.maker[addend]] if addend in flow.maker else []
        while waiting:
            # Latest first, so that all readers of its results are known.
            step = -heapq.heappop(waiting)
            if step in body or not self._serves(step, body, number, addend):
                continue
            body.add(step)
            for value in self.steps[step].reads:
                if value in flow.maker:
                    heapq.heappush(waiting, -flow.maker[value])
        return body

    def _serves(self, step: int, body: Set[int], number: int, addend: int) -> bool:
        for value in self.steps[step].makes:
            if value in self.flow.outputs:
                return False
            for reader in self.flow.readers.get(value, ()):
                if reader not in body and (reader != number or value != addend):
                    return False
        return True

    def _branch(self, number: int, addend: int, other: int, body: Set[int]) -> Found:
        place, first = self.steps[number].call, min(body)
        while place >= 0 and self.flow.calls[place].first > first:
            place = self.flow.calls[place].parent
        call = self.flow.calls[place] if place >= 0 else None
        if call is None or not call.module:
            raise Stays(Kind.NO_BLOCK)
        if call.given is None or call.gives is None:
            raise Stays(Kind.SEVERAL_TENSORS, call.module)
        if any(self.steps[s].looks or self.steps[s].name in CHOICES for s in (*body, *self._own_steps(place))):
            raise Stays(Kind.VALUES, call.module)
        left, fresh = self._chain(place, call, number, other, body)
        self._check_outside(call, body, fresh)
        kept = tuple(f"{call.module}.{link.name}." for link in left if link.activation is None)
        gone = tuple(n for n in self.tensors if n.startswith(f"{call.module}.") and not n.startswith(kept))
        self._check_tensors(call, gone, body)
        stay = tuple(f"{call.module}.{link.name}." for link in left if link.activation is None and not link.copied)
        self._check_modules(call, stay)
        names = [c.module for c in self.flow.calls]
        addends = [c.module for c in self.flow.calls if c.module and c.gives == addend and names.count(c.module) == 1]
        rows = tuple(sorted(row for s in body for row in self.steps[s].rows))
        return Found(BlockCut(call.module, left, gone), tuple(addends), rows, self._ends(addend, body))

    def _ends(self, addend: int, body: Set[int]) -> tuple[str, ...]:
        found, waiting = set[int](), [addend]
        while waiting:
            step = self.flow.maker.get(waiting.pop(), -1)
            if step in body and self.steps[step].leaves:
                found.add(step)
            elif step in body:
                waiting += self.steps[step].reads
        return tuple(dict.fromkeys(owner(name) for step in sorted(found) for name in self.steps[step].leaves))

    def _own_steps(self, place: int) -> Iterator[int]:
        """The steps of a module's own code."""
        call = self.flow.calls[place]
        return (s for s in range(call.first, call.last) if self.steps[s].call == place)

    def _is_idle(self, number: int) -> bool:
        """Whether it changes no value: it only counts in a buffer, as batch norms count batches, or is of no use."""
        step = self.steps[number]
        used = any(value in self.flow.readers or value in self.flow.outputs for value in step.makes)
        return not used and not step.written and not step.looks and not (step.reads and step.leaves)

    def _chain(
        self, place: int, call: ModuleCall, number: int, other: int, body: Set[int]
    ) -> tuple[tuple[Link, ...], bool]:
        """What is left of the block without the branch, and whether its result is new memory.

        Raises if that is not one module after the other.
        """
        flow, at, left, fresh = self.flow, call.given, list[Link](), False
        children = [(c.first, 0, n) for n, c in enumerate(flow.calls) if c.parent == place]
        for _, is_step, n in sorted([*children, *((s, 1, s) for s in self._own_steps(place))]):
            inside = [n] if is_step else range(flow.calls[n].first, flow.calls[n].last)
            inside = [s for s in inside if not self._is_idle(s)]
            if all(s in body for s in inside) and (inside or is_step):
                continue
            if number in inside and all(s in body or s == number for s in inside):
                if at != other or (not is_step and flow.calls[n].gives != self.steps[number].makes[0]):
                    raise Stays(Kind.NO_CHAIN, "the sum adds something else")
                at = self.steps[number].makes[0]
            elif any(s in body or s == number for s in inside):
                raise Stays(Kind.NO_CHAIN, f"{flow.calls[n].module} does more than the branch")
            elif is_step:
                left.append(self._activation(self.steps[n], call, at))
                at, fresh = self.steps[n].makes[0], True
            elif (link := self._child(flow.calls[n], inside, call, at, body)) is not None:
                left.append(link)
                fresh |= link.copied or flow.memory_of[_number(at)] != flow.memory_of[_number(flow.calls[n].gives)]
                at = flow.calls[n].gives
        if at != call.gives:
            raise Stays(Kind.NO_CHAIN, "it returns something else")
        return tuple(left), fresh

    def _activation(self, step: Step, call: ModuleCall, at: int | None) -> Link:
        name = step.name.removesuffix("_")
        if name not in ACTIVATIONS or step.reads != (at,) or step.leaves or self._writes_to(step, call.given):
            raise Stays(Kind.NO_CHAIN, step.name)
        return Link(name, name, step.options)

    def _child(
        self, child: ModuleCall, inside: Sequence[int], call: ModuleCall, at: int | None, body: Set[int]
    ) -> Link | None:
        """The link for a child that stays; None for one that does nothing, or belongs to the branch."""
        module = self.modules[child.module] if child.module else None
        if not inside and (_does_nothing(module) or self.flow.maker.get(_number(child.given)) in body):
            return None
        path, _, name = (child.module or "").rpartition(".")
        if child.given is None or child.gives is None or child.given != at:
            raise Stays(Kind.NO_CHAIN, f"{child.module} gets something else")
        if module is None or path != call.module or hasattr(nn.Sequential, name):
            raise Stays(Kind.NO_CHAIN, f"{child.module} is not a child of the block")
        if not inside and any(reader in body for reader in self.flow.readers.get(child.given, ())):
            raise Stays(Kind.NO_CHAIN, f"{child.module} may be part of the branch or not")
        if any(self._writes_to(self.steps[s], call.given) for s in inside):
            raise Stays(Kind.NO_CHAIN, f"{child.module} changes the input of the block")
        copied = bool(getattr(module, "inplace", False))
        if copied:
            own = type(module).__module__.startswith("torch.nn.") and not any(module.children())
            copied = own and not any(True for _ in module.parameters())
        if not copied and any(self._writes_to(self.steps[s], child.given) for s in inside):
            raise Stays(Kind.NO_CHAIN, f"{child.module} works in place")
        return Link(name, copied=copied)

    def _writes_to(self, step: Step, value: int | None) -> bool:
        return self.flow.memory_of[_number(value)] in step.written

    def _check_outside(self, call: ModuleCall, body: Set[int], fresh: bool) -> None:
        """Raise if others read what is inside of the block, or later write to what it is given or returns.

        fresh: without the branch the block still returns new memory, not its input itself.
        """
        flow = self.flow
        for s in range(call.first, call.last):
            for value in self.steps[s].makes if s not in body else ():
                outside = any(not call.first <= r < call.last for r in flow.readers.get(value, ()))
                if value != call.gives and (outside or value in flow.outputs):
                    raise Stays(Kind.READ_INSIDE, call.module or "")
        given, gives = flow.memory_of[_number(call.given)], flow.memory_of[_number(call.gives)]
        shared = {given, gives} if given != gives and not fresh else set()
        if any(shared & step.written for step in self.steps[call.last :]):
            raise Stays(Kind.WRITTEN_LATER, call.module or "")

    def _check_tensors(self, call: ModuleCall, gone: Sequence[str], body: Set[int]) -> None:
        """Raise if tensors that would go are used elsewhere, or not used, or if the branch uses others."""
        for name in gone:
            users = self.flow.users.get(name, [])
            elsewhere = [s for s in users if s not in body and not self._is_idle(s)]
            if elsewhere or any(n not in gone for n in self._names[id(self.tensors[name])]):
                raise Stays(Kind.USED_ELSEWHERE, name)
            if not users and isinstance(self.tensors[name], nn.Parameter):
                raise Stays(Kind.UNUSED_PARAMETER, name)
        for name in sorted({name for s in body for name in self.steps[s].leaves} - set(gone)):
            raise Stays(Kind.USED_ELSEWHERE, name)

    def _check_modules(self, call: ModuleCall, kept: tuple[str, ...]) -> None:
        """Raise if modules of the block are shared, run elsewhere, have hooks, or compute their weights."""
        block = f"{call.module}."
        for name, module in self.modules.items():
            if not f"{name}.".startswith(block):
                continue
            if any(not f"{path}.".startswith(block) for path in self._paths[id(module)]):
                raise Stays(Kind.USED_ELSEWHERE, name)
            goes = not f"{name}.".startswith(kept)
            if goes and (any(getattr(module, hooks) for hooks in HOOKS) or is_parametrized(module)):
                raise Stays(Kind.HOOKED, name)
        once = [c for c in self.flow.calls if c.module == call.module]
        others = [
            c.module for c in self.flow.calls
            if c.module and c.module.startswith(block) and not (call.first <= c.first and c.last <= call.last)
        ]  # fmt: skip
        if len(once) > 1 or others:
            raise Stays(Kind.USED_ELSEWHERE, str(call.module if len(once) > 1 else others[0]))
        for path in kept:
            calls = [c for c in self.flow.calls if f"{c.module}." == path]
            if len(calls) > 1 and any(name.startswith(path) for name in self.tensors):
                raise Stays(Kind.USED_ELSEWHERE, path.rstrip("."))


def _number(value: int | None) -> int:
    return -1 if value is None else value


def _does_nothing(module: nn.Module | None) -> bool:
    children = module is not None and type(module) is nn.Sequential and all(map(_does_nothing, module.children()))
    return type(module) is nn.Identity or children


def find_branches(
    model: nn.Module, flows: Mapping[str, Flow], asked_training: Iterable[str], ignored: Iterable[str]
) -> tuple[list[Found], dict[str, Reason]]:
    """The branches that can go in every mode that was watched, and the reasons for those that stay.

    asked_training: modules whose code may run otherwise in a mode that was not watched.
    ignored: modules whose filters stay.
    """
    found, stay = Finder(model, flows["eval"]).find()
    if "train" in flows:
        trained = {each.cut: each for each in Finder(model, flows["train"]).find()[0]}
        for each in found:
            if each.cut not in trained:
                stay[each.cut.block] = Reason(Kind.TRAINING)
        found = [
            replace(each, addends=tuple(a for a in each.addends if a in trained[each.cut].addends))
            for each in found
            if each.cut in trained
        ]
    else:
        asking = [each for each in found if any(f"{n}.".startswith(f"{each.cut.block}.") for n in asked_training)]
        stay |= {each.cut.block: Reason(Kind.TRAINING) for each in asking}
        found = [each for each in found if each not in asking]
    paths = tuple(f"{name}." if name else "" for name in ignored)
    kept = [each for each in found if any(name.startswith(paths) for name in each.cut.tensors)]
    stay |= {each.cut.block: Reason(Kind.IGNORED) for each in kept}
    return [each for each in found if each not in kept], stay


def as_branches(graph: ChannelGraph, found: Iterable[Found]) -> tuple[Branch, ...]:
    """The branches of a graph; where either addend of a sum may go, the one with more multiply-adds."""
    chosen: dict[str, tuple[int, Found]] = {}
    for each in found:
        macs = sum(graph.layers[row].whole for row in each.rows)
        if macs > chosen.get(each.cut.block, (-1, each))[0]:
            chosen[each.cut.block] = macs, each
    branches = []
    for block, (_, each) in chosen.items():
        gone = set(each.cut.tensors)
        groups = [group.name for group in graph.groups if all(member.tensor in gone for member in group.members)]
        addend = each.addends[-1] if each.addends else None
        branch = Branch(block, each.cut, addend, each.rows, tuple(groups))
        own = graph.within(branch)
        # Gates whose channels all stay within the branch are not on its addend.
        sites = {
            site.module for site in graph.sites if site.module in each.ends and not is_kept(site.channels, own).all()
        }
        gate = next((module for module in reversed(each.ends) if module in sites), None)
        branches.append(replace(branch, gate=gate))
    return tuple(branches)
