"""The probe: cut a little of every group, run, and compare with the masked network.

Labels cannot see sizes that Python code writes down (`split([8, 8])`, `view(-1, 576)`) or computes from a shape. What
raises or differs when cut is frozen, with the error as its reason. All groups are cut at once, first to see whether
the forward pass runs at all, without the arithmetic, then to compare numbers; only on failure are the guilty ones
looked for.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from secateur.channels.example import Example
from secateur.channels.groups import ChannelGraph, ChannelGroup
from secateur.channels.guard import explain
from secateur.channels.plan import Plan
from secateur.channels.shapes import ShapesOnly
from secateur.channels.shrink import copy_model, shrink_
from secateur.channels.verify import compare, run

LARGE, COSTLY = 150_000_000, 20_000_000_000
"""Networks with more parameters, or more MACs for the example, are compared in single precision."""


@dataclass(frozen=True)
class Failure:
    """Why a cut does not work, and the innermost module that was running, where known."""

    reason: str
    module: str | None = None


@dataclass(frozen=True)
class Probe:
    """Tries cuts of one network on copies of it."""

    model: nn.Module
    graph: ChannelGraph
    example: Example
    say: Callable[[str], None]

    def failures(self) -> dict[str, str]:
        """The groups that cannot be cut after all, by name, with the reason."""
        found: dict[str, str] = {}
        meta = next(self.model.parameters()).device.type == "meta"
        # A single channel, then enough to meet other remainders, then a comparison in numbers.
        attempts = [(self.runs, 0.0), (self.runs, 0.4)] + ([] if meta else [(self.agrees, 0.2)])
        for attempt, fraction in attempts:
            groups = [group for group in self.graph.groups if group.size > group.at_least and group.name not in found]
            found.update(self._search(groups, lambda some, a=attempt, f=fraction: a(self._plan(some, f))))
        return found

    def _plan(self, groups: Sequence[ChannelGroup], fraction: float) -> Plan:
        generator = torch.Generator().manual_seed(len(groups))
        kept = self.graph.all_kept()
        for group in groups:
            # An odd number, for code that asks whether the number of channels is even.
            count = min(round(fraction * group.size) | 1, group.size - group.at_least)
            kept[group.start + torch.randperm(group.size, generator=generator, device="cpu")[:count]] = False
        return Plan(self.graph, kept)

    def runs(self, plan: Plan) -> Failure | None:
        """Whether the shrunk network runs."""
        work = shrink_(copy_model(self.model), plan)
        try:
            try:
                with ShapesOnly():
                    run(work, self.example, "eval")
            except Exception:
                # Some operators cannot do with zeros: only what fails with the arithmetic has failed.
                run(work, self.example, "eval")
        except Exception as error:
            # Whatever a user's forward pass raises on other sizes is the answer that is looked for.
            return Failure(f"the forward pass uses a fixed size: {explain(error)}", _running(work, error))
        return None

    def agrees(self, plan: Plan) -> Failure | None:
        """Whether the shrunk network computes what the masked one does."""
        heavy = self.graph.params > LARGE or self.graph.macs > COSTLY
        precision = torch.float32 if heavy else torch.float64
        try:
            result = compare(self.model, plan, self.example, precision=precision, prepare=perturb_, modes=("eval",))
        except Exception as error:
            return Failure(f"the forward pass uses a fixed size: {explain(error)}")
        if plan.exact and not result.agrees:
            change = f"changes the result by {result.difference:.1e} when removed"
            return Failure(f"{change}: the code depends on the number of channels")
        return None

    def _search(
        self, groups: list[ChannelGroup], attempt: Callable[[Sequence[ChannelGroup]], Failure | None]
    ) -> dict[str, str]:
        """Freeze guilty groups until the rest works together."""
        found: dict[str, str] = {}
        while groups:
            failure = attempt(groups)
            if failure is None:
                break
            self.say(f"probing: {len(groups)} groups to go, {len(found)} frozen")
            guilty = _bisect(_near(groups, failure.module), attempt) or _bisect(groups, attempt)
            found.update(guilty or {group.name: failure.reason for group in groups})
            groups = [group for group in groups if group.name not in found]
        return found


def _bisect(
    groups: Sequence[ChannelGroup], attempt: Callable[[Sequence[ChannelGroup]], Failure | None]
) -> dict[str, str]:
    """Of these groups, those that fail in ever smaller company."""
    failure = attempt(groups) if groups else None
    if failure is None:
        return {}
    if len(groups) == 1:
        return {groups[0].name: failure.reason}
    middle = len(groups) // 2
    return _bisect(groups[:middle], attempt) | _bisect(groups[middle:], attempt)


def _near(groups: Sequence[ChannelGroup], module: str | None) -> list[ChannelGroup]:
    """Groups with members in this module, or else in the nearest one around it."""
    while module:
        near = [g for g in groups if any(m.tensor.startswith(f"{module}.") for m in g.members)]
        if near:
            return near
        module = module.rpartition(".")[0]
    return []


def _running(model: nn.Module, error: BaseException) -> str | None:
    """The innermost module whose code was running when the error was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((names[id(f.f_locals["self"])] for f in reversed(frames) if id(f.f_locals.get("self")) in names), None)


@torch.no_grad()
def perturb_(model: nn.Module) -> None:
    """Move every weight a little, so that zero-initialised branches cannot hide a wrong cut."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point() and tensor.numel():
            scale = 0.1 * float(tensor.abs().mean()) or 0.05
            noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype, device="cpu").to(tensor.device)
            tensor.add_(noise * scale)
