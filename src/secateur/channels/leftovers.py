"""What branches add where their tensors are zero: anything but zero would be missing without them.

The probe takes all branches away together, where one that is gone may hide what another leaves behind. Here each is
seen alone: what it adds is looked at, and then replaced by what it adds in the whole network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.groups import Branch, ChannelGraph
from secateur.channels.plan import Plan
from secateur.channels.rehearsal import Record, run
from secateur.channels.subject import Subject
from secateur.channels.verify import masked_copy


class Quiet(Record):
    """Leaves chance out, and records nothing."""

    def _note(self, *args: Any, **kwargs: Any) -> None:
        pass


def leftovers(subject: Subject, graph: ChannelGraph, branches: Sequence[Branch]) -> dict[str, float]:
    """The branches, by name, whose addend is a module's output that is not zero, and its largest value."""
    addends = {branch.addend: branch.name for branch in branches if branch.addend is not None}
    if not addends:
        return {}
    without = Plan(graph, graph.all_kept(), frozenset(addends.values()))
    kinds = {tensor.dtype for tensor in subject.perturbed.parameters() if tensor.is_floating_point()}
    precision = torch.float64 if torch.float64 in kinds else torch.float32
    whole = subject.perturbed
    if kinds != {precision}:
        whole = masked_copy(whole, Plan(graph, graph.all_kept()), precision)
    found: dict[str, float] = {}
    for mode, (example, *_) in (subject.smaller_calls or subject.calls).items():
        usual: dict[str, deque[Any]] = {addend: deque() for addend in addends}

        def keep(addend: str, output: Any, usual: dict[str, deque[Any]] = usual) -> None:
            usual[addend].append(output.clone() if isinstance(output, Tensor) else output)  # others may write to it

        def look(addend: str, output: Any, usual: dict[str, deque[Any]] = usual) -> Any:
            left = float(output.abs().max()) if isinstance(output, Tensor) and output.numel() else 0.0
            if left > 0:
                found[addends[addend]] = max(left, found.get(addends[addend], 0.0))
            return usual[addend].popleft()

        with _hooked(whole, addends, keep):
            run(whole, example.to(precision), mode, Quiet())
        empty = masked_copy(subject.perturbed, without, precision)
        with _hooked(empty, addends, look):
            run(empty, example.to(precision), mode, Quiet(), last=True)
    return found


@contextmanager
def _hooked(model: nn.Module, names: Iterable[str], hook: Callable[[str, Any], Any]) -> Iterator[None]:
    handles = [
        model.get_submodule(name).register_forward_hook(lambda module, args, output, name=name: hook(name, output))
        for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
