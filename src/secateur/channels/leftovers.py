"""What branches add where their tensors are zero: anything but zero would be missing without them.

The probe takes all branches away together, where one that is gone may hide what another leaves behind. Here each is
seen alone: what it adds is looked at, and then replaced by what it adds in the whole network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.groups import Branch, ChannelGraph
from secateur.channels.plan import Plan
from secateur.channels.rehearsal import run
from secateur.channels.subject import Subject
from secateur.channels.verify import masked_copy


def leftovers(subject: Subject, graph: ChannelGraph, branches: Sequence[Branch]) -> dict[str, float]:
    """The branches, by name, whose addend is a module's output that is not zero, and its largest value."""
    addends = {branch.addend: branch.name for branch in branches if branch.addend is not None}
    whole = Plan(graph, graph.all_kept())
    without = Plan(graph, graph.all_kept(), frozenset(addends.values()))
    found: dict[str, float] = {}
    for mode, (example, *_) in (subject.smaller_calls or subject.calls).items():
        usual: dict[str, deque[Any]] = {addend: deque() for addend in addends}

        def keep(addend: str, output: Any, usual: dict[str, deque[Any]] = usual) -> None:
            usual[addend].append(output)

        def look(addend: str, output: Any, usual: dict[str, deque[Any]] = usual) -> Any:
            left = float(output.detach().abs().max()) if isinstance(output, Tensor) and output.numel() else 0.0
            if left > 0:
                found[addends[addend]] = max(left, found.get(addends[addend], 0.0))
            return usual[addend].popleft()

        for plan, hook in ((whole, keep), (without, look)):
            model = masked_copy(subject.perturbed, plan, torch.float32)
            with _hooked(model, addends, hook):
                run(model, example.to(torch.float32), mode)
    return found


@contextmanager
def _hooked(model: nn.Module, names: Sequence[str] | dict[str, str], hook: Callable[[str, Any], Any]) -> Iterator[None]:
    handles = [
        model.get_submodule(name).register_forward_hook(lambda module, args, output, name=name: hook(name, output))
        for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
