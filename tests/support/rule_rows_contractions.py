"""Rows for operators that sum products, or values, over an axis."""

from typing import Any

import torch
import torch.nn.functional as F
from rule_rows import (
    ADDRESSED,
    APART,
    EIGHT,
    FIXED,
    HALVES,
    MIXES,
    NO_RULE,
    PAIRS,
    WOKEN,
    Row,
    aten,
    coupled,
    frozen,
    image,
    side,
)
from sandwich import parameter
from torch import nn


def _matrix(**others: Any) -> dict[str, Any]:
    return {"matrix": parameter(8, 8), **others}


ROWS = [
    Row("convolution", lambda m, x: m.side(x), APART, parts=side(), cost=True),
    Row("convolution", lambda m, x: m.up(x), coupled({"first": EIGHT}, {"up": EIGHT}), cost=True,
        parts={"up": nn.ConvTranspose2d(8, 8, 2)}, note="transposed"),
    Row("convolution", lambda m, x: m.depth(x), coupled({"first": EIGHT, "depth": EIGHT}), cost=True,
        parts={"depth": nn.Conv2d(8, 8, 3, groups=8)}, note="depthwise"),
    Row("convolution", lambda m, x: m.some(x), coupled({"first": PAIRS, "some": PAIRS}), cost=True,
        parts={"some": nn.Conv2d(8, 8, 3, groups=4)}, note="whole groups"),
    Row("convolution", lambda m, x: m.some(x), coupled({"first": HALVES}, {"some": HALVES}), cost=True,
        parts={"some": nn.Conv2d(8, 8, 3, groups=2)}, note="one of every group"),
    Row("convolution", lambda m, x: m.side(x.sigmoid()), frozen(WOKEN, {"side": EIGHT}), parts=side(), cost=True,
        note="not zero"),
    Row("convolution", lambda m, x: image(m.along(x.flatten(2).mT).mT), frozen(MIXES),
        parts={"along": nn.Conv1d(36, 4, 3, padding=1)}, note="along channels"),
    Row("_convolution", lambda m, x: aten("_convolution")(
        x, m.side.weight, m.side.bias, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, False, False, True, True),
        APART, parts=side()),
    Row("mm", lambda m, x: (x.movedim(1, -1).flatten(0, 2) @ m.matrix).view(2, 6, 6, -1).movedim(-1, 1),
        coupled({"first": EIGHT}, {"matrix": EIGHT}), parts=_matrix(), cost=True),
    Row("mm", lambda m, x: (x.movedim(1, -1).flatten(0, 2) @ torch.eye(8).double()).view(2, 6, 6, 8).movedim(-1, 1),
        frozen(FIXED), note="constants"),
    Row("bmm", lambda m, x: image(x.flatten(2) @ x.flatten(2).mT @ x.flatten(2)), cost=True),
    Row("bmm", lambda m, x: image(torch.bmm(m.matrix.expand(2, -1, -1), x.flatten(2))),
        coupled({"matrix": EIGHT}, {"first": EIGHT}), parts=_matrix(), note="weights"),
    Row("bmm", lambda m, x: (x.transpose(0, 1).flatten(2) @ x.movedim(0, -1).flatten(1, 2)).movedim(0, 1)[..., None],
        cost=True, note="channels in the batch"),
    Row("mv", lambda m, x: x * torch.mv(x.movedim(1, -1).flatten(0, 2), m.vector).view(2, 1, 6, 6),
        parts={"vector": parameter(8)}),
    Row("mv", lambda m, x: x * torch.mv(m.matrix, x.mean((0, 2, 3))).view(-1, 1, 1),
        coupled({"first": EIGHT, "matrix": EIGHT}), parts=_matrix(), note="weights"),
    Row("dot", lambda m, x: x * torch.dot(x.mean((0, 2, 3)), x.amax((0, 2, 3)))),
    Row("dot", lambda m, x: x * torch.dot(x.mean((0, 2, 3)), m.vector), parts={"vector": parameter(8)}, note="weights"),
    Row("addmm", lambda m, x: m.linear(x.mean((2, 3)))[..., None, None], coupled({"first": EIGHT}, {"linear": EIGHT}),
        parts={"linear": nn.Linear(8, 8)}, cost=True),
    Row("addmm", lambda m, x: torch.addmm(m.shift, x.mean((2, 3)), m.matrix)[..., None, None],
        frozen(WOKEN, {"first": EIGHT}, layer="matrix"), parts=_matrix(shift=parameter()), note="one number"),
    Row("addmm", lambda m, x: torch.addmm(x.mean((2, 3)), x.amax((2, 3)), m.matrix)[..., None, None], frozen(NO_RULE),
        parts=_matrix(), note="full"),
    Row("baddbmm", lambda m, x: image(torch.baddbmm(x.new_zeros(1), x.flatten(2), x.flatten(2).mT, beta=0)
                                      @ x.flatten(2)), cost=True),
    Row("baddbmm", lambda m, x: image(torch.baddbmm(x.flatten(2), m.matrix.expand(2, -1, -1), x.flatten(2))),
        frozen(NO_RULE), parts=_matrix(), note="full"),
    Row("addmv", lambda m, x: x * torch.addmv(m.vector, m.matrix, x.mean((0, 2, 3))).view(-1, 1, 1),
        coupled({"first": EIGHT, "matrix": EIGHT, "vector": EIGHT}), parts=_matrix(vector=parameter(8))),
    Row("embedding", lambda m, x: x * F.embedding(torch.tensor([3, 1]), m.table)[..., None, None],
        coupled({"first": EIGHT, "table": EIGHT}), parts={"table": parameter(5, 8)}),
    Row("embedding", lambda m, x: x * F.embedding(torch.tensor([3, 1]), x[0].flatten(1)).sum(), frozen(ADDRESSED),
        note="channels"),
    Row("sum", lambda m, x: x * x.sum(1, keepdim=True)),
    Row("sum", lambda m, x: x.sum((2, 3), keepdim=True), note="space"),
    Row("sum", lambda m, x: x * x.sum(), note="all"),
    Row("sum", lambda m, x: x * x.sigmoid().sum(1, keepdim=True), frozen(WOKEN), note="not zero"),
    Row("linalg_vector_norm", lambda m, x: x * torch.linalg.vector_norm(x, 2, 1, keepdim=True)),
    Row("linalg_vector_norm", lambda m, x: torch.linalg.vector_norm(x, 1, (2, 3), keepdim=True), note="space"),
    Row("linalg_vector_norm", lambda m, x: x * torch.linalg.vector_norm(x, -1, 1, keepdim=True), frozen(MIXES),
        note="counts zeros"),
    Row("norm", lambda m, x: x * aten("norm")(x, 2, [1], True)),
    Row("norm", lambda m, x: aten("norm")(x, 1, [2, 3], True), note="space"),
    Row("norm", lambda m, x: x * aten("norm")(x, 0, [1], True), frozen(MIXES), note="counts zeros"),
]  # fmt: skip
