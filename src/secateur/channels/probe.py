"""The probe: cut a little of every group, run, and compare with the masked network.

Labels cannot see sizes that Python code writes down (`split([8, 8])`, `view(-1, 576)`) or computes from a shape. What
raises or differs when cut is frozen, with the error as its reason. All groups are cut at once; only when that fails
are the guilty ones looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from secateur.channels.example import Example
from secateur.channels.groups import ChannelGraph, ChannelGroup
from secateur.channels.guard import explain
from secateur.channels.plan import Plan
from secateur.channels.verify import TOLERANCE, compare

FRACTIONS = (0.0, 0.4)
"""How much of each group is cut, one channel at least: a single one, then enough to meet other remainders."""
LARGE = 150_000_000


def find_failures(
    model: nn.Module, graph: ChannelGraph, example: Example, say: Callable[[str], None]
) -> dict[str, str]:
    """The groups that cannot be cut after all, by name, with the reason."""
    failures: dict[str, str] = {}
    candidates = [group for group in graph.groups if group.size > 1]
    for fraction in FRACTIONS:
        candidates = [group for group in candidates if group.name not in failures]
        failures.update(_search(model, graph, example, candidates, fraction, say))
    return failures


def _search(
    model: nn.Module,
    graph: ChannelGraph,
    example: Example,
    groups: list[ChannelGroup],
    fraction: float,
    say: Callable[[str], None],
) -> dict[str, str]:
    failures: dict[str, str] = {}
    remaining = groups
    while remaining:
        reason = attempt(model, graph, example, remaining, fraction)
        if reason is None:
            break
        say(f"probing: {len(remaining)} groups, {len(failures)} frozen")
        found = _bisect(model, graph, example, remaining, fraction)
        if not found:
            found = {group.name: reason for group in remaining}
        failures.update(found)
        remaining = [group for group in remaining if group.name not in failures]
    return failures


def _bisect(
    model: nn.Module, graph: ChannelGraph, example: Example, groups: Sequence[ChannelGroup], fraction: float
) -> dict[str, str]:
    """Of groups that fail together, those that fail in ever smaller company."""
    if len(groups) == 1:
        reason = attempt(model, graph, example, groups, fraction)
        return {} if reason is None else {groups[0].name: reason}
    found: dict[str, str] = {}
    middle = len(groups) // 2
    for half in (groups[:middle], groups[middle:]):
        if attempt(model, graph, example, half, fraction) is not None:
            found.update(_bisect(model, graph, example, half, fraction))
    return found


def attempt(
    model: nn.Module, graph: ChannelGraph, example: Example, groups: Sequence[ChannelGroup], fraction: float
) -> str | None:
    """Why cutting these groups fails, or None if it works."""
    generator = torch.Generator().manual_seed(len(groups))
    kept = graph.all_kept()
    for group in groups:
        count = min(max(1, round(fraction * group.size)), group.size - 1)
        kept[group.start + torch.randperm(group.size, generator=generator)[:count]] = False
    plan = Plan(graph, kept)
    large = graph.params > LARGE
    meta = next(model.parameters()).device.type == "meta"
    try:
        result = compare(
            model, plan, example, double=not large, prepare=None if meta else perturb_, modes=("eval",), values=not meta
        )
    except Exception as error:
        # Whatever a user's forward pass raises on other sizes is the answer that is looked for.
        return f"the forward pass uses a fixed size: {explain(error)}"
    if plan.exact and not result.difference <= (1e-3 if large else TOLERANCE * 10):
        return f"changes the result by {result.difference:.1e} when removed: the code depends on the number of channels"
    return None


@torch.no_grad()
def perturb_(model: nn.Module) -> None:
    """Move every weight a little, so that zero-initialised branches cannot hide a wrong cut."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point() and tensor.numel():
            scale = 0.1 * float(tensor.abs().mean()) or 0.05
            noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
            tensor.add_(noise * scale)
