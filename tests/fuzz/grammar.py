"""Random networks as lists of numbers: each number is a choice, so that a failure shrinks to fewer and smaller ones.

A network is built while it runs on its inputs: each step sees the tensors that it will read, and all of them have the
same height and width, so that anything can be joined with anything.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from networks import Apply
from torch import Tensor, nn

SIZE, WIDEST, LENGTH = 5, 20, 60
IMAGE, EXTRA, VECTOR = 3, 2, 4
"""Channels of the two image inputs, and the length of the vector."""
Some = TypeVar("Some")


class Draw:
    """Choices, taken from a list of numbers; the first option once that has ended."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        self.flags: set[str] = set()
        """noisy: random in training. single: computes in single precision. uncounted: torch counts other multiply-adds.
        sizes: written down in the code, so that the probe is needed."""

    def pick(self, options: Sequence[Some]) -> Some:
        return options[self.numbers.pop(0) % len(options)] if self.numbers else options[0]

    def often(self) -> bool:
        """True in one of four; False once the list has ended."""
        return self.pick([False, True, False, False])

    @property
    def width(self) -> int:
        return self.pick([4, 6, 8, 3, 5, 2, 1, 10])


def numbers_of(seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1000) for _ in range(generator.randrange(8, LENGTH))]


Maker = Callable[[Draw, Tensor, Tensor], nn.Module]
STEPS: dict[str, Maker] = {}
"""Ways to make a module that reads two tensors (images, channels, height, width), and may ignore the second."""


def step(maker: Maker) -> Maker:
    assert maker.__name__ not in STEPS
    STEPS[maker.__name__] = maker
    return maker


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


def fitted(x: Tensor) -> Tensor:
    """Of the common height and width."""
    return x if x.shape[2:] == (SIZE, SIZE) else F.interpolate(x, (SIZE, SIZE))


class Mean(nn.Module):
    """A class of its own, since the code of a module is often in its class."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3), keepdim=True)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class DropPath(nn.Module):
    """Stochastic depth: training leaves the branch out for some images."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(x.shape[0], *[1] * (x.dim() - 1), dtype=x.dtype) < 0.7) / 0.7


def dividing(groups: int, *sizes: int) -> int:
    return next(g for g in range(groups, 0, -1) if all(size % g == 0 for size in sizes))


def activation(d: Draw, channels: int) -> nn.Module:
    kinds = [nn.ReLU, nn.Identity, nn.SiLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.Mish, nn.ELU, nn.Softplus,
             nn.LeakyReLU, nn.Hardshrink, nn.Softshrink, nn.CELU, nn.LogSigmoid]  # fmt: skip
    kind = d.pick([*kinds, nn.PReLU])
    if kind is nn.PReLU:
        return nn.PReLU(d.pick([1, channels]))
    return kind(inplace=True) if kind in (nn.ReLU, nn.SiLU, nn.ELU) and d.often() else kind()


def norm(d: Draw, channels: int, kind: Any = nn.BatchNorm2d) -> nn.Module:
    which = d.pick(range(12))
    if which < 5:
        return kind(channels)
    if which < 10 or kind is not nn.BatchNorm2d:
        return [nn.Identity(), kind(channels, affine=False), kind(channels, track_running_stats=False),
                kind(channels, momentum=None), nn.Identity()][which % 5]  # fmt: skip
    others: list[Callable[[], nn.Module]] = [
        lambda: nn.InstanceNorm2d(channels, affine=True, track_running_stats=True),
        lambda: nn.GroupNorm(dividing(4, channels), channels),
        lambda: nn.GroupNorm(channels, channels),
        lambda: LayerNorm2d(channels),
        lambda: nn.LocalResponseNorm(3),
    ]
    return d.pick(others)()


def convolution(d: Draw, inner: int, outer: int) -> nn.Module:
    """Any convolution that keeps height and width, or nearly."""
    kernel = d.pick([3, 1, (1, 3), 2])
    groups = dividing(d.pick([1, 1, 2, 4, 64]), inner, outer)
    if d.often():  # depthwise, with a multiplier
        groups, outer = inner, inner * d.pick([1, 2])
    mode = d.pick(["zeros", "zeros", "reflect", "replicate", "circular"])
    padding = d.pick(["same", 0, 1])
    if padding == 1:
        kernel = 3
    return nn.Conv2d(
        inner, outer, kernel, padding=padding, dilation=d.pick([1, 1, 2]) if padding == "same" else 1, groups=groups,
        bias=not d.often(), padding_mode=mode if padding else "zeros",
    )  # fmt: skip


def layer(d: Draw, inner: int, outer: int) -> nn.Sequential:
    """A convolution with its norm and activation, in any order."""
    conv = convolution(d, inner, outer)
    if d.often():
        return nn.Sequential(norm(d, inner), activation(d, inner), conv)
    return nn.Sequential(conv, norm(d, conv.out_channels), activation(d, conv.out_channels))


def width_of(module: nn.Module, x: Tensor) -> int:
    with torch.no_grad():
        return module.double()(x).shape[1]


@step
def chain(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """A layer, or several, also nested."""
    first = layer(d, x.shape[1], d.width)
    for _ in range(d.pick([0, 0, 1, 2])):
        second = layer(d, width_of(first, x), d.width)
        first = nn.Sequential(first, second) if d.often() else nn.Sequential(*first, *second)
    return Apply(lambda m, x, y: m.layers(x), layers=first)


class Residual(nn.Module):
    """Blocks as people write them: the addend can go as a whole."""

    def __init__(self, d: Draw, channels: int) -> None:
        super().__init__()
        middle = d.width
        self.conv1, self.norm1 = nn.Conv2d(channels, middle, 3, padding=1, bias=False), norm(d, middle)
        self.conv2, self.norm2 = nn.Conv2d(middle, channels, 1), norm(d, channels)
        self.drop, self.act = nn.Identity(), activation(d, channels)
        if d.often():
            self.drop = DropPath()
            d.flags.add("paths")
        self.scale = parameter(channels, 1, 1) if d.often() else None
        self.shortcut = layer(d, channels, channels) if d.often() else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        y = self.drop(y if self.scale is None else y * self.scale)
        short = self.shortcut(x)
        return self.act(short + y) if short.shape == y.shape else self.act(y)


@step
def residual(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    blocks = [Residual(d, x.shape[1]) for _ in range(d.pick([1, 2, 3]))]
    if d.often():
        return Apply(lambda m, x, y: m.block(m.block(x)), block=blocks[0])
    return Apply(lambda m, x, y: m.blocks(x), blocks=nn.Sequential(*blocks))


@step
def other_dimensions(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    c, wide = x.shape[1], d.width
    if d.often():
        conv3 = nn.Conv3d(c, wide, (2, 3, 1), padding=(1, 1, 0), groups=dividing(2, c, wide))
        norm3 = norm(d, wide, nn.BatchNorm3d)
        return Apply(lambda m, x, y: m.norm(m.conv(torch.stack([x, x * 2], 2))).amax(2), conv=conv3, norm=norm3)
    transposed = d.often()
    conv = nn.ConvTranspose1d(c, wide, 3) if transposed else nn.Conv1d(c, wide, 3, padding=2, dilation=2)
    functions: list[Callable[..., Tensor]] = [
        lambda m, x, y: m.norm(m.conv(x.flatten(2)))[..., : x.shape[2] * x.shape[3]].unflatten(2, x.shape[2:]),
        lambda m, x, y: (
            m.norm(m.conv(x.permute(0, 2, 1, 3).flatten(0, 1))).unflatten(0, (x.shape[0], -1)).permute(0, 2, 1, 3)
        ),
        lambda m, x, y: m.norm(m.conv(x.mean(3)))[..., None].expand(-1, -1, -1, x.shape[3]),
    ]
    return Apply(d.pick(functions), conv=conv, norm=norm(d, wide, nn.BatchNorm1d))


@step
def transposed(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    c, wide = x.shape[1], d.width
    groups = dividing(d.pick([1, 2, 64]), c, wide)
    stride = d.pick([2, 1, 3])
    conv = nn.ConvTranspose2d(
        c, wide, d.pick([3, 2]), stride=stride, output_padding=d.pick([0, stride - 1]), groups=groups,
        padding=d.pick([0, 1]), bias=not d.often(),
    )  # fmt: skip
    return Apply(lambda m, x, y: m.norm(m.up(x)).relu(), up=conv, norm=norm(d, wide))


@step
def joined(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """Cat, or stack and mean, of what may have the same source."""
    functions: list[Callable[..., Tensor]] = [
        lambda m, x, y: torch.cat([x, y], 1),
        lambda m, x, y: torch.cat([x, m.conv(x), y, x], 1),
        lambda m, x, y: torch.cat([m.conv(x), torch.zeros_like(m.conv(x)), m.conv(x).sigmoid()], 1),
        lambda m, x, y: torch.cat([m.conv(x)[:, 1:], x[:, :0], m.conv(x)[:, :1]], 1),
        lambda m, x, y: torch.stack([m.conv(x), m.conv(x).flip(1)], 2).flatten(1, 2),
        lambda m, x, y: torch.stack([m.conv(x), m.conv(x).roll(1, 1)], -1).mean(-1),
    ]
    function = d.pick(functions)
    return Apply(function, conv=layer(d, x.shape[1], d.width))


@step
def coupled(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """Arithmetic of two results of equal width, or of one channel."""
    single = d.often()
    project = nn.Conv2d(y.shape[1], 1 if single else x.shape[1], 1, bias=d.often())
    functions: list[Callable[[Tensor, Tensor], Tensor]] = [
        torch.add, torch.mul, torch.sub, torch.maximum, torch.minimum,
        lambda a, b: torch.lerp(a, b.expand_as(a), 0.3),
        lambda a, b: torch.addcmul(a, a, b, value=0.5),
        lambda a, b: torch.where(b > 0, a, b),
        lambda a, b: torch.where(b > 0, a, a.new_zeros(())),
        lambda a, b: a.clone().add_(b),
        lambda a, b: a * b.mean((2, 3), keepdim=True).sigmoid(),
        lambda a, b: a / (1 + b.abs()),
        lambda a, b: torch.atan2(a, 1 + b * b),
        lambda a, b: torch.hypot(a, b),
        lambda a, b: torch.broadcast_tensors(a, b)[1] * a,
        lambda a, b: sum([a, b, a]),
        lambda a, b: torch.stack([a, b.expand_as(a)]).amax(0),
        lambda a, b: torch.complex(a, b.expand_as(a).contiguous()).abs(),
    ]  # fmt: skip
    function = d.pick(functions)
    return Apply(lambda m, x, y: function(x, m.project(y)), project=project)


@step
def parts(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """Pieces of a layer's channels, each with a use of its own."""
    half = d.pick([2, 3, 4])
    wide = 2 * half
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: torch.cat([m.halved(x.chunk(2, 1)[0]), x.chunk(2, 1)[1]], 1),
        lambda m, x: m.halved(x.split(x.shape[1] // 2, 1)[1]) * x.tensor_split(2, 1)[0],
        lambda m, x: m.halved(x[:, ::2]) + x[:, 1::2],
        lambda m, x: F.glu(x, 1),
        lambda m, x: x.unflatten(1, (2, -1)).amax(1),
        lambda m, x: x.unflatten(1, (-1, 2)).mean(2),
        lambda m, x: torch.stack(x.unbind(1)[1:], 1),
        lambda m, x: x.narrow(1, 1, x.shape[1] - 2),
        lambda m, x: x.movedim(1, 0)[1:].movedim(0, 1),
        lambda m, x: x.roll(2, 1).flip(1),
        lambda m, x: x.repeat(1, 2, 1, 1)[:, 1:],
        lambda m, x: x.repeat_interleave(2, 1),
        lambda m, x: x.view(x.shape[0], 2, -1, *x.shape[2:]).transpose(1, 2).reshape(x.shape),
        lambda m, x: torch.cat([x[:, 2:], x[:, :2]], 1) - x,
        lambda m, x: x[:, -1:] * x,
        lambda m, x: x.swapaxes(1, 2).contiguous().swapaxes(1, 2).tile(1, 2, 1, 1),
        lambda m, x: F.pad(x, (0, 0, 0, 0, 1, 2)),
        lambda m, x: x[:, 1:] - x[:, :-1],
    ]
    function = d.pick(functions)
    return Apply(
        lambda m, x, y: function(m, m.norm(m.conv(x))),
        conv=nn.Conv2d(x.shape[1], wide, d.pick([1, 3])), norm=norm(d, wide), halved=nn.Conv2d(half, half, 1),
    )  # fmt: skip


@step
def excited(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """Squeeze-excite and its relatives."""
    c, middle = x.shape[1], d.width
    inner, outer = nn.Conv2d(c, middle, 1), nn.Conv2d(middle, c, 1)
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: x * m.b(F.relu(m.a(m.mean(x)))).sigmoid(),
        lambda m, x: x * (1 + m.b(F.relu(m.a(F.adaptive_max_pool2d(x, 1)))).tanh()),
        lambda m, x: x * (x.mean((2, 3)) @ m.a.weight.flatten(1).T @ m.b.weight.flatten(1).T)[..., None, None],
        lambda m, x: x + m.b(F.layer_norm(m.a(m.mean(x)), m.a(m.mean(x)).shape[1:])),
        lambda m, x: x * (m.b(m.a(m.mean(x))) + m.b(m.a(x.amax((2, 3), keepdim=True)))).sigmoid(),
        lambda m, x: x * torch.cat([x.mean(1, True), x.amax(1, True)], 1).mean(1, True).sigmoid(),
        lambda m, x: x * m.b(m.a(x)).softmax(2),
        lambda m, x: x * m.b(m.a((x * x.flatten(2).softmax(2).view_as(x)).sum((2, 3), keepdim=True))),
    ]  # fmt: skip
    function = d.pick(functions)
    return Apply(lambda m, x, y: function(m, x), a=inner, b=outer, mean=Mean())


@step
def moved(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """Space: pooling, resizing, shuffling pixels, windows."""
    c, conv4 = x.shape[1], nn.Conv2d(x.shape[1], 4 * d.width, 1)
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: F.pixel_shuffle(m.four(x), 2),
        lambda m, x: m.down(F.pixel_unshuffle(F.pad(x, (0, 1, 0, 1)), 2)),
        lambda m, x: F.channel_shuffle(m.four(x), 4),
        lambda m, x: F.channel_shuffle(m.four(x), 2)[:, ::4],
        lambda m, x: F.fold(F.unfold(m.four(x), 3, padding=1), x.shape[2:], 3, padding=1),
        lambda m, x: F.unfold(x, 3, padding=1).unflatten(1, (x.shape[1], 9)).amax(2).view_as(x),
        lambda m, x: F.interpolate(F.max_pool2d(x, 2), x.shape[2:], mode="bilinear"),
        lambda m, x: F.pad(x, (1, 1, 1, 1), mode="reflect")[:, :, :: -1 % 3 + 1, 2:],
        lambda m, x: F.pad(x, (1, 0, 1, 0), value=0.5),
        lambda m, x: torch.rot90(x, 1, (2, 3)) + x.transpose(2, 3),
        lambda m, x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) - x,
        lambda m, x: F.lp_pool2d(x.abs(), 2.0, 2),
        lambda m, x: F.grid_sample(x, m.grid.expand(x.shape[0], -1, -1, -1), align_corners=False),
        lambda m, x: torch.cat([x, m.grid.permute(0, 3, 1, 2).expand(x.shape[0], -1, -1, -1)], 1),
        lambda m, x: x.cumsum(2) - x.sort(3).values,
        lambda m, x: F.normalize(x, dim=2) + x.var(3, keepdim=True),
        lambda m, x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape[2:]),
    ]
    function = d.pick(functions)
    grid = nn.Buffer(torch.linspace(-0.9, 0.9, SIZE * SIZE * 2).view(1, SIZE, SIZE, 2), persistent=d.often())
    return Apply(lambda m, x, y: function(m, x), four=conv4, down=nn.Conv2d(4 * c, c, 1), grid=grid)


@step
def factors(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """Parameters of its own, as factors, shifts, exponents and limits."""
    c = x.shape[1]
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: x * m.a + m.b,
        lambda m, x: x * m.a.exp(),
        lambda m, x: (x - m.b) / (m.a.abs() + 1),
        lambda m, x: torch.clamp(x, -m.a.abs(), m.a.abs()),
        lambda m, x: x.abs() ** (1 + m.a.abs()),
        lambda m, x: torch.where(x > m.b, x, m.a * x),
        lambda m, x: m.b + m.space * (x - m.b),
        lambda m, x: x * m.a.softmax(0),
        lambda m, x: x * m.space[None, None] + m.mask,
        lambda m, x: torch.einsum("nchw,c->nchw", x, m.a.flatten()),
        lambda m, x: torch.addcmul(m.b, x, m.a),
        lambda m, x: x + (m.a * m.b).sigmoid() * x.detach(),
        lambda m, x: F.batch_norm(x, m.a.flatten(), m.a.flatten().abs() + 1, m.b.flatten()),
        lambda m, x: x.mul(m.a).clamp_min(0).pow(2) - m.b * 0,
    ]
    function = d.pick(functions)
    mask = nn.Buffer(torch.zeros(c, 1, 1))
    return Apply(
        lambda m, x, y: function(m, x), a=parameter(c, 1, 1), b=parameter(c, 1, 1), mask=mask,
        space=parameter(SIZE, SIZE),
    )  # fmt: skip


class Network(nn.Module):
    """Steps, each of which reads two of the earlier results; in the end heads and outputs of some shape."""

    def __init__(self, numbers: Sequence[int], steps: Sequence[str]) -> None:
        super().__init__()
        d = Draw(numbers)
        inputs = [torch.randn(2, n, SIZE, SIZE, dtype=torch.float64) for n in (IMAGE, EXTRA)]
        self.steps, self.reads, self.kinds = nn.ModuleList(), list[tuple[int, int]](), list[str]()
        self.stem = nn.Sequential(nn.Conv2d(IMAGE, d.width, 3, padding=1), norm(d, 1, nn.Identity)).double()
        self.film = nn.Linear(VECTOR, self.stem[0].out_channels).double() if d.often() else None
        with torch.no_grad():
            results = [inputs[1], self.stem(inputs[0])]
            for _ in range(d.pick([1, 2, 3, 4, 5])):
                main = len(results) - 1 - d.pick([0, 0, 0, 1]) % (len(results) - 1)
                other = len(results) - 1 - d.pick([0, 1, 2, 3]) % len(results)
                kind = d.pick(steps) if results[main].shape[1] <= WIDEST else "chain"
                module, result = self._made(kind, d, results[main], results[other])
                self.kinds.append(kind)
                self.steps.append(module)
                self.reads.append((main, other))
                results.append(result)
        self.flags = d.flags
        self.head_kind, self.output_kind = d.pick(["mean", "flat", "map"]), d.pick(["tensor", "dict", "list"])
        wide = results[-1].shape[1]
        self.head = nn.Linear(wide * (SIZE * SIZE if self.head_kind == "flat" else 1), 3).double()

    @staticmethod
    def _made(kind: str, d: Draw, x: Tensor, y: Tensor) -> tuple[nn.Module, Tensor]:
        """A step that runs; where the one drawn cannot take these tensors, a convolution."""
        for maker in (STEPS[kind], chain):
            try:
                module = maker(d, x, y).double()
                result = fitted(module.eval()(x.clone(), y.clone()))
                module.train()(torch.cat([x, x.flip(-1)]), torch.cat([y, y.flip(-1)]))
                assert result.dim() == 4
                assert result.numel()
                assert result.is_floating_point()
                return module.eval(), result.double()
            except (RuntimeError, ValueError, AssertionError, IndexError):
                continue
        raise AssertionError("a plain convolution does not run")

    def forward(self, image: Tensor, extra: Tensor, vector: Tensor) -> Any:
        first = self.stem(image)
        results = [extra, first if self.film is None else first * self.film(vector)[..., None, None]]
        for module, (main, other) in zip(self.steps, self.reads, strict=True):
            results.append(fitted(module(results[main], results[other])).to(image.dtype))
        last = results[-1]
        if self.head_kind == "map":
            out = self.head(last.permute(0, 2, 3, 1))
        else:
            out = self.head(last.flatten(1) if self.head_kind == "flat" else last.mean((2, 3)))
        return {"tensor": out, "dict": {"out": out, "more": [out * 2, None]}, "list": [out]}[self.output_kind]


def inputs(seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, IMAGE, SIZE, SIZE), (2, EXTRA, SIZE, SIZE), (2, VECTOR)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
