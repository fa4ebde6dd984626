"""Steps whose code states sizes, or compares them: another width may take another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from grammar import Draw, parameter
from networks import Apply
from strange import strange
from torch import Tensor, nn


@strange
def written(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """Sizes that the code states, in numbers or attributes."""
    d.flags.add("sizes")
    c, wide = x.shape[1], 2 * d.pick([2, 3, 4])
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: x.view(x.shape[0], 2, wide // 2, *x.shape[2:]).mean(1),
        lambda m, x: x[:, : wide // 2] + x[:, wide // 2 :],
        lambda m, x: torch.cat([x, x.new_zeros(x.shape[0], wide, *x.shape[2:])], 1)[:, :wide],
        lambda m, x: x + torch.ones(1, wide, 1, 1, dtype=x.dtype),
        lambda m, x: x.reshape(-1, wide).mean(1, keepdim=True).view(x.shape[0], 1, *x.shape[2:]) * x,
        lambda m, x: x * wide + x / x.shape[1],
        lambda m, x: x.split([1, wide - 1], 1)[1],
        lambda m, x: F.conv2d(x, m.a[:, None], groups=wide),
        lambda m, x: F.conv2d(x, m.a[:, None], groups=m.number),
        lambda m, x: x.view(x.shape[0], m.number, -1).view_as(x),
        lambda m, x: x.expand(x.shape[0], wide, *x.shape[2:]).unflatten(1, (2, -1)).flatten(1, 2),
        lambda m, x: torch.as_strided(x.contiguous(), x.shape, x.contiguous().stride()),
        lambda m, x: x if x.shape[1] == wide else x * 2,
        lambda m, x: x.sum(1, True) / m.number + x,
        lambda m, x: torch.stack([x[:, i] * (i + 1) for i in range(x.shape[1])], 1),
        lambda m, x: torch.stack([x[:, i] for i in range(wide)], 1),
        lambda m, x: F.pad(x, (0, 0, 0, 0, 0, 12 - x.shape[1])),
        lambda m, x: F.group_norm(x, m.number),
        lambda m, x: x * torch.arange(x.shape[1], dtype=x.dtype)[:, None, None],
        lambda m, x: x * torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None, None],
    ]
    function = d.pick(functions)
    return Apply(
        lambda m, x, y: function(m, m.conv(x)),
        conv=nn.Conv2d(c, wide, 1), a=parameter(wide, 1, 1), number=wide,
    )  # fmt: skip


@strange
def compared(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """Code that asks for widths, and goes another way at some of them."""
    d.flags.add("sizes")
    c, wide, narrow, number = x.shape[1], d.width, d.width, d.pick([2, 3, 4, 5, 7])
    questions: list[Callable[[Tensor, Tensor], Any]] = [
        lambda y, z: y.shape == z.shape,
        lambda y, z: y.shape[1] >= number,
        lambda y, z: y.size(1) == number,
        lambda y, z: y.size(1) % number == 0,
        lambda y, z: y.shape[1] > z.shape[1],
        lambda y, z: y.shape[1] - z.shape[1],
        lambda y, z: 2 * y.shape[1] != z.shape[1] + number,
        lambda y, z: max(y.shape[1], number) == number,
        lambda y, z: y.shape[1] // number < z.shape[1] // 2,
        lambda y, z: y.shape[-3:] != (number, *z.shape[2:]),
        lambda y, z: y.shape[1] in (number, 2 * number),
    ]
    question, spread = d.pick(questions), d.pick([1, 2, 3])

    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        one, two = m.spread(m.one(x).relu()), m.two(x).tanh()
        return two * 2 + one.mean(1, keepdim=True) if question(one, two) else two

    return Apply(
        run, one=nn.Conv2d(c, wide, 1), spread=nn.Conv2d(wide, spread * wide, 1, groups=wide),
        two=nn.Conv2d(c, narrow, 1),
    )  # fmt: skip
