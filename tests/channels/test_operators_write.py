"""Networks that write into tensors or hide what they do: cut exactly or not at all, even without the probe."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sandwich import IMAGE, Sandwich, examine, parameter, reasons, sizes
from torch import Tensor, nn

import secateur

Body = Callable[..., Any]

BODIES: dict[str, Body] = {}


def trap(body: Body) -> Body:
    BODIES[body.__name__] = body
    return body


@trap
def written_through_data(m: Sandwich, x: Tensor) -> Tensor:
    x = x.clone()
    x.data.add_(1)
    return x


@trap
def written_through_detach(m: Sandwich, x: Tensor) -> Tensor:
    x = x.clone()
    x.detach().add_(1)
    return x


@trap
def replaced_data(m: Sandwich, x: Tensor) -> Tensor:
    x = x.clone()
    x.data = x.data + 1
    return x


@trap
def written_through_view(m: Sandwich, x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1).add_(1)
    return x


@trap
def written_through_permuted_view(m: Sandwich, x: Tensor) -> Tensor:
    x = x.clone()
    x.permute(0, 2, 3, 1)[:, 1:].sigmoid_()
    return x


@trap
def view_of_something_written_later(m: Sandwich, x: Tensor) -> Tensor:
    x = x.clone()
    view = x.transpose(2, 3)
    x.cos_()
    return view


@trap
def half_written(m: Sandwich, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, : x.shape[1] // 2] += 1
    return x


@trap
def halves_swapped(m: Sandwich, x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    y = x.clone()
    y[:, :half], y[:, half:] = x[:, half:], x[:, :half]
    return y


@trap
def joined_by_hand(m: Sandwich, x: Tensor) -> Tensor:
    y = x.new_zeros(x.shape)
    y[:, ::2], y[:, 1::2] = x[:, 1::2], x[:, ::2]
    return y


@trap
def padded_by_hand(m: Sandwich, x: Tensor) -> Tensor:
    y = x.new_ones(*x.shape[:2], 8, 8)
    y[:, :, 1:-1, 1:-1] = x
    return y


@trap
def shifted_in_time(m: Sandwich, x: Tensor) -> Tensor:
    fold, out = x.shape[1] // 4, torch.zeros_like(x)
    out[:-1, :fold] = x[1:, :fold]
    out[1:, fold : 2 * fold] = x[:-1, fold : 2 * fold]
    out[:, 2 * fold :] = x[:, 2 * fold :]
    return out


@trap
def written_with_out(m: Sandwich, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.clone()
        torch.cos(x[:, :, :3], out=y[:, :, :3])
    return y


@trap
def zeros_with_one_entry(m: Sandwich, x: Tensor) -> Tensor:
    offset = x.new_zeros(1)
    offset[0] = 3.0
    return x + offset


@trap
def first_channel_set(m: Sandwich, x: Tensor) -> Tensor:
    factor = x.new_zeros(x.shape[1])
    factor[0] = 3.0
    return x * factor.view(-1, 1, 1)


@trap
def first_channel_set_by_slice(m: Sandwich, x: Tensor) -> Tensor:
    factor = x.new_ones(x.shape[1], 1, 1)
    factor[0:1] = 3.0
    return x * factor


def _zeros_with(change: Body) -> Body:
    def body(m: Sandwich, x: Tensor) -> Tensor:
        zeros = x.new_zeros(x.shape[0], 1, 6, 6)
        change(zeros)
        return x + zeros

    return body


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    """The first rows of a weight, as data, laid beside other data."""
    return torch.cat([x.mean((2, 3)), weight])[x.shape[0] : 2 * x.shape[0]]


def _alias(zeros: Tensor) -> Tensor:
    alias = zeros.detach()
    zeros.fill_(3.0)
    return alias


PLACES = torch.tensor([1, 3])

BODIES |= {
    "zeros_index_put": _zeros_with(lambda z: z.__setitem__((slice(None), slice(None), PLACES), 1.0)),
    "zeros_scatter": _zeros_with(lambda z: z.scatter_(2, torch.zeros(2, 1, 1, 6).long(), 1.0)),
    "zeros_index_fill": _zeros_with(lambda z: z.index_fill_(2, PLACES, 1.0)),
    "zeros_index_add": _zeros_with(lambda z: z.index_add_(2, PLACES, z.new_ones(z.shape[0], 1, 2, 6))),
    "zeros_index_copy": _zeros_with(lambda z: z.index_copy_(2, PLACES, z.new_ones(z.shape[0], 1, 2, 6))),
    "zeros_masked_scatter": _zeros_with(lambda z: z.masked_scatter_(torch.ones(z.shape).bool(), z.new_ones(z.numel()))),
    "zeros_put": _zeros_with(lambda z: z.put_(PLACES, z.new_ones(2))),
    "zeros_diagonal": _zeros_with(lambda z: z[0, 0].fill_diagonal_(1.0)),
    "zeros_custom": _zeros_with(lambda z: torch.ops.secateur_tests.add_one(z)),
    "counted": lambda m, x: x * x.new_ones(x.shape[1]).cumsum(0).view(-1, 1, 1),
    "diagonal": lambda m, x: x * m.eight(torch.diagonal(x, 0, 2, 3).mean(-1))[:, :, None, None],
    "noise_from_channels": lambda m, x: torch.bernoulli(x.clamp(1, 1)),
    "noise_of_the_same_shape": lambda m, x: torch.bernoulli(x, 1.0),
    "to_list": lambda m, x: x * x.mean((0, 2, 3)).tolist()[0],
    "to_numpy": lambda m, x: torch.from_numpy(x.detach().numpy() * 2),
    "one_by_numpy": lambda m, x: x * float(x.detach().numpy().mean((0, 2, 3))[0]),
    "shared_with_ones": lambda m, x: m.conv(x) + m.conv(torch.ones(x.shape, dtype=x.dtype)),
    "shared_with_mean_of_input": lambda m, x: m.conv(x) + m.conv(x.new_full((1, 1, 6, 6), 0.3).expand_as(x)),
    "weights_that_are_never_zero": lambda m, x: F.conv2d(x, (m.left.sigmoid() @ m.right.sigmoid())[:, :, None, None]),
    "weights_plus_one": lambda m, x: F.conv2d(x, (m.left @ m.right)[:, :, None, None] + 1),
    "data_and_weight": lambda m, x: (x.mean((2, 3)) @ m.right.T + _rows(x, m.right) @ m.left)[:, :, None, None],
    "complex": lambda m, x: torch.complex(x, x.cos()).imag,
    "reinterpreted": lambda m, x: x.view(torch.int64).view(torch.float64),
    "lost_sign": lambda m, x: torch.maximum(x - 1, x.new_zeros(1)) + torch.atan2(x, m.single),
    "vector_times_matrix": lambda m, x: x * (x.mean((0, 2, 3)) @ m.right)[:, None, None],
    "added_to_vector": lambda m, x: x * torch.addmv(m.bias, m.right, x.mean((0, 2, 3)))[:, None, None],
    "added_outer": lambda m, x: x * torch.addr(m.right, x.mean((0, 2, 3)), m.bias).sum(1)[:, None, None],
    "masked_rows": lambda m, x: x * (x.movedim(1, -1)[x.sum(1) > 0.5] @ m.bias).sum(),
    "masked_channels": lambda m, x: x * x[:, x.mean((0, 2, 3)) > 0.2].sum(),
    "put_in_place": lambda m, x: x.clone().index_put_((torch.tensor([0]), torch.tensor([1])), torch.ones(1).double()),
    "unsqueezed_in_place": lambda m, x: x.clone().unsqueeze_(0).squeeze_(0),
    "transposed_in_place": lambda m, x: x.clone().transpose_(1, 2).transpose_(1, 2),
    "bias_elsewhere": lambda m, x: x * m.first.bias.sum() * m.norm.weight.max(),
    "first_bias": lambda m, x: x * m.first.bias[0],
    "dynamic_kernels": lambda m, x: F.conv2d(
        x.reshape(1, -1, 6, 6), m.eight(x.mean((2, 3))).view(-1, 1, 1, 1), groups=x.shape[0] * x.shape[1]
    ).view_as(x),
    "scattered_channels": lambda m, x: x.scatter(1, torch.zeros(2, 1, 6, 6).long(), 5.0),
    "expanded_mean": lambda m, x: m.conv(x.mean(1, keepdim=True).expand_as(x)),
    "distances": lambda m, x: x * torch.cdist(x.flatten(2).mT, x.flatten(2).mT).mean((1, 2))[:, None, None, None],
    "checkpointed": lambda m, x: torch.utils.checkpoint.checkpoint(m.conv, x, use_reentrant=False),
    "mapped_over_batch": lambda m, x: torch.vmap(lambda one: one * 2 + 1)(x),
    "unflattened_scramble": lambda m, x: x.flatten(1).view(x.shape[0], 6, -1, 6).transpose(1, 2),
    "norm_with_fixed_mean": lambda m, x: F.batch_norm(x, x.new_ones(x.shape[1]), x.new_ones(x.shape[1])),
    "norm_with_fixed_shift": lambda m, x: F.group_norm(x, x.shape[1], m.bias, x.new_ones(x.shape[1])),
    "norm_with_waking_shift": lambda m, x: F.group_norm(x, x.shape[1], m.bias, m.bias.exp()),
    "norm_of_woken": lambda m, x: F.group_norm(x.sigmoid(), x.shape[1], m.bias.exp()),
    "norm_of_written_groups": lambda m, x: F.group_norm(x, 4, m.bias),
    "norm_of_pairs": lambda m, x: F.group_norm(x, x.shape[1] // 2, m.bias),
    "places_of_maxima": lambda m, x: F.max_pool2d(x, 2, return_indices=True)[1].to(x.dtype),
    "places_of_adaptive_maxima": lambda m, x: F.adaptive_max_pool2d(x, 2, return_indices=True)[1].to(x.dtype),
    "places_of_medians": lambda m, x: x.median(3, keepdim=True).indices.to(x.dtype),
    "places_of_modes": lambda m, x: x.mode(3, keepdim=True).indices.to(x.dtype),
    "places_of_largest": lambda m, x: x.max(3, keepdim=True).indices.to(x.dtype) + x.topk(2, 3).indices[..., :1],
    "places_of_equals": lambda m, x: (x == m.bias[:, None, None]).to(x.dtype),
    "written_into_ones": lambda m, x: _written(x.new_ones(x.shape), x),
    "written_and_woken": lambda m, x: _written(_written(torch.zeros_like(x), x), x.sigmoid(), slice(0, 1)),
    "written_channels": lambda m, x: _written(torch.zeros_like(x), x, dim=1),
    "written_with_shift": lambda m, x: _written(torch.zeros_like(x), x) + _written(torch.zeros_like(x), x + 1),
    "written_through_a_view": lambda m, x: _written(torch.zeros_like(x).mT, x.mT).mT,
    "unpooled": lambda m, x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "edges_of_ones": lambda m, x: x * F.conv1d(x.new_ones(1, 1, x.shape[1]), m.kernel, padding=1).view(-1, 1, 1),
    "counts_of_zeros": lambda m, x: x * (x >= 0).sum(1, keepdim=True),
    "triangle_of_ones": lambda m, x: x * x.new_ones(x.shape[1], x.shape[1]).tril().sum(1)[:, None, None],
    "joined_constants": lambda m, x: x * F.pad(x.new_ones(x.shape[1] - 1), (1, 0))[:, None, None],
    "alias_of_zeros": lambda m, x: x + _alias(x.new_zeros(1)),
    "weights_clamped": lambda m, x: (m.conv.weight.data.clamp_(-0.5, 0.5), m.conv(x))[1],
    "weights_normalised": lambda m, x: (m.conv.weight.data.div_(m.conv.weight.data.norm()), m.conv(x))[1],
}  # fmt: skip


def _written(target: Tensor, source: Tensor, where: slice = slice(1, None), dim: int = 2) -> Tensor:
    """The target with a part of the source in it."""
    place = (slice(None),) * dim + (where,)
    target[place] = source[place]
    return target


@torch.library.custom_op("secateur_tests::add_one", mutates_args=("tensor",))
def add_one(tensor: Tensor) -> None:
    tensor.add_(1)


@pytest.mark.parametrize("name", BODIES)
def test_trap(name: str) -> None:
    model = Sandwich(
        BODIES[name], conv=nn.Conv2d(8, 8, 1), eight=nn.Linear(8, 8), left=parameter(8, 8), right=parameter(8, 8),
        bias=parameter(8), single=parameter(1), kernel=parameter(1, 1, 3),
    )  # fmt: skip
    examine(model, cost=False, singly=True)


@dataclass(slots=True)
class Result:
    """An output without a `__dict__`."""

    maps: Tensor


def test_output_that_hides_its_tensors() -> None:
    """A result in which no tensor is found is refused, or its channels stay."""
    model = Sandwich(lambda m, x: Result(x), 0).double()
    try:
        graph = secateur.analyze(model, IMAGE)
    except secateur.InvalidModel as error:
        assert "output" in str(error)  # noqa: PT017
    else:
        assert sizes(graph) == {}


def test_squeeze_of_the_last_channel() -> None:
    """Where one channel is left, a squeeze of everything takes its axis away as well."""
    examine(Sandwich(lambda m, x: m.linear(x.mean((2, 3), keepdim=True).squeeze()), 0, linear=nn.Linear(8, 3)))


@pytest.mark.parametrize("attribute", [torch.ones(3), [torch.ones(3)], {"a": torch.ones(3)}])
def test_attributes_may_hold_tensors(attribute: object) -> None:
    examine(Sandwich(lambda m, x: x, kept=attribute), expected={"first": 8})


class Switched(nn.Module):
    """A head that only training sees, switched on by `train` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.helper, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 2, 1)
        self.helps = True

    def train(self, mode: bool = True) -> "Switched":
        self.helps = mode
        return super().train(mode)

    def forward(self, image: Tensor) -> list[Tensor]:
        features = F.relu(self.conv(image))
        return [self.last(features), self.helper(features)] if self.helps else [self.last(features)]


def test_head_switched_on_by_train() -> None:
    examine(Switched(), cost=False, expected={"conv": 8})


def where_small(x: Tensor) -> Tensor:
    x[x < 0.1] = 0
    return x


def a_row(x: Tensor) -> Tensor:
    x[:, :, 0] = 0
    return x


def a_corner(x: Tensor) -> Tensor:
    x[:, :, :2, :2] = 0
    return x


def row_by_row(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for row in range(x.shape[2]):
        out[:, :, row] = 0.5 * x[:, :, row]
    return out


def image_by_image(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=x.dtype)
    for number, image in enumerate(x):
        out[number] = image * image
    return out


def cost_volume(x: Tensor) -> Tensor:
    """As for stereo, where every image is shifted by every disparity."""
    volume = x.new_zeros(*x.shape[:2], 3, *x.shape[2:])
    volume[:, :, 0] = x
    for shift in (1, 2):
        volume[:, :, shift, :, shift:] = x[..., shift:] - x[..., :-shift]
    return volume.sum(2)


def holes_in_ones(x: Tensor) -> Tensor:
    """As where flow leads out of the image."""
    mask = torch.ones(x.shape, dtype=x.dtype)
    mask[mask < 0.9] = 0
    mask[mask > 0] = 2
    return x * mask


@pytest.mark.parametrize("body", [where_small, a_row, a_corner, row_by_row, image_by_image, cost_volume, holes_in_ones])
def test_written_with_all_its_channels(body: Callable[[Tensor], Tensor]) -> None:
    examine(Sandwich(lambda m, x: body(x)), expected={"first": 8})


def ones_where_small(x: Tensor) -> Tensor:
    x[x < 0.1] = 1
    return x


def a_row_of_ones(x: Tensor) -> Tensor:
    x[:, :, 0] = 1
    return x


def a_channel(x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


def half_of_the_channels(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :4] = x[:, 4:]
    return out


@pytest.mark.parametrize("body", [ones_where_small, a_row_of_ones, a_channel, half_of_the_channels])
def test_written_so_that_channels_stay(body: Callable[[Tensor], Tensor]) -> None:
    graph = examine(Sandwich(lambda m, x: body(x)), expected={})
    assert "first" in reasons(graph)


def test_pairs_that_are_written_as_complex_numbers() -> None:
    """There are as many channels as parts of a number, and a mean over channels."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            pairs = torch.zeros(*x.shape, 2)
            torch.view_as_complex(pairs).copy_(torch.complex(x, x))
            return self.last(torch.ones(1, 2)) * pairs.mean(1).sum()

    assert not secateur.analyze(Written(), torch.randn(2, 3), probe=False).groups
