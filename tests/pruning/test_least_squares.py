"""The parts of a repair: what a layer reads, its filters as rows, and the way back."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateur.channels.example import Example
from secateur.pruning.least_squares import (
    EVERY,
    FilterFit,
    LeastSquares,
    draw_places,
    filters_of,
    outputs_at,
    patches,
    rows_of,
    shape_of,
)
from secateur.pruning.side_by_side import Layer, side_by_side

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch copies the input
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def call_of(module: nn.Module, data: Tensor) -> Layer:
    """The layer as a repair sees it after it has run."""
    ((_, layer),) = next(side_by_side(module, module, [Example((data,), {})], print))
    return layer


def some_convolution(seed: int) -> tuple[nn.Module, Tensor]:
    draw = random.Random(seed)
    axes = draw.choice([1, 2, 3])
    groups = draw.choice([1, 1, 2, 4])
    inputs, outputs = groups * draw.choice([1, 2, 3]), groups * draw.choice([1, 2])
    kernel, dilation, stride = (tuple(draw.randint(1, top) for _ in range(axes)) for top in (4, 2, 3))
    padding: Any = draw.choice(["same", "valid", tuple(draw.randint(0, 2) for _ in range(axes)), draw.randint(0, 2)])
    stride = 1 if padding == "same" else stride
    options = {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "bias": draw.random() < 0.5,
    }
    mode = draw.choice(["zeros", "zeros", "circular"])
    size = [draw.randint(7, 9) for _ in range(axes)]
    return CONVOLUTIONS[axes](inputs, outputs, kernel, padding_mode=mode, **options), torch.randn(2, inputs, *size)


def some_transposed(seed: int) -> tuple[nn.Module, Tensor]:
    draw = random.Random(seed)
    axes = draw.choice([1, 2, 3])
    groups = draw.choice([1, 1, 2, 3])
    inputs, outputs = groups * draw.choice([1, 2, 3]), groups * draw.choice([1, 2])
    kernel, dilation, stride = (tuple(draw.randint(1, top) for _ in range(axes)) for top in (3, 2, 3))
    padding = tuple(draw.randint(0, 3) for _ in range(axes))  # the reach of a kernel of 1 is 0
    extra = tuple(draw.randint(0, max(pair) - 1) for pair in zip(stride, dilation, strict=True))
    options = {"stride": stride, "padding": padding, "output_padding": extra, "dilation": dilation}
    module = TRANSPOSED[axes](inputs, outputs, kernel, groups=groups, bias=draw.random() < 0.5, **options)
    return module, torch.randn(2, inputs, *(draw.randint(7, 9) for _ in range(axes)))


def depthwise(seed: int) -> tuple[nn.Module, Tensor]:
    return nn.Conv2d(4, 4 * (1 + seed % 2), 1 + seed % 4, padding=seed % 3, groups=4), torch.randn(2, 4, 5, 6)


def linear(seed: int) -> tuple[nn.Module, Tensor]:
    shape = [(5,), (3, 5), (2, 3, 5), (2, 3, 4, 5)][seed % 4]
    return nn.Linear(5, 4, bias=seed % 3 > 0), torch.randn(shape)


def unbatched(seed: int) -> tuple[nn.Module, Tensor]:
    module, data = (some_transposed if seed % 2 else some_convolution)(seed)
    return module, data[0]


MAKERS = [some_convolution, some_transposed, depthwise, linear, unbatched]


@pytest.mark.parametrize("make", MAKERS)
def test_what_a_layer_reads_times_its_filters_is_its_output(make: Any) -> None:
    for seed in range(60):
        torch.manual_seed(seed)
        module, data = make(seed)
        layer = call_of(module.double(), data.double())
        axis = -1 if isinstance(module, nn.Linear) else 1 - module.weight.dim()
        expected = module(data.double()).movedim(axis, -1)
        expected = expected.reshape(-1, expected.shape[-1]).detach()
        places = torch.randperm(len(expected))[:50]
        found = patches(layer, places, shape_of(layer)) @ filters_of(layer, layer.weight).mT
        found = found.transpose(0, 1).flatten(1) + (0 if layer.bias is None else layer.bias)
        torch.testing.assert_close(found, expected[places], msg=lambda text, of=module: f"{of}: {text}")
        assert torch.equal(outputs_at(layer, places), expected[places])


@pytest.mark.parametrize("make", MAKERS)
def test_filters_become_a_weight_again(make: Any) -> None:
    for seed in range(60):
        module, data = make(seed)
        layer = call_of(module, data)
        assert torch.equal(FilterFit(layer, None).weight(layer), module.weight.double())
        # Each number is where it was, not only the same shape.
        fit = FilterFit(layer, None)
        fit.fit.prior = filters_of(layer, torch.arange(module.weight.numel()).reshape(module.weight.shape)).double()
        assert fit.weight(layer).flatten().tolist() == list(range(module.weight.numel()))


def test_a_group_is_fitted_to_its_own_outputs() -> None:
    module = nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2).double()
    data = torch.randn(16, 6, 4, 4, dtype=torch.float64)
    layer = call_of(module, data)
    fit = FilterFit(layer, None)
    fit.fit.prior.zero_()
    every = torch.arange(fit.places(layer))
    fit.observe(layer, layer, every, held=False)
    torch.testing.assert_close(fit.weight(layer), module.weight.detach(), rtol=1e-3, atol=1e-3)


def test_inputs_as_rows() -> None:
    data = torch.randn(2, 3, 4, 5)
    rows = rows_of(call_of(nn.Conv2d(3, 2, 1), data))
    assert torch.equal(rows[4 * 5 + 7], data[1, :, 1, 2])
    assert torch.equal(rows_of(call_of(nn.Linear(5, 2), data))[4 * 3 + 4 + 1], data[1, 1, 1])


def test_moments_of_half_precision_are_added_in_single() -> None:
    inputs, outputs = torch.randn(1, 4000, 3).bfloat16(), torch.randn(1, 4000, 2).bfloat16()
    fit = LeastSquares(torch.zeros(1, 2, 3))
    fit.add(inputs, outputs, held=False)
    torch.testing.assert_close(fit.own[0], inputs.double().mT @ inputs.double(), rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(fit.cross[0], outputs.double().mT @ inputs.double(), rtol=1e-4, atol=1e-2)


def test_inputs_that_are_not_finite_leave_the_prior() -> None:
    fit = LeastSquares(torch.ones(2, 2, 3))
    fit.add(torch.full((2, 5, 3), torch.inf), torch.ones(2, 5, 2), held=False)
    assert torch.equal(fit.solve(), torch.ones(2, 2, 3).double())


def test_whole_images_are_held_out() -> None:
    images, positions = 10, 7
    for first, limit in ((0, 1000), (3, 1000), (5, 40)):
        fitted, held = draw_places(images * positions, images, first, limit, seed=1)
        assert {(first + place // positions) % EVERY == EVERY - 1 for place in held.tolist()} == {True}
        assert {(first + place // positions) % EVERY == EVERY - 1 for place in fitted.tolist()} == {False}
        assert len(fitted) + len(held) == min(limit, images * positions)
        assert all(map(torch.equal, (fitted, held), draw_places(images * positions, images, first, limit, seed=1)))


def test_a_fit_that_is_worse_on_images_held_out_is_not_taken() -> None:
    """The first group is fitted to noise, and the second one to what holds for all images."""
    generator = torch.Generator().manual_seed(0)
    prior, other = torch.randn(2, 2, 3, 4, generator=generator, dtype=torch.float64)
    fitted, held = torch.randn(2, 2, 30, 4, generator=generator, dtype=torch.float64)
    misled = torch.stack([prior[0] + 1, other[1]])
    fit = LeastSquares(prior)
    fit.add(fitted, fitted @ misled.mT, held=False)
    fit.add(held, held @ torch.stack([prior[0], other[1]]).mT, held=True)
    found = fit.solve()
    assert torch.equal(found[0], prior[0])
    torch.testing.assert_close(found[1], other[1], atol=1e-3, rtol=0)


def test_what_the_samples_do_not_tell_stays_as_it_was() -> None:
    """An input that is always zero."""
    generator = torch.Generator().manual_seed(0)
    prior, other = torch.randn(2, 1, 3, 4, generator=generator, dtype=torch.float64)
    data = torch.randn(2, 1, 30, 4, generator=generator, dtype=torch.float64)
    data[..., 2] = 0
    fit = LeastSquares(prior)
    for held, samples in enumerate(data):
        fit.add(samples, samples @ other.mT, held=bool(held))
    found = fit.solve()
    torch.testing.assert_close(found[..., 2], prior[..., 2])
    torch.testing.assert_close(found[..., [0, 1, 3]], other[..., [0, 1, 3]], atol=1e-3, rtol=0)
