"""Random small networks: a list of blocks, each fed by any earlier result, so that hypothesis can shrink a failure.

No block writes a size down: code takes sizes from shapes or leaves them to torch, so that the labels alone must be
right, without the probe.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

SIZE = 4
"""Height and width, the same everywhere, so that anything can be joined with anything."""
IMAGE, EXTRA, VECTOR = 3, 2, 5
"""Channels of the two image inputs and length of the vector input."""
WIDEST = 32

ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    F.relu, lambda x: x, F.silu, torch.tanh, F.hardswish, F.leaky_relu, torch.sigmoid, F.softplus, F.elu, torch.relu_,
]  # fmt: skip


@dataclass(frozen=True)
class Block:
    """One block: what it does, how wide, and which earlier results it reads, counted back from the last."""

    kind: str
    width: int = 4
    back: int = 0
    other: int = 1
    option: int = 0


class Apply(nn.Module):
    """A function of one or two tensors, with modules and parameters of its own."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


Built = tuple[nn.Module, int]
"""A module and the number of channels it gives."""
ONE: dict[str, Callable[[int, Block], Built]] = {}
TWO: dict[str, Callable[[int, int, Block], Built]] = {}


def one(function: Callable[[int, Block], Built]) -> Callable[[int, Block], Built]:
    ONE[function.__name__] = function
    return function


def two(function: Callable[[int, int, Block], Built]) -> Callable[[int, int, Block], Built]:
    TWO[function.__name__] = function
    return function


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def convolution(inner: int, outer: int, option: int = 0, kernel: int = 3, groups: int = 1) -> nn.Sequential:
    """A convolution with a batch norm, one without affine, or none."""
    norms = [nn.BatchNorm2d(outer), nn.BatchNorm2d(outer, affine=False), nn.Identity()]
    bias = option % 2 == 0
    return nn.Sequential(
        nn.Conv2d(inner, outer, kernel, padding=kernel // 2, groups=groups, bias=bias), norms[option % 3]
    )


def dividing(groups: int, *sizes: int) -> int:
    """The largest number of groups up to this one that divides all sizes."""
    return next(g for g in range(groups, 0, -1) if all(size % g == 0 for size in sizes))


@one
def chain(channels: int, block: Block) -> Built:
    activation = ACTIVATIONS[block.option % len(ACTIVATIONS)]
    return Apply(lambda m, x: activation(m.conv(x)), conv=convolution(channels, block.width, block.option)), block.width


@one
def activation(channels: int, block: Block) -> Built:
    function = ACTIVATIONS[block.option % len(ACTIVATIONS)]
    return Apply(lambda m, x: function(x.clone())), channels


@one
def preactivation(channels: int, block: Block) -> Built:
    norm = nn.BatchNorm2d(channels, affine=block.option % 3 != 2)
    return Apply(
        lambda m, x: m.conv(F.relu(m.norm(x))), norm=norm, conv=convolution(channels, block.width, 2)
    ), block.width


@one
def residual(channels: int, block: Block) -> Built:
    first, second = (
        convolution(channels, block.width, block.option),
        convolution(block.width, channels, block.option // 2),
    )
    return Apply(lambda m, x: F.relu(x + m.second(F.relu(m.first(x)))), first=first, second=second), channels


@one
def split(channels: int, block: Block) -> Built:
    """Both halves, one through a convolution, or one half alone."""
    if channels % 2:
        return chain(channels, block)
    half = channels // 2
    functions: list[tuple[Callable[..., Tensor], int]] = [
        (lambda m, x: torch.cat([m.conv(x.chunk(2, 1)[0]), x.chunk(2, 1)[1]], 1), channels),
        (lambda m, x: m.conv(x.chunk(2, 1)[1]), half),
        (lambda m, x: m.conv(x[:, x.shape[1] // 2 :]) * x[:, : x.shape[1] // 2], half),
        (lambda m, x: m.conv(x[:, ::2]) + x[:, 1::2], half),
        (lambda m, x: m.conv(F.glu(x, 1)), half),
        (lambda m, x: m.conv(torch.maximum(*x.split(x.shape[1] // 2, 1))), half),
    ]
    function, outer = functions[block.option % len(functions)]
    return Apply(function, conv=convolution(half, half, block.option)), outer


@one
def shuffle(channels: int, block: Block) -> Built:
    def by_hand(module: nn.Module, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)

    if channels % 2 or (block.option % 2 and channels < 6):
        return chain(channels, block)
    return (Apply(by_hand) if block.option % 2 else nn.ChannelShuffle(2)), channels


@one
def depthwise(channels: int, block: Block) -> Built:
    multiplier = 1 + block.option % 2
    return convolution(channels, channels * multiplier, block.option, groups=channels), channels * multiplier


@one
def grouped(channels: int, block: Block) -> Built:
    groups = dividing(2 if block.option % 2 else 4, channels, block.width)
    return convolution(channels, block.width, block.option, groups=groups), block.width


@one
def transposed(channels: int, block: Block) -> Built:
    groups = dividing([1, 2, 4][block.option % 3], channels, block.width)
    deconvolution = nn.ConvTranspose2d(channels, block.width, 2, stride=2, groups=groups, bias=block.option % 2 == 0)
    return Apply(lambda m, x: F.avg_pool2d(F.relu(m.up(x)), 2), up=deconvolution), block.width


@one
def squeeze_excite(channels: int, block: Block) -> Built:
    if block.option % 2:
        inner, outer = nn.Linear(channels, block.width), nn.Linear(block.width, channels)
        return Apply(
            lambda m, x: x * m.b(F.relu(m.a(x.mean((2, 3))))).sigmoid()[:, :, None, None], a=inner, b=outer
        ), channels
    inner, outer = nn.Conv2d(channels, block.width, 1), nn.Conv2d(block.width, channels, 1)
    return Apply(
        lambda m, x: x * F.hardsigmoid(m.b(F.silu(m.a(F.adaptive_avg_pool2d(x, 1))))), a=inner, b=outer
    ), channels


@one
def shared(channels: int, block: Block) -> Built:
    """One convolution, with its norm, used twice or thrice."""

    def repeat(module: nn.Module, x: Tensor) -> Tensor:
        for _ in range(2 + block.option % 2):
            x = F.relu(module.conv(x))
        return x

    return Apply(repeat, conv=convolution(channels, channels, block.option)), channels


@one
def pixels(channels: int, block: Block) -> Built:
    """Space to channels, a convolution there, and back."""
    if block.option % 2 and channels % 4 == 0:
        conv = convolution(channels // 4, block.width, 1, kernel=1)
        return Apply(lambda m, x: F.max_pool2d(m.conv(F.pixel_shuffle(x, 2)), 2), conv=conv), block.width
    conv = convolution(4 * channels, 4 * block.width, 1, kernel=1)
    return Apply(lambda m, x: F.pixel_shuffle(F.relu(m.conv(F.pixel_unshuffle(x, 2))), 2), conv=conv), block.width


@one
def move(channels: int, block: Block) -> Built:
    """Flips, repeats and resizing."""
    functions: list[tuple[Callable[..., Tensor], int]] = [
        (lambda m, x: x.flip(1), 1),
        (lambda m, x: x.repeat(1, 2, 1, 1), 2),
        (lambda m, x: x.repeat_interleave(2, 1), 2),
        (lambda m, x: F.interpolate(F.max_pool2d(x, 2), scale_factor=2, mode="bilinear"), 1),
        (lambda m, x: torch.cat([x, -x], 1).relu_(), 2),
        (lambda m, x: F.pad(x, (1, 0, 0, 1), mode="replicate")[:, :, 1:, :-1], 1),
    ]
    function, times = functions[block.option % len(functions)]
    return Apply(function), channels * times


@one
def unpooled(channels: int, block: Block) -> Built:
    """A convolution between pooling and its reverse, with as many channels as there are indices, or none."""
    conv = nn.Identity() if block.option % 2 else convolution(channels, channels)

    def run(module: nn.Module, x: Tensor) -> Tensor:
        values, places = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(module.conv(values), places, 2)

    return Apply(run, conv=conv), channels


@one
def written(channels: int, block: Block) -> Built:
    """Padding, by torch around the image or by hand, and pixels between pixels of another convolution."""
    conv, other = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)
    around = nn.Conv2d(channels, channels, 3, padding=1, padding_mode="circular")

    def framed(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        result = x.new_zeros(*y.shape[:2], SIZE + 2, SIZE + 2)
        result[:, :, 1:-1, 1:-1] = y
        return result[:, :, 2:, 2:]

    def mixed(m: Any, x: Tensor) -> Tensor:
        left, right = m.conv(x), m.other(x).tanh()
        result = torch.empty_like(left)
        result[..., ::2] = left[..., ::2]
        result[..., 1::2] = right[..., 1::2]
        return result

    function = [lambda m, x: m.around(x), framed, mixed][block.option % 3]
    return Apply(function, conv=conv, other=other, around=around), channels


@one
def tokens(channels: int, block: Block) -> Built:
    """To (N, space, channels), a linear layer, and back."""

    def run(module: nn.Module, x: Tensor) -> Tensor:
        return module.linear(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:])

    return Apply(run, linear=nn.Linear(channels, block.width)), block.width


@one
def functional(channels: int, block: Block) -> Built:
    """Calls on the block's own parameters."""
    kernel, matrix = parameter(block.width, channels, 1, 1), parameter(channels, block.width)
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: F.conv2d(x, m.kernel),
        lambda m, x: (x.permute(0, 2, 3, 1) @ m.matrix).permute(0, 3, 1, 2),
        lambda m, x: F.conv2d(x, m.kernel * m.matrix.T[:, :, None, None]),
    ]
    return Apply(functions[block.option % len(functions)], kernel=kernel, matrix=matrix), block.width


@one
def scale(channels: int, block: Block) -> Built:
    """Per-channel and per-place factors and shifts, some of which wake removed channels up."""
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: x * m.factor + m.shift,
        lambda m, x: x * m.gate(x).sigmoid(),
        lambda m, x: m.prelu(x),
        lambda m, x: x + m.place,
        lambda m, x: x * m.place,
        lambda m, x: m.drop(x) * m.factor.exp(),
        lambda m, x: F.normalize(x, dim=1) * x.sum(1, keepdim=True),
        lambda m, x: m.norm(x),
        lambda m, x: m.groups(x),
    ]
    return Apply(
        functions[block.option % len(functions)], factor=parameter(channels, 1, 1), shift=parameter(channels, 1, 1),
        place=parameter(SIZE, SIZE), gate=nn.Conv2d(channels, 1, 1), prelu=nn.PReLU(channels), drop=nn.Dropout2d(),
        norm=nn.InstanceNorm2d(channels, affine=True),
        groups=nn.GroupNorm(max(g for g in (1, 2, 3, 4) if channels % g == 0), channels, affine=block.width % 2 == 0),
    ), channels  # fmt: skip


@one
def mixing(channels: int, block: Block) -> Built:
    """Operators that see all channels: what feeds them stays."""
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: m.norm(x),
        lambda m, x: x * x.softmax(1),
        lambda m, x: x - x.mean(1, keepdim=True),
        lambda m, x: x.cumsum(1),
    ]
    return Apply(functions[block.option % len(functions)], norm=nn.GroupNorm(1, channels)), channels


@one
def dimensions(channels: int, block: Block) -> Built:
    """One and three dimensions."""
    line = nn.Sequential(nn.Conv1d(channels, block.width, 3, padding=1), nn.BatchNorm1d(block.width))
    if block.option % 2:
        return Apply(lambda m, x: m.line(x.flatten(2)).unflatten(2, x.shape[2:]), line=line), block.width
    solid = nn.Sequential(nn.Conv3d(channels, block.width, (1, 3, 3), padding=(0, 1, 1)), nn.BatchNorm3d(block.width))
    return Apply(lambda m, x: m.solid(x.unsqueeze(2)).squeeze(2), solid=solid), block.width


@two
def concat(channels: int, others: int, block: Block) -> Built:
    return Apply(lambda m, x, y: torch.cat([x, y], 1)), channels + others


@two
def add(channels: int, others: int, block: Block) -> Built:
    """A sum, a product or a maximum, in place or not, with a convolution on the way where the widths differ."""
    functions: list[Callable[[Tensor, Tensor], Tensor]] = [
        torch.add,
        torch.mul,
        torch.maximum,
        lambda x, y: x.clone().add_(y),
        lambda x, y: torch.stack([x, y]).sum(0),
        lambda x, y: torch.stack([x, y], 1).mean(1),
        lambda x, y: x * y.amax((2, 3), keepdim=True),
    ]
    function = functions[block.option % len(functions)]
    project = nn.Identity() if channels == others else nn.Conv2d(others, channels, 1, bias=block.option % 2 == 0)
    return Apply(lambda m, x, y: function(x, m.project(y)), project=project), channels


@two
def padded(channels: int, others: int, block: Block) -> Built:
    """A shortcut with zeros for the missing channels."""

    def run(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        wide, narrow = (x, y) if channels >= others else (y, x)
        missing = wide.shape[1] - narrow.shape[1]
        return wide + F.pad(narrow, (0, 0, 0, 0, missing // 2, missing - missing // 2))

    return Apply(run), max(channels, others)


class Network(nn.Module):
    """Blocks in a row, three inputs, two outputs."""

    def __init__(self, blocks: list[Block], head: int) -> None:
        super().__init__()
        self.description = f"{blocks}, head={head}"
        self.reads: list[tuple[int, ...]] = []
        self.blocks = nn.ModuleList()
        self.film = nn.Linear(VECTOR, 4)
        widths = [IMAGE, EXTRA, 4]
        self.stem = convolution(IMAGE, 4)
        for block in blocks:
            main = len(widths) - 1 - block.back % (len(widths) - 2)
            other = len(widths) - 1 - block.other % len(widths)
            if widths[main] > WIDEST:
                block = Block("chain", block.width)
            if block.kind in TWO:
                module, width = TWO[block.kind](widths[main], widths[other], block)
                self.reads.append((main, other))
            else:
                module, width = ONE[block.kind](widths[main], block)
                self.reads.append((main,))
            self.blocks.append(module)
            widths.append(width)
        self.flattens, self.shows_last = head % 2 == 1, head > 3
        last, earlier = widths[-1], widths[max(2, len(widths) - 2)]
        self.classifier = nn.Linear(last * SIZE * SIZE if self.flattens else last, 3)
        self.map = nn.Conv2d(earlier, 2, 1)

    def forward(self, image: Tensor, extra: Tensor, vector: Tensor) -> dict[str, Any]:
        results = [image, extra, F.relu(self.stem(image)) * self.film(vector)[:, :, None, None]]
        for block, reads in zip(self.blocks, self.reads, strict=True):
            results.append(block(*(results[index] for index in reads)))
        last = results[-1]
        features = last.flatten(1) if self.flattens else last.mean((2, 3))
        maps = self.map(results[max(2, len(results) - 2)])
        return {"classes": self.classifier(features), "maps": [maps, last] if self.shows_last else [maps]}

    def __repr__(self) -> str:
        return f"Network({self.description})"


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A batch of two for every input."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, IMAGE, SIZE, SIZE), (2, EXTRA, SIZE, SIZE), (2, VECTOR)]
    image, extra, vector = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return image, extra, vector


KINDS = [*ONE, *TWO]
BLOCKS = st.builds(
    Block,
    kind=st.sampled_from(KINDS),
    width=st.sampled_from([4, 8, 6, 12]),
    back=st.integers(0, 3),
    other=st.integers(1, 6),
    option=st.integers(0, 23),
)
NETWORKS = st.builds(Network, st.lists(BLOCKS, min_size=2, max_size=7), st.integers(0, 4))


def every_option(kind: str) -> Iterator[tuple[int, Network]]:
    """Networks with this block in the middle, one for each of its options."""
    for option in range(24):
        blocks = [Block("chain", 8), Block(kind, 8, other=1 + option % 3, option=option), Block("chain", 4)]
        yield option, Network(blocks, option % 4)
