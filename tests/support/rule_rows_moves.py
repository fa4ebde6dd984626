"""Rows for operators that move elements, and for those that take parts of an axis."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rule_rows import (
    ADDRESSED,
    APART,
    EIGHT,
    FIXED,
    HALVES,
    MERGED,
    MIRRORED,
    MIXES,
    NO_RULE,
    PAIRS,
    PARTED,
    TIED,
    WOKEN,
    Body,
    Row,
    coupled,
    each,
    frozen,
    image,
    inferring,
    side,
)
from torch import Tensor, nn

IN_HALVES = coupled({"first": HALVES})
IN_PAIRS = coupled({"first": PAIRS})


def _viewed(operator: Callable[..., Tensor]) -> Body:
    """To (N, 2, C / 2, 36) and back, the first half last."""

    def body(m: Any, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        halves = operator(x, [n, 2, c // 2, h * w]).flip(1).contiguous()
        return operator(halves, [n, c, h, w])

    return body


VIEWS = [
    *each("view _unsafe_view _reshape_copy view_copy", _viewed, IN_HALVES),
    Row("reshape", inferring(_viewed(torch.reshape)), IN_HALVES),
    Row("_reshape_alias", lambda m, x: image(torch.ops.aten._reshape_alias(
        x, [*x.shape[:2], 36], [x.stride(0), x.stride(1), 1]))),
    Row("view", lambda m, x: x.view(torch.int64).view(torch.float64), frozen(NO_RULE), note="type"),
    Row("view", lambda m, x: m.linear(x.reshape(2, -1)), parts={"linear": nn.Linear(288, 3)}, inner=0,
        note="flat"),
    Row("view", lambda m, x: m.linear((x.flatten(2) @ x.flatten(2).mT).view(2, -1)), frozen(MERGED), inner=0,
        parts={"linear": nn.Linear(64, 3)}, note="merged"),
    Row("flatten", inferring(lambda m, x: x.flatten(2)[..., None])),
    *each("as_strided as_strided_", lambda op: lambda m, x: op(x, x.shape, x.stride())),
    *each("as_strided as_strided_", lambda op: lambda m, x: op(x, x.shape, (36, 72, 6, 1)), frozen(NO_RULE),
          note="strides"),
    Row("permute", lambda m, x: x.permute(0, 2, 3, 1).relu().permute(0, 3, 1, 2)),
    Row("permute_copy", lambda m, x: torch.permute_copy(torch.permute_copy(x, (2, 3, 0, 1)), (2, 3, 0, 1))),
    Row("transpose", lambda m, x: x.transpose(1, -1).relu().transpose(1, -1)),
    Row("transpose_", lambda m, x: x.clone().transpose_(1, -1).relu().transpose_(-1, 1)),
    Row("swapaxes", inferring(lambda m, x: x.swapaxes(1, -1).relu().swapaxes(1, -1))),
    Row("t", lambda m, x: x * torch.ops.aten.t(torch.ops.aten.t(x.mean((2, 3))).tanh())[..., None, None]),
    Row("t_", lambda m, x: x * x.mean((2, 3)).t_().tanh().t_()[..., None, None]),
    Row("numpy_T", inferring(lambda m, x: x * x.mean((2, 3)).T.tanh().T[..., None, None])),
    Row("mT", inferring(lambda m, x: image(x.flatten(2).mT.tanh().mT))),
    Row("unsqueeze", lambda m, x: x.unsqueeze(1).tanh()[:, 0]),
    Row("unsqueeze_", lambda m, x: x.clone().unsqueeze_(-1)[..., 0]),
    Row("squeeze", lambda m, x: x * x.mean(2, keepdim=True).squeeze(2)[:, :, None]),
    Row("squeeze", lambda m, x: x * x.mean((2, 3), keepdim=True).squeeze()[..., None, None], note="all"),
    Row("squeeze_", lambda m, x: x * x.mean((2, 3), keepdim=True).squeeze_((2, 3))[..., None, None]),
    Row("expand", lambda m, x: x.mean((2, 3), keepdim=True).expand(x.shape)),
    Row("expand", lambda m, x: x.expand(2, *x.shape)[1], note="new axis"),
    Row("expand_copy", lambda m, x: torch.expand_copy(x.mean((2, 3), keepdim=True), x.shape)),
    *each("view_as_real view_as_real_copy", lambda op: lambda m, x: op(torch.complex(x, m.side(x))).prod(-1), TIED,
          parts=side()),
    *each("view_as_complex view_as_complex_copy", lambda op: lambda m, x: op(torch.stack([x, m.side(x)], -1)).abs(),
          TIED, parts=side()),
    *each("view_as_complex view_as_complex_copy", lambda op: lambda m, x: op(
        x.movedim(1, -1).unflatten(-1, (-1, 2)).contiguous()).abs().movedim(-1, 1), IN_PAIRS, inner=4, note="pairs"),
    *each("view_as_complex view_as_complex_copy", lambda op: lambda m, x: x * op(
        m.two(x).movedim(1, -1).contiguous()).abs()[:, None], frozen(ADDRESSED, {"first": EIGHT}, layer="two"),
        parts={"two": nn.Conv2d(8, 2, 1)}, note="parts"),
]  # fmt: skip

JOINS = [
    Row("repeat", lambda m, x: x.repeat(1, 2, 1, 1), inner=16),
    Row("repeat", lambda m, x: x.repeat(1, 1, 2, 1), note="space"),
    Row("cat", lambda m, x: torch.cat([x, m.side(x)], 1), APART, inner=16, parts=side()),
    Row("cat", lambda m, x: torch.cat([x, m.side(x)], -1), TIED, parts=side(), note="space"),
    Row("cat", lambda m, x: torch.cat([x, torch.ones(2, 3, 6, 6)], 1), inner=11, note="constants"),
    Row("cat", lambda m, x: torch.cat([x, x.new_zeros(2, 3, 6, 6)], 1), inner=11, note="zeros"),
    Row("cat", lambda m, x: torch.cat([x, torch.arange(8.0).view(8, 1, 1).expand_as(x)], 2), frozen(FIXED),
        note="beside constants"),
    Row("concatenate", inferring(lambda m, x: torch.concatenate([x, m.side(x)], 1)), APART, inner=16, parts=side()),
    Row("stack", lambda m, x: torch.stack([x, m.side(x)], 1).amax(1), TIED, parts=side()),
    Row("stack", lambda m, x: torch.stack([x, m.side(x).sigmoid()]).sum(0), frozen(WOKEN), parts=side(), note="gate"),
    Row("flip", lambda m, x: x * x.flip(1), coupled({"first": MIRRORED}), note="two"),
    Row("flip", lambda m, x: x.flip(1, 2)),
    Row("rot90", lambda m, x: x.rot90(1, (2, 3))),
    Row("rot90", lambda m, x: x.rot90(2, (1, 2)), frozen(MIXES), note="channels"),
    Row("roll", lambda m, x: x.roll(1, 2)),
    Row("roll", lambda m, x: x.roll(1, 1), frozen(MIXES), note="channels"),
    Row("roll", lambda m, x: x.roll(1), frozen(MIXES), note="all"),
    Row("constant_pad_nd", lambda m, x: F.pad(x, (1, 0, 2, -1))),
    Row("constant_pad_nd", lambda m, x: F.pad(x, (1, 0), value=1.0), frozen(WOKEN), note="ones"),
    Row("constant_pad_nd", lambda m, x: F.pad(x, (0, 0, 0, 0, 1, 2)), inner=11, note="channels"),
    Row("constant_pad_nd", lambda m, x: F.pad(x, (0, 0, 0, 0, 1, 2), value=1.0), inner=11, note="channels of ones"),
    Row("constant_pad_nd", lambda m, x: F.pad(x, (0, 0, 0, 0, 0, -2)), frozen(PARTED), inner=6, note="cropped"),
    Row("pixel_shuffle", lambda m, x: F.pixel_shuffle(x, 2), coupled({"first": [[0, 1, 2, 3], [4, 5, 6, 7]]}), inner=2),
    Row("pixel_unshuffle", lambda m, x: F.pixel_unshuffle(x, 2), inner=32),
    Row("channel_shuffle", lambda m, x: F.channel_shuffle(x, 2), IN_HALVES),
    Row("native_channel_shuffle", inferring(lambda m, x: F.native_channel_shuffle(x, 2)), IN_HALVES),
    Row("im2col", lambda m, x: F.unfold(x, (2, 3))[..., None], inner=48),
    Row("diagonal", lambda m, x: image(x.diagonal(0, 2, 3))),
    Row("diagonal", lambda m, x: x * x.diagonal(0, 1, 2)[:, None, :, :6], frozen(MIXES), note="channels"),
    *each("tril triu tril_ triu_", lambda op: lambda m, x: op(x)),
    *each("tril triu tril_ triu_", lambda op: lambda m, x: op(x.movedim(1, -1).clone()).movedim(-1, 1),
          frozen(MIXES), note="channels"),
]  # fmt: skip


def _swapped(parts: Any) -> Tensor:
    """The parts of the channels, the last first."""
    return torch.cat(parts[::-1], 1)


SPLIT, SIZES = "split split_copy unsafe_split", "split_with_sizes split_with_sizes_copy unsafe_split_with_sizes"
SLICE, SELECT, UNBIND = "slice slice_copy", "select select_copy", "unbind unbind_copy"

PARTS = [
    *each(SPLIT, lambda op: lambda m, x: _swapped(op(x, x.shape[1] // 2, 1)), IN_HALVES),
    *each(SIZES, lambda op: lambda m, x: _swapped(op(x, [x.shape[1] // 2] * 2, 1)), IN_HALVES),
    *each(SPLIT, lambda op: lambda m, x: _swapped(op(x, 3, 1)), frozen(PARTED), note="unequal"),
    *each(SIZES, lambda op: lambda m, x: _swapped(op(x, [3, 5], 1)), frozen(PARTED), note="unequal"),
    Row("unsafe_chunk", inferring(lambda m, x: _swapped(x.unsafe_chunk(2, 1))), IN_HALVES),
    Row("unsafe_chunk", inferring(lambda m, x: _swapped(x.unsafe_chunk(3, 1))), frozen(PARTED), note="unequal"),
    Row("split", lambda m, x: torch.cat(x.split(2, 2)[::-1], 2), note="space"),
    *each(SLICE, lambda op: lambda m, x: op(x, 1, x.shape[1] // 2), IN_HALVES, inner=4),
    *each(SLICE, lambda op: lambda m, x: op(x, 2, 1, 4), note="space"),
    *each(SLICE, lambda op: lambda m, x: op(x, 1, 1, 4), frozen(PARTED), inner=3, note="fixed"),
    *each(SLICE, lambda op: lambda m, x: op(x, 1, 1, None, 2), IN_PAIRS, inner=4, note="step"),
    Row("slice", lambda m, x: x[:, :7:3], frozen(PARTED), inner=3, note="fixed step"),
    *each(SELECT, lambda op: lambda m, x: op(x, 2, 1)[:, :, None]),
    *each(SELECT, lambda op: lambda m, x: x * op(x, 1, 2)[:, None], frozen(ADDRESSED), note="channels"),
    *each(UNBIND, lambda op: lambda m, x: torch.stack(op(x, 2)[::-1], 2)),
    *each(UNBIND, lambda op: lambda m, x: torch.stack(op(x, 1)[::-1], 1), frozen(ADDRESSED), note="channels"),
]  # fmt: skip


def _indices(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


INDEX, PUT = "index _unsafe_index", "index_put index_put_"

INDEXED = [
    *each(INDEX, lambda op: lambda m, x: op(x, [None, None, _indices(0, 5, 2)])),
    *each(INDEX, lambda op: lambda m, x: op(x, [None, _indices(*range(8))]), frozen(ADDRESSED), note="channels"),
    Row("index", lambda m, x: x[:, :, _indices(0, 1), _indices(2, 3)][..., None], note="pixels"),
    Row("index", lambda m, x: x[_indices(0, 1), :, _indices(2, 3)][:, :, None], note="apart"),
    Row("index", lambda m, x: x * x[x > 0].sum(), frozen(ADDRESSED), note="mask"),
    Row("index_select", lambda m, x: x.index_select(2, _indices(3, 0))),
    Row("index_select", lambda m, x: x.index_select(1, _indices(*range(8))), frozen(ADDRESSED), note="channels"),
    Row("index_select", lambda m, x: x.index_select(2, (x.mean((0, 2, 3)) > 0).long()).sum(2, keepdim=True),
        frozen(ADDRESSED), note="as many as channels"),
    *each(PUT, lambda op: lambda m, x: op(x.clone(), [_indices(1)], m.side(x)[:1]), TIED, parts=side()),
    *each(PUT, lambda op: lambda m, x: op(x.clone(), [_indices(1)], m.side(x).sigmoid()[:1]), frozen(WOKEN),
          parts=side(), note="not zero"),
    *each(PUT, lambda op: lambda m, x: op(x.clone(), [None, _indices(1)], x.new_zeros(1)), frozen(ADDRESSED),
          note="channels"),
    *each(PUT, lambda op: lambda m, x: op(x.clone(), [x < 0.1], torch.tensor(0.0).double()), note="mask"),
    *each(PUT, lambda op: lambda m, x: op(x.clone(), [x < 0.1], torch.tensor(2.0).double()), frozen(WOKEN),
          note="mask of another value"),
    Row("gather", lambda m, x: x.gather(2, x.argsort(2))),
    Row("gather", lambda m, x: x.gather(2, m.side(x).argsort(2)), TIED, parts=side(), note="another's places"),
    Row("gather", lambda m, x: x.gather(2, _indices(3, 1).view(2, 1).expand(2, x.shape[1], 2, 6)),
        note="the same for all"),
    Row("gather", lambda m, x: x.gather(1, torch.arange(8).view(8, 1, 1).expand(2, 8, 6, 6)), frozen(ADDRESSED),
        note="channels"),
    *each("scatter scatter_", lambda op: lambda m, x: op(x.clone(), 2, torch.ones(x.shape).long(), x),
          frozen(ADDRESSED)),
    *each("index_add index_add_", lambda op: lambda m, x: op(x.clone(), 2, _indices(0, 1), x[:, :, :2]),
          frozen(ADDRESSED)),
    Row("index_fill_", lambda m, x: x.clone().index_fill_(2, _indices(0, 1), 0.0), frozen(ADDRESSED)),
    Row("take", lambda m, x: x * x.take(_indices(0, 100)).sum(), frozen(ADDRESSED)),
    Row("unfold", lambda m, x: x.unfold(2, 3, 3).flatten(3)),
    Row("unfold", lambda m, x: x.unfold(1, 4, 4).sum(1, keepdim=True).transpose(1, -1)[..., 0], frozen(MIXES),
        inner=4, note="channels"),
]  # fmt: skip

ROWS = [*VIEWS, *JOINS, *PARTS, *INDEXED]
