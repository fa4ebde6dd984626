"""What cannot be cut exactly stays, and the graph says why."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sandwich import IMAGE, Buffers, Sandwich, examine, kinds, parameter, reasons, sizes
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import secateur
from secateur import Plan
from secateur.channels.reasons import Kind, Reason

Body = Callable[..., Any]

WOKEN: dict[str, Body] = {
    "sigmoid": lambda m, x: x.sigmoid(),
    "exp": lambda m, x: x.exp(),
    "clamp": lambda m, x: x.clamp(min=0.1),
    "pow": lambda m, x: x**0,
    "eq": lambda m, x: (x == 0).to(x.dtype),
    "add_": lambda m, x: x.clone().add_(1),
    "where": lambda m, x: torch.where(x > 0.3, x, m.buffers_of.one),
    "rsub": lambda m, x: 1 - x,
}


@pytest.mark.parametrize("name", WOKEN)
def test_zero_that_wakes_up(name: str) -> None:
    graph = examine(Sandwich(WOKEN[name], buffers_of=Buffers(one=torch.ones(1))), expected={}, probe=False)
    assert reasons(graph)["first"] == Reason(Kind.NOT_ZERO, name, "last")


OTHER_WOKEN: dict[str, Body] = {
    "one value per place added": lambda m, x: x + m.place,
    "one value added": lambda m, x: x + m.single,
    "value per channel that is never zero": lambda m, x: x + m.shift.exp()[:, None, None],
    "padding with ones": lambda m, x: F.pad(x, (1, 1), value=1.0),
    "softmax in space": lambda m, x: x.flatten(2).softmax(2).view_as(x),
    "sigmoid of half": lambda m, x: torch.cat([x, x.sigmoid()], 1).unflatten(1, (2, -1)).sum(1),
    "layer norm in space": lambda m, x: m.space(x),
    "norm without affine after sigmoid": lambda m, x: m.plain(x.sigmoid()),
    "instance norm after sigmoid": lambda m, x: m.image(x.sigmoid()),
    "folded into the batch": lambda m, x: m.fold(x.flatten(0, 1)[:, None]).view_as(x),
    "cumulative product": lambda m, x: x.cumprod(2) + 1,
    "distance with an epsilon": lambda m, x: (
        x + F.pairwise_distance(x.mean((2, 3)), x.amax((2, 3)))[:, None, None, None]
    ),
}


@pytest.mark.parametrize("name", OTHER_WOKEN)
def test_zero_that_wakes_up_otherwise(name: str) -> None:
    model = Sandwich(
        OTHER_WOKEN[name], place=parameter(6, 6), single=parameter(1), shift=parameter(8), space=nn.LayerNorm([6, 6]),
        plain=nn.BatchNorm2d(8, affine=False), image=nn.InstanceNorm2d(8), fold=nn.Conv2d(1, 1, 1),
    )  # fmt: skip
    graph = examine(model, probe=False)
    assert kinds(graph)["first"] is Kind.NOT_ZERO


STAYS: dict[str, tuple[Body, Reason]] = {
    "layer norm": (
        lambda m, x: m.layer(x.movedim(1, -1)).movedim(-1, 1),
        Reason(Kind.MIXES, "layer_norm", "layer"),
    ),
    "group norm": (lambda m, x: m.group(x), Reason(Kind.MIXES, "group_norm", "group")),
    "written groups": (lambda m, x: F.group_norm(x, 2), Reason(Kind.MIXES, "group_norm")),
    "softmax": (lambda m, x: x.softmax(1), Reason(Kind.MIXES, "softmax")),
    "smallest": (
        lambda m, x: x * torch.linalg.vector_norm(x, -1, 1, keepdim=True),
        Reason(Kind.MIXES, "linalg_vector_norm"),
    ),
    "response norm": (lambda m, x: F.local_response_norm(x, 3), Reason(Kind.MIXES, "avg_pool3d")),
    "efficient attention": (
        lambda m, x: x * m.along(x.mean((2, 3))[:, None])[:, 0, :, None, None],
        Reason(Kind.MIXES, "convolution", "along"),
    ),
    "one channel picked": (lambda m, x: x * x[:, 2].unsqueeze(1), Reason(Kind.INDEXED, "select")),
    "some read by an index": (
        lambda m, x: F.pad(x.gather(2, torch.zeros(2, 4, 6, 6, dtype=torch.long)), (0, 0, 0, 0, 0, 4)),
        Reason(Kind.INDEXED, "gather"),
    ),
    "first channel alone": (lambda m, x: x * x[:, :1], Reason(Kind.ONLY, "slice")),
    "unequal parts": (lambda m, x: torch.cat(x.chunk(3, 1)[::-1], 1), Reason(Kind.FIXED_PARTS, "split")),
    "all but two": (lambda m, x: F.pad(x[:, :-2], (0, 0, 0, 0, 1, 1)), Reason(Kind.FIXED_PARTS, "slice")),
    "constants": (
        lambda m, x: x * torch.arange(8.0).view(-1, 1, 1),
        Reason(Kind.FIXED_TENSOR, "mul: 8x1x1, made by no layer"),
    ),
    "a fixed matrix": (
        lambda m, x: (torch.eye(8).double() @ x.flatten(2)).view_as(x),
        Reason(Kind.FIXED_TENSOR, "bmm: 2x8x8, made by no layer"),
    ),
    "read by Python": (lambda m, x: x if x.mean((0, 2, 3))[0] > 0 else -x, Reason(Kind.INDEXED, "select")),
    "read as a number": (lambda m, x: x if torch.equal(x, x) else -x, Reason(Kind.READ_BY_PYTHON, "equal")),
    "unknown": (
        lambda m, x: x * torch.cdist(x.flatten(2), x.flatten(2)).sum(),
        Reason(Kind.UNKNOWN_OPERATOR, "aten._cdist_forward.default"),
    ),
    "mirrored matrix": (
        lambda m, x: (x.flatten(2) @ x.flatten(2).mT).flatten(1) @ m.square,
        Reason(Kind.MERGED, "view"),
    ),
    "scrambled": (
        lambda m, x: x.permute(0, 2, 3, 1).reshape(x.shape),
        Reason(Kind.WHOLE_LAYER),
    ),
    "beside constants": (
        lambda m, x: torch.stack([x, torch.arange(8.0).double().view(-1, 1, 1).expand_as(x)]).mean(0),
        Reason(Kind.FIXED_TENSOR, "stack: 2x8x6x6, made by no layer"),
    ),
    "weights elsewhere": (
        lambda m, x: x * m.first.weight.norm(),
        Reason(Kind.COMPUTED_WEIGHT, "linalg_vector_norm"),
    ),
    "undefined": (
        lambda m, x: x * m.scale.square().rsqrt(),
        Reason(Kind.UNDEFINED, "rsqrt"),
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_stays_with_reason(name: str) -> None:
    body, reason = STAYS[name]
    inner = 0 if name == "mirrored matrix" else 8
    parts: dict[str, Any] = {
        "layer": nn.LayerNorm(8),
        "group": nn.GroupNorm(1, 8),
        "square": parameter(64, 2),
        "scale": parameter(8, 1, 1),
    }
    graph = examine(Sandwich(body, inner, **parts, along=nn.Conv1d(1, 1, 3, padding=1)), expected={}, probe=False)
    assert reasons(graph)["first"] == reason


def test_who_made_a_tensor_of_fixed_size() -> None:
    parts = {name: nn.Conv2d(8, 8, 1) for name in ("left", "right", "third")}
    model = Sandwich(lambda m, x: m.third(x) * (m.left(x) + m.right(x)).softmax(1), **parts)
    told = reasons(examine(model, expected={"first": 8}))
    assert told["third"] == Reason(Kind.FIXED_TENSOR, "mul: 2x8x6x6, made by left and 1 more")
    model = Sandwich(lambda m, x: m.left(x) * m.scale.softmax(0), left=parts["left"], scale=parameter(8, 1, 1))
    told = reasons(examine(model, expected={"first": 8}))
    assert told["left"] == Reason(Kind.FIXED_TENSOR, "mul: 8x1x1, made of parameters and buffers")


def test_inexact_on_request() -> None:
    """Channels behind a layer norm can be had, marked as inexact."""
    model = Sandwich(lambda m, x: m.layer(x.movedim(1, -1)).movedim(-1, 1), layer=nn.LayerNorm(8)).double()
    graph = secateur.analyze(model, IMAGE, inexact=True)
    assert sizes(graph) == {"first": 8}
    assert graph.group("first").inexact == Reason(Kind.MIXES, "layer_norm", "layer")
    plan = secateur.Plan.random(graph, 0.4)
    assert not plan.exact
    assert secateur.shrink(model, plan).layer.normalized_shape == (5,)
    assert not secateur.verify(model, plan, IMAGE).exact


def standardised(module: nn.Module, x: Tensor) -> Tensor:
    weight = module.conv.weight
    weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
    return F.conv2d(x, weight, module.conv.bias)


@pytest.mark.parametrize("name", ["standardised", "weight norm", "spectral norm", "orthogonal"])
def test_weights_made_from_weights(name: str) -> None:
    """What feeds them stays."""
    conv = nn.Conv2d(8, 8, 1)
    make = {
        "weight norm": parametrizations.weight_norm,
        "spectral norm": parametrizations.spectral_norm,
        "orthogonal": parametrizations.orthogonal,
    }
    if name in make:
        conv = make[name](conv)
    model = Sandwich(standardised if name == "standardised" else lambda m, x: m.conv(x), conv=conv)
    # Torch does not count products of a matrix and a vector.
    graph = examine(model.eval(), cost=name != "spectral norm")
    assert "first" in reasons(graph)


def test_attention() -> None:
    """Channels that attention compares stay; the convolution before its projection can be cut."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.query, self.last = nn.Conv2d(3, 6, 1), nn.Linear(6, 24), nn.Linear(8, 2)

        def forward(self, image: Tensor) -> Tensor:
            tokens = F.relu(self.conv(image)).flatten(2).transpose(1, 2)
            query, key, value = self.query(tokens).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return self.last(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))

    # Torch does not count this attention on a CPU.
    graph = examine(Attention(), expected={"conv": 6}, cost=False)
    assert reasons(graph)["query"] == Reason(Kind.MIXES, "attention")


def test_unused_parameters() -> None:
    graph = examine(Sandwich(lambda m, x: x, spare=nn.Conv2d(8, 4, 1)), expected={"first": 8})
    assert kinds(graph)["spare"] is Kind.UNUSED
    assert graph.partial


def test_a_buffer_that_is_not_used_is_no_filter_and_no_layer() -> None:
    model = Sandwich(lambda m, x: x)
    model.register_buffer("anchors", torch.randn(3, 2))
    model.last.register_buffer("anchors", torch.randn(3, 2))
    graph = examine(model, expected={"first": 8})
    assert [frozen.name for frozen in graph.frozen] == ["last"]
    assert not graph.notes
    model.blur = Buffers(kernel=torch.randn(8, 1, 3, 3))  # may read channels when it runs
    (note,) = secateur.analyze(model.double(), IMAGE).notes
    assert ": blur;" in note


@pytest.mark.parametrize("last", [nn.Linear(8, 1), nn.Linear(8, 1, bias=False), nn.Conv2d(8, 1, 1)])
def test_a_layer_of_one_filter_stays(last: nn.Module) -> None:
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()) if isinstance(last, nn.Linear) else nn.Identity()
    graph = secateur.analyze(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), pooled, last), torch.randn(1, 3, 6, 6))
    assert kinds(graph) == {"3": Kind.ONLY}
    assert graph.num_filters == 9


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("hooked", [True, False])
def test_weight_norm_names_the_remedy(hooked: bool) -> None:
    """Inputs of a filter are part of its norm; filters are not part of another's."""
    normed = torch.nn.utils.weight_norm if hooked else parametrizations.weight_norm
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), normed(nn.Conv2d(8, 8, 1)), nn.ReLU(), nn.Conv2d(8, 2, 1))
    images = torch.randn(1, 3, 6, 6)
    model(images)  # leaves a weight with its history in the layer, which torch does not copy
    graph = secateur.analyze(model, images)
    assert [group.name for group in graph.groups] == ["2"]
    told = reasons(graph)["0"]
    assert (told.kind, told.detail) == (Kind.IN_NORM, "weight norm")
    assert "remove_weight_norm" in str(told)
    small = secateur.shrink(model, Plan.random(graph, 0.5))
    assert (small[2].in_channels, small[2].out_channels, small[4].in_channels) == (8, 4, 4)
    assert [note for note in graph.notes if "(2)" in note and "makes them plain" in note]
    assert [frozen.size for frozen in graph.frozen] == [8, 2]
    if hooked:
        torch.nn.utils.remove_weight_norm(model[2])
    else:
        torch.nn.utils.parametrize.remove_parametrizations(model[2], "weight")
    plain = secateur.analyze(model, images)
    assert [group.name for group in plain.groups] == ["0", "2"]
    assert not plain.notes


def test_a_layer_of_one_filter_is_counted() -> None:
    graph = examine(Sandwich(lambda m, x: x * m.gate(x).sigmoid(), gate=nn.Conv2d(8, 1, 1)), expected={"first": 8})
    assert kinds(graph)["gate"] is Kind.ONLY
    assert graph.num_filters == 8 + 1 + 5
