"""Steps that have no rule, or that no rule sees through: the analysis must freeze what it does not know."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from grammar import STEPS, Draw, DropPath, Maker, dividing, layer, norm, parameter
from networks import Apply
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint


def strange(maker: Maker) -> Maker:
    STEPS[maker.__name__] = maker
    return maker


class Scaled(torch.autograd.Function):
    """Each channel alone, but nobody can know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor.view(-1, 1, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, factor = ctx.saved_tensors
        return grads[0] * factor.view(-1, 1, 1), (grads[0] * x).sum((0, 2, 3))


class Rounded(torch.autograd.Function):
    """The straight-through estimator of quantisation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Masked(nn.Module):
    """A parametrization."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(like.numel()) % 3 > 0).to(like).view(like.shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


@strange
def autograd(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: Scaled.apply(x, m.a.flatten()),
        lambda m, x: Rounded.apply(x),
        lambda m, x: checkpoint(m.conv, x, use_reentrant=False),
        lambda m, x: checkpoint(m.conv, x, use_reentrant=True),
        lambda m, x: x + (m.conv(x) - x.mean(1, True)).detach(),
        lambda m, x: Scaled.apply(m.conv(x), m.wide.flatten()),
    ]
    conv, function = layer(d, x.shape[1], d.width), d.pick(functions)
    wide = conv(torch.zeros_like(x, dtype=torch.float32)).shape[1]
    return Apply(lambda m, x, y: function(m, x), conv=conv, a=parameter(x.shape[1], 1, 1), wide=parameter(wide, 1, 1))


@strange
def functional(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """torch.func, and calls on parameters."""
    conv = nn.Conv2d(x.shape[1], d.width, 3, padding=1)
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: torch.func.vmap(m.conv)(x[:, None])[:, 0],
        lambda m, x: torch.func.functional_call(m.conv, {"weight": m.conv.weight * 2, "bias": m.conv.bias}, (x,)),
        lambda m, x: torch.func.jvp(m.conv, (x,), (x,))[1],
        lambda m, x: torch.func.grad(lambda z: m.conv(z).square().sum())(x),
        lambda m, x: torch.vmap(lambda z: z * 2 + z.flip(0))(x),
        lambda m, x: torch.func.vmap(lambda w: F.conv2d(x, w[None]))(m.conv.weight).squeeze(2).movedim(0, 1),
        lambda m, x: F.conv2d(x, m.conv.weight - m.conv.weight.mean((1, 2, 3), keepdim=True), m.conv.bias, padding=1),
        lambda m, x: F.conv2d(x, F.normalize(m.conv.weight, dim=0), m.conv.bias, padding=1),
        lambda m, x: F.conv_transpose2d(m.conv(x), m.conv.weight, padding=1),
        lambda m, x: F.conv2d(x, torch.cat([m.conv.weight, m.conv.weight.flip(2)]), padding=1),
        lambda m, x: F.conv2d(x, m.conv.weight.softmax(1) * m.conv.weight.sigmoid(), padding=1),
        lambda m, x: (x.flatten(2).mT @ m.conv.weight[:, :, 1, 1].T).mT.unflatten(2, x.shape[2:]),
        lambda m, x: torch.einsum("nchw,ockl->nohw", x, m.conv.weight) + m.conv.bias[:, None, None],
        lambda m, x: m.conv(x) + F.linear(x.movedim(1, -1), m.conv.weight[:, :, 0, 0]).movedim(-1, 1),
        lambda m, x: torch.tensordot(x, m.conv.weight[..., 0, 0], ([1], [1])).movedim(-1, 1),
        lambda m, x: m.conv._conv_forward(x, m.conv.weight.clone(), None),
        lambda m, x: F.conv2d(x.reshape(1, -1, *x.shape[2:]), m.conv.weight.repeat(x.shape[0], 1, 1, 1),
                              padding=1, groups=x.shape[0]).view(x.shape[0], -1, *x.shape[2:]),
    ]  # fmt: skip
    function = d.pick(functions)
    return Apply(lambda m, x, y: function(m, x), conv=conv)


@strange
def computed(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """Weights that are computed from others, by parametrizations and hooks of torch."""
    conv = nn.Conv2d(x.shape[1], d.width, d.pick([3, 1]), padding="same")
    changes: list[Callable[[nn.Conv2d], nn.Module]] = [
        parametrizations.spectral_norm,
        parametrizations.weight_norm,
        lambda c: parametrizations.weight_norm(c, dim=1),
        parametrizations.orthogonal,
        lambda c: parametrize.register_parametrization(c, "weight", Masked(c.weight)) or c,
        lambda c: prune.l1_unstructured(c, "weight", 0.3),
        lambda c: prune.ln_structured(c, "weight", 0.3, n=2, dim=0),
        lambda c: nn.utils.spectral_norm(c),
    ]
    try:
        conv = d.pick(changes)(conv)
    except RuntimeError:
        conv = parametrizations.spectral_norm(conv)
    return Apply(lambda m, x, y: m.norm(m.conv(x)), conv=conv, norm=norm(d, conv.out_channels))


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def turned(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.flip(1)


def joined(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return torch.cat([output, args[0]], 1)


def shortened(module: nn.Module, args: Any) -> Any:
    return (args[0] * args[0].new_tensor([1.0, 0.5] * 40)[: args[0].shape[1], None, None],)


def counting(module: nn.Module, args: Any, output: Tensor) -> None:
    module.calls = getattr(module, "calls", 0) + 1
    module.last = output.detach()


@strange
def hooked(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    conv = nn.Conv2d(x.shape[1], d.width, 1)
    for _ in range(d.pick([1, 2])):
        hook = d.pick([doubled, turned, joined, counting, None])
        if hook is not None:
            conv.register_forward_hook(hook)
        else:
            conv.register_forward_pre_hook(shortened)
    return Apply(lambda m, x, y: m.conv(x), conv=conv)


def few(x: Tensor) -> Tensor:
    """Every step of a recurrent layer runs operators of its own."""
    return x[:, :, ::3, ::3]


@strange
def recurrent(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    d.flags.add("uncounted")
    c, wide = x.shape[1], d.width
    kind = d.pick([nn.GRU, nn.LSTM, nn.RNN])
    rnn = kind(c, wide, batch_first=True, bidirectional=d.often(), num_layers=d.pick([1, 2]))
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: m.rnn(few(x).flatten(2).mT)[0].mT.unflatten(2, few(x).shape[2:]),
        lambda m, x: m.rnn(x.mean(2).mT)[0].mT[:, :, None].expand(-1, -1, x.shape[2], -1),
        lambda m, x: m.rnn(few(x).flatten(2).mT)[1][0][-1][..., None, None] * x.mean(1, True),
    ]
    function = d.pick(functions if kind is not nn.LSTM else functions[:2])
    before = nn.Conv2d(c, c, 1)
    return Apply(lambda m, x, y: function(m, m.before(x)), rnn=rnn, before=before)


@strange
def attention(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """Products are scaled by the width of the heads, where torch runs its operators one by one."""
    d.flags |= {"uncounted", "sizes"}
    c, wide = x.shape[1], 2 * d.width
    heads = d.pick([1, 2])
    query = nn.Conv2d(c, 3 * wide, 1)
    inner = nn.MultiheadAttention(wide, heads, batch_first=True)
    functions: list[Callable[..., Tensor]] = [
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        lambda q, k, v: (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v,
        lambda q, k, v: (q @ k.mT).sigmoid() @ v,
        lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
        lambda q, k, v: (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT) @ v,
        lambda q, k, v: q.relu() @ (k.relu().mT @ v),
    ]
    function, split = d.pick(functions), d.pick(["heads", "whole", "module"])

    def run(m: Any, x: Tensor, y: Tensor) -> Tensor:
        tokens = m.query(x).flatten(2).mT
        parts = tokens.chunk(3, -1)
        if split == "module":
            out = m.inner(*parts, need_weights=False)[0]
        elif split == "heads":
            out = function(*(p.unflatten(-1, (heads, -1)).transpose(1, 2) for p in parts)).transpose(1, 2).flatten(2)
        else:
            out = function(*parts)
        return m.out(out).mT.unflatten(2, x.shape[2:])

    return Apply(run, query=query, inner=inner, out=nn.Linear(wide, d.width))


@strange
def kinds(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """Complex, integer and boolean tensors, and other precisions."""
    c = x.shape[1]
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: torch.fft.irfft2(torch.fft.rfft2(x) * m.a, x.shape[2:]),
        lambda m, x: torch.fft.fft2(x).abs(),
        lambda m, x: torch.fft.fft(x, dim=1).real,
        lambda m, x: torch.view_as_real(torch.view_as_complex(x.unflatten(1, (-1, 2)).movedim(2, -1).contiguous()) * 2j)
        .movedim(-1, 2).flatten(1, 2),
        lambda m, x: torch.polar(x.abs(), x).imag,
        lambda m, x: F.one_hot(x.argmax(1), x.shape[1]).to(x.dtype).movedim(-1, 1) * x,
        lambda m, x: m.table(x[:, 0].abs().long().clamp(0, 3)).movedim(-1, 1),
        lambda m, x: (x > 0).to(x.dtype) * x,
        lambda m, x: (x * 8).to(torch.int32).to(x.dtype),
        lambda m, x: x.masked_fill(x < x.median(), 0.0),
        lambda m, x: x.gather(1, x.argsort(1)),
        lambda m, x: x.topk(1, 1).values * x,
        lambda m, x: torch.bucketize(x, m.edges).to(x.dtype),
        lambda m, x: x.to(torch.float32).to(x.dtype),
        lambda m, x: m.conv(x) if bool(x.mean() > 0) else m.conv(-x),
        lambda m, x: x * float(x.abs().amax()),
        lambda m, x: x[:, [0]] + x.index_select(1, torch.arange(x.shape[1]).flip(0)),
        lambda m, x: x[:, torch.tensor([0, -1])].repeat(1, 2, 1, 1),
        lambda m, x: x.nan_to_num() * x.isfinite(),
        lambda m, x: x.scatter_add(1, (x[:, :1] * 0).long(), x[:, -1:]),
    ]  # fmt: skip
    function = d.pick(functions)
    if "float32" in function.__code__.co_names:
        d.flags.add("single")
    return Apply(
        lambda m, x, y: function(m, x), a=parameter(c, 1, 1), table=nn.Embedding(4, d.width),
        edges=nn.Buffer(torch.tensor([-1.0, 0.0, 1.0])), conv=nn.Conv2d(c, c, 1),
    )  # fmt: skip


@strange
def stateful(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """What a forward pass writes: into its input, its buffers, its attributes."""
    c = x.shape[1]

    def remembers(m: Any, x: Tensor) -> Tensor:
        m.seen.mul_(0.9).add_(0.1 * x.mean((0, 2, 3)))
        return x - m.seen.view(-1, 1, 1)

    def counts(m: Any, x: Tensor) -> Tensor:
        m.count += 1
        m.list.append(m.count)
        m.last = x.detach()
        return x * 2

    def fills(m: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:, ::2], out[:, 1::2] = x[:, ::2], x[:, 1::2].tanh()
        return out

    def in_place(m: Any, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = 0
        x[:, 1:].mul_(2)
        x[:, :, 0].zero_()
        return x.add_(1).sub_(1)

    def into(m: Any, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        torch.mul(x, 2, out=out)
        return out.index_add_(1, torch.tensor([0]), x[:, -1:])

    def switches(m: Any, x: Tensor) -> Tensor:
        return m.conv(x) if m.training else x + m.conv(x)

    def caches(m: Any, x: Tensor) -> Tensor:
        if getattr(m, "cached", None) is None or m.cached.shape[1] != x.shape[1]:
            m.cached = torch.linspace(1, 2, x.shape[1], dtype=x.dtype)[None, :, None, None]
        return x * m.cached

    functions: list[Callable[..., Tensor]] = [remembers, counts, fills, in_place, into, switches, caches]
    function = d.pick(functions)
    if function is caches:
        d.flags.add("sizes")
    return Apply(
        lambda m, x, y: function(m, x), seen=nn.Buffer(torch.zeros(c)), count=0, list=[], conv=nn.Conv2d(c, c, 1),
        last=None, cached=None,
    )  # fmt: skip


@strange
def noise(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """What only training does, at random."""
    d.flags.add("noisy")
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: m.conv(x) + (torch.randn_like(m.conv(x)) if m.training else 0),
        lambda m, x: F.dropout(x, 0.5, m.training),
        lambda m, x: F.alpha_dropout(x, 0.5, m.training),
        lambda m, x: F.feature_alpha_dropout(x, 0.5, m.training),
        lambda m, x: F.rrelu(x, training=m.training),
        lambda m, x: x + m.drop(m.conv(x)[:, : x.shape[1]]) if m.conv.out_channels >= x.shape[1] else m.conv(x),
        lambda m, x: x if m.training and bool(torch.rand(()) < 0.5) else x + x.tanh(),
    ]
    function = d.pick(functions)
    return Apply(lambda m, x, y: function(m, x), conv=nn.Conv2d(x.shape[1], d.width, 1), drop=DropPath())


@strange
def tied(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """Parameters and modules that are used in several places."""
    c, wide = x.shape[1], d.width
    one, two = nn.Conv2d(c, wide, 1, bias=False), nn.Conv2d(wide, c, 1, bias=False)
    bias, line = nn.Parameter(torch.ones(wide)), nn.Linear(c, wide)
    both = nn.Conv2d(c, wide, 1)
    which = d.pick(range(6))
    if which == 0:
        line.weight = nn.Parameter(torch.ones(wide, c))
    elif which == 1:
        one.bias = both.bias = bias
    elif which == 2:
        both.weight = one.weight
    elif which == 4:
        two.weight = nn.Parameter(torch.ones(c, wide, 1, 1))
    functions: list[Callable[..., Tensor]] = [
        # a convolution and a linear layer, the bias of two layers, the weight of two layers
        lambda m, x, y: F.conv2d(x, m.line.weight[..., None, None]) + m.line(x.mean((2, 3)))[..., None, None],
        lambda m, x, y: torch.cat([m.one(x), m.both(x).relu()], 1),
        lambda m, x, y: m.two(m.one(x).relu()) + m.two(m.both(x).tanh()),
        # a norm after two layers, an autoencoder, recurrence
        lambda m, x, y: m.norm(m.one(x)).relu() * m.norm(m.both(x)).sigmoid(),
        lambda m, x, y: m.two(F.conv2d(x, m.two.weight.transpose(0, 1)).relu()),
        lambda m, x, y: m.two(m.one(m.two(m.one(x).relu()).relu()).relu()) + x,
    ]
    function = functions[which]
    return Apply(function, one=one, two=two, both=both, line=line, norm=norm(d, wide))


@strange
def small(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """Layers of one channel, or of none."""
    c = x.shape[1]
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: m.to_one(x) * x,
        lambda m, x: m.from_one(m.to_one(x).relu()),
        lambda m, x: torch.cat([x[:, :0], x], 1) + m.nothing.sum(),
        lambda m, x: m.from_one(x.mean(1, True)) + m.from_one(x.amax(1, True)),
        lambda m, x: torch.cat([t for t in x.split(1, 1) if t.numel()], 1),
        lambda m, x: m.from_one(m.to_one(x)[:, 0][:, None]).squeeze(),
        lambda m, x: m.to_one(x).squeeze(1).unsqueeze(1).expand_as(x),
        lambda m, x: m.from_one(m.depth(m.to_one(x))),
    ]
    function = d.pick(functions)
    return Apply(
        lambda m, x, y: function(m, x), to_one=nn.Conv2d(c, 1, 1), from_one=nn.Conv2d(1, d.width, 1),
        depth=nn.Conv2d(1, 1, 1, groups=1), nothing=nn.Parameter(torch.empty(0, c)),
    )  # fmt: skip


@strange
def experts(d: Draw, x: Tensor, y: Tensor) -> nn.Module:
    """Weights that the input mixes, and layers in lists and dicts."""
    c, wide = x.shape[1], d.width
    convs = nn.ModuleList(nn.Conv2d(c, wide, 1) for _ in range(2))
    named = nn.ModuleDict({"a": nn.Conv2d(c, wide, 3, padding=1), "b": nn.Conv2d(c, wide, 1)})
    kernels = nn.ParameterList([nn.Parameter(torch.ones(wide, c, 1, 1)) for _ in range(2)])
    groups = dividing(2, c)
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: sum(g.view(-1, 1, 1, 1) * c(x) for g, c in zip(m.gate(x).unbind(1), m.convs, strict=True)),
        lambda m, x: F.conv2d(x, sum(w * k for w, k in zip(m.gate(x).mean(0), m.kernels, strict=True))),
        lambda m, x: torch.cat([m.named[name](x) for name in sorted(m.named)], 1),
        lambda m, x: torch.stack([m.named["a"](x), m.named["b"](x)], 1).softmax(1).sum(1) * m.convs[0](x),
        lambda m, x: torch.cat([m.piece(p) for p in x.chunk(groups, 1)], 1),
        lambda m, x: m.convs[0](x) * m.convs[1](x).sigmoid(),
        lambda m, x: torch.cat(list({"a": m.convs[0](x), "b": x}.values()), 1),
    ]
    function = d.pick(functions)
    return Apply(
        lambda m, x, y: function(m, x), convs=convs, named=named, kernels=kernels,
        piece=nn.Conv2d(c // groups, wide, 1),
        gate=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 2), nn.Softmax(1)),
    )  # fmt: skip
