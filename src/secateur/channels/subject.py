"""The network that is probed: copies to try cuts on, what it runs, and a smaller picture that shows the same.

The arithmetic of a convolution costs by the area of the picture; what is done to channels does not depend on it. So
numbers are compared on a smaller one, wherever the network demonstrably runs the same on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from secateur.channels.comparisons import Comparisons
from secateur.channels.copies import copy_model, copy_with, write_down
from secateur.channels.example import Calls, Example, in_precision
from secateur.channels.plan import Plan
from secateur.channels.rehearsal import Record, ShapesOnly, real, run
from secateur.channels.shrink import hollow, shrink
from secateur.channels.verify import compare

HIDES = 1e-3
"""Tensors with only smaller values would hide differences behind them."""
PERIOD = 65537
"""After how many elements the noise on the weights repeats: a prime, so that no two channels get the same."""
SIDES = 64, 128
"""Of smaller pictures, in pixels."""
STEP = 32
"""Sides are multiples of that, since networks halve them several times."""


class DoesNotRun(Exception):
    """A network does not run without the arithmetic.

    certain: nor with it, since the error is due to sizes.
    """

    def __init__(self, error: Exception, certain: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.certain = certain


@dataclass(frozen=True)
class Subject:
    """A network whose cuts are tried, with what to call it with."""

    model: nn.Module
    calls: Calls
    reads_values: bool
    """Whether its code depends on values; what it runs depends on shapes alone otherwise."""
    comparisons: Comparisons = field(default_factory=Comparisons, repr=False)
    """What its code compares sizes with."""
    answers: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What the probe has found out so far, by attempt and cuts."""

    @property
    def is_meta(self) -> bool:
        return next(self.model.parameters()).device.type == "meta"

    @cached_property
    def template(self) -> nn.Module:
        """What copies are made of: the model with the same tensors, before a hook of a copy could change it."""
        return write_down(copy_with(self.model, [(tensor, tensor.data) for tensor in self.model.parameters()]))

    @cached_property
    def perturbed(self) -> nn.Module:
        """A copy in which nothing hides a wrong cut."""
        copied = copy_model(self.template)
        copied._apply(lambda tensor: in_precision(tensor, torch.float32) if tensor.element_size() < 4 else tensor)
        perturb_(copied)
        return write_down(copied)

    @cached_property
    def whole(self) -> list[ShapesOnly]:
        """What the whole network runs."""
        return self._watched(self.calls)

    def runs_of(self, plan: Plan) -> Sequence[Record]:
        """What the cut network runs."""
        return self._watched(self.calls, plan)

    def _watched(self, calls: Calls, plan: Plan | None = None) -> list[ShapesOnly]:
        if not self.reads_values:
            model = hollow(self.template, plan)
        else:
            model = copy_model(self.template) if plan is None else shrink(self.template, plan)
        found = []
        for mode, (example, *_) in calls.items():
            found.append(ShapesOnly(bare=not self.reads_values))
            try:
                run(model, example, mode, found[-1], values=False, last=mode == [*calls][-1])
            except Exception as error:
                raise DoesNotRun(error, certain=not self.reads_values and not found[-1].doubtful) from error
        return found

    @cached_property
    def smaller_calls(self) -> Calls | None:
        """Smaller pictures on which the whole network runs the same; None if there are none."""
        for side in () if self.reads_values or self.is_meta else SIDES:
            calls = {mode: [smaller(example, side)] for mode, (example, *_) in self.calls.items()}
            if any(str(calls[mode][0]) == str(example) for mode, (example, *_) in self.calls.items()):
                continue
            with suppress(Exception):  # many networks take pictures of one size only
                seen = self._watched(calls)
                if are_alike(self.whole, seen, self.whole, seen):
                    return calls
        return None

    def agrees_on_smaller(self, plan: Plan, precision: torch.dtype) -> bool:
        """Whether masked and shrunk are the same on smaller pictures, and these enough to tell.

        If not, that says nothing.
        """
        if self.smaller_calls is None:
            return False
        seen: list[Record] = []

        def record(used: torch.dtype) -> Record:
            seen.append(Record(used))
            return seen[-1]

        with suppress(Exception):
            cut = self.runs_of(plan)
            if [each.operators for each in cut] == [each.operators for each in self.whole]:
                result = compare(self.perturbed, plan, self.smaller_calls, precision=precision, nudges=0, record=record)
                return result.agrees and are_alike(self.whole, seen[: len(cut)], cut, seen[len(cut) :])
        return False


def smaller(example: Example, side: int) -> Example:
    """The same with the upper left of all pictures: about so long on the shorter side, if that is half or less."""

    def crop(picture: Tensor) -> Tensor:
        short = min(picture.shape[-2:]) if picture.dim() in (4, 5) and picture.is_floating_point() else 0
        if short < 2 * side:
            return picture
        height, width = (round(size * side / short / STEP) * STEP for size in picture.shape[-2:])
        return picture[..., :height, :width].contiguous()

    return example.map(crop).varied()


def are_alike(whole: Sequence[Record], small: Sequence[Record], cut: Sequence[Record], both: Sequence[Record]) -> bool:
    """Whether the whole network, on a smaller picture, cut, and both, runs the same operators on the same axes.

    No axis may depend on the picture and on the widths: the code would compute with both. And none may shrink to one
    index on the smaller picture, as a softmax over it, for one, would hide what differs.
    """
    for traces in zip(whole, small, cut, both, strict=True):
        operators, *others = (seen.operators for seen in traces)
        if any(operators != other for other in others):
            return False
        for shapes in zip(*(seen.shapes for seen in traces), strict=True):
            if len({len(results) for results in shapes}) > 1:
                return False
            for sizes in zip(*shapes, strict=True):
                if len({len(size) for size in sizes}) > 1 or not all(map(_are_apart, *sizes)):
                    return False
    return True


def _are_apart(whole: int, small: int, cut: int, both: int) -> bool:
    """Whether the size of an axis depends on the picture or on the widths, not on both."""
    return (whole == small and cut == both) or (whole == cut and small == both > 1)


@torch.no_grad()
def perturb_(model: nn.Module) -> None:
    """Move every weight a little, so that zero-initialised branches cannot hide a wrong cut.

    Towards zero and in proportion, so that values below one stay below one, and masks of -1e9 or -inf do not dominate.
    Layer scales of 1e-5 count as zero.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    stream = torch.rand(PERIOD, generator=generator, dtype=torch.float64, device="cpu").repeat(2)
    start = 0
    for tensor in map(real, [*model.parameters(), *model.buffers()]):
        if tensor.is_floating_point() and tensor.numel():
            noise = stream[start : start + min(PERIOD, tensor.numel())].to(tensor)
            flat = tensor.reshape(-1)
            parts = flat.split(PERIOD)  # few enough for a cache
            least, most = torch.stack([torch.stack(part.abs().aminmax()) for part in parts]).T.tolist()
            less = noise * 0 if max(most) < HIDES else 1 - 0.1 * noise
            for part, smallest in zip(parts, least, strict=True):
                part.mul_(less[: len(part)])
                if not smallest > 0 or max(most) < HIDES:
                    part.copy_(torch.where(part == 0, 0.05 * noise[: len(part)], part))
            if flat.data_ptr() != tensor.data_ptr():  # not a view of it, as in other memory formats
                tensor.copy_(flat.view(tensor.shape))
            start = (start + tensor.numel()) % PERIOD
