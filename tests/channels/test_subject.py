"""Copies on which the probe tries cuts, and the smaller pictures on which it compares numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import randomize_
from torch import Tensor, nn

import secateur
from secateur import Plan
from secateur.channels.example import Example
from secateur.channels.guard import modules_of
from secateur.channels.reasons import Kind
from secateur.channels.rehearsal import ShapesOnly, run
from secateur.channels.shrink import copy_model, hollow, shrink
from secateur.channels.subject import HIDES, PERIOD, Subject, perturb_, smaller

PICTURE = torch.randn(1, 3, 256, 256, generator=torch.Generator().manual_seed(0))


class Body(nn.Module):
    """Two layers around `body`, at a quarter of the picture's size or a smaller part of it."""

    def __init__(self, body: Callable[[Tensor], Tensor] = F.relu, width: int = 24, stride: int = 4) -> None:
        super().__init__()
        self.first, self.last, self.body = nn.Conv2d(3, width, stride, stride), nn.Conv2d(width, 2, 1), body

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)))


def subject_of(model: nn.Module, picture: Tensor = PICTURE) -> tuple[Subject, secateur.ChannelGraph]:
    graph = secateur.analyze(model, picture, probe=False)
    return Subject(model, graph.calls, False), graph


def head(fixed: bool) -> nn.Module:
    pool = nn.Flatten() if fixed else nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(Body(), pool, nn.Flatten(), nn.Linear(2 * 64 * 64 if fixed else 2, 3))


@pytest.mark.parametrize(
    ("model", "size", "expected"),
    [
        (Body(), 256, (1, 3, 64, 64)),
        (Body(), 127, None),
        (Body(stride=64), 256, (1, 3, 128, 128)),
        (Body(stride=128), 256, None),
        (head(fixed=False), 256, (1, 3, 64, 64)),
        (head(fixed=True), 256, None),
        (Body(lambda x: F.interpolate(x, size=[n // 2 for n in x.shape[2:]])), 256, None),
    ],
    ids=["plain", "small", "one pixel left", "one pixel left of any", "pooled", "of one size", "numbers of its own"],
)
def test_smaller_pictures_where_the_network_runs_the_same(
    model: nn.Module, size: int, expected: tuple[int, ...] | None
) -> None:
    subject, _ = subject_of(model, PICTURE[..., :size, :size])
    calls = subject.smaller_calls
    assert (calls and calls["eval"][0].tensors[0].shape) == expected


def test_pictures_keep_their_proportions_and_other_tensors_their_sizes() -> None:
    given = Example.of((torch.randn(2, 3, 512, 1024), torch.randn(2, 300), torch.randn(1, 3, 4, 192, 128)))
    assert [tuple(t.shape) for t in smaller(given, 64).tensors] == [(2, 3, 64, 128), (2, 300), (1, 3, 4, 96, 64)]
    constant = smaller(Example.of(torch.cat([torch.zeros(1, 3, 64, 128), torch.ones(1, 3, 64, 128)], 2)), 64)
    assert constant.tensors[0].std() > 0


def moved(x: Tensor) -> Tensor:
    """Right for 24 channels only, with the same operators for any number."""
    first = min(12, x.shape[1] - 1)
    return torch.cat([x.narrow(1, first, x.shape[1] - first), x.narrow(1, 0, first)], 1)


def attended(x: Tensor) -> Tensor:
    """The order of channels counts in the weights of positions, which is one for a single position."""
    return x * moved(x).flatten(2).softmax(-1).view_as(x)


def part(x: Tensor) -> Tensor:
    """Of as many rows as there are channels, if there are so many."""
    return x.narrow(2, 0, min(x.shape[1], x.shape[2])).mean((2, 3), keepdim=True)


def scaled(x: Tensor) -> Tensor:
    """Narrower than it is high only if it is cut, and the picture is not."""
    return x * torch.tensor(float(min(x.shape[1], x.shape[2])))


def doubled(x: Tensor) -> Tensor:
    """The number is in no tensor, and no shape depends on it."""
    return x * min(x.shape[1], x.shape[2])


@pytest.mark.parametrize(
    ("body", "width", "stride"),
    [(moved, 24, 4), (attended, 24, 128), (part, 66, 4), (scaled, 66, 4), (doubled, 66, 4)],
)
def test_what_a_smaller_picture_would_hide_is_found(body: Any, width: int, stride: int) -> None:
    """Of 64 x 64 pixels, 16 x 16 after the first layer, or one: not enough to tell."""
    model = randomize_(Body(body, width, stride))
    graph = secateur.analyze(model, PICTURE.double())
    assert not graph.groups
    assert next(layer for layer in graph.frozen if layer.name == "first").reason.kind is Kind.DIFFERS


class Weighed(Body):
    """Goes another way for few channels, unless a weight is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.switch = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + x if bool(self.switch) and x.shape[1] < 6 else x)


def test_weights_that_the_code_reads_are_not_left_out() -> None:
    assert not secateur.analyze(randomize_(Weighed()), PICTURE.double()).groups


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_hollow_copy_runs_what_the_cut_network_runs(mode: str) -> None:
    model = nn.Sequential(Body(), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Conv2d(2, 8, 1), nn.Conv2d(8, 2, 1))
    _, graph = subject_of(model)
    plan = Plan.random(graph, 0.4)
    seen = []
    for copied, bare in ((shrink(model, plan), False), (hollow(model, plan), True), (hollow(model), True)):
        seen.append(ShapesOnly(bare))
        run(copied, Example.of(PICTURE), mode, seen[-1])
    assert seen[0].operators == seen[1].operators == seen[2].operators
    assert seen[0].shapes == seen[1].shapes != seen[2].shapes
    for name, tensor in hollow(model, plan).state_dict().items():
        assert tensor.shape == (plan.shape(name) if name in graph.shapes else ())


def test_a_trial_sees_a_norm_of_another_width() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(6)).eval()
    with pytest.raises(RuntimeError), ShapesOnly(bare=True):
        model(PICTURE)


def test_trials_leave_the_model_alone() -> None:
    """Also a model that writes into its own weights."""

    class Writing(Body):
        def forward(self, x: Tensor) -> Tensor:
            self.first.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = randomize_(Writing())
    before = copy_model(model)
    graph = secateur.analyze(model, PICTURE.double())
    assert [group.name for group in graph.groups] == ["first"]
    for one, other in zip(before.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


class Odd(nn.Module):
    """Refers to itself, shares a list, and has a module that says how it is copied."""

    class Counted(nn.ReLU):
        copies = 0

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
            type(self).copies += 1
            return type(self)()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.counted, self.note = nn.Conv2d(3, 4, 1), self.Counted(), {"sizes": [4, 4]}
        self.first.noted = self.note["sizes"]  # pyright: ignore
        self.own = [self]
        self.first.register_forward_hook(self.seen)
        self.shape = (1, [2])

    def seen(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.note["last"] = list(output.shape)


def test_copies_are_what_deepcopy_gives() -> None:
    model = Odd()
    copied: Any = copy_model(model)
    assert copied.own[0] is copied
    assert copied.note["sizes"] is copied.first.noted
    assert copied.note["sizes"] is not model.note["sizes"]
    assert copied.shape[1] is not model.shape[1]
    assert Odd.Counted.copies == 1
    copied.first.register_forward_pre_hook(lambda module, args: None)
    copied.first(torch.ones(1, 3, 2, 2))
    assert copied.note["last"] == [1, 4, 2, 2]
    assert "last" not in model.note
    assert not model.first._forward_pre_hooks
    for entry, other in zip(vars(model.first).values(), vars(copied.first).values(), strict=True):
        assert type(entry) is type(other)
        assert entry is not other or isinstance(entry, (int, str, tuple, type(None)))


def test_noise_leaves_nothing_at_zero_and_no_two_channels_alike() -> None:
    model = nn.Sequential(nn.Conv2d(64, 2048, 1), nn.Conv2d(8, 4, 3).half(), nn.Linear(3, 2))
    nn.init.zeros_(model[0].weight)  # pyright: ignore
    nn.init.constant_(model[0].bias, HIDES / 2)  # pyright: ignore
    model[2].weight.data[0] = 0  # pyright: ignore
    kept = model[2].weight.data[1].clone()  # pyright: ignore
    perturb_(model)
    weight = model[0].weight.data.flatten(1)  # pyright: ignore
    assert weight.numel() > PERIOD
    assert len(weight.unique(dim=0)) == 2048
    assert all(bool((tensor != 0).all()) for tensor in model.parameters())
    ratio = model[2].weight.data[1] / kept  # pyright: ignore
    assert bool(((ratio >= 0.9) & (ratio <= 1)).all())


def test_memory_formats_do_not_matter() -> None:
    """The weight of a 1x1 convolution in channels_last is a view of itself as a flat tensor, with other strides."""
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Conv2d(16, 4, 1))
    graph = secateur.analyze(plain, torch.randn(1, 3, 8, 8))
    other = secateur.analyze(plain.to(memory_format=torch.channels_last), torch.randn(1, 3, 8, 8))
    assert [group.size for group in graph.groups] == [8, 16]
    assert str(other) == str(graph)


def test_modules_of_is_named_modules() -> None:
    class Hiding(nn.Module):
        """Names one of its modules only."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.none = nn.ReLU(), nn.Linear(2, 2), None

        def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
            yield prefix, self
            yield f"{prefix}.one" if prefix else "one", self.one

    shared = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())
    for model in (nn.Sequential(shared, nn.ModuleDict({"a": shared, "b": Hiding()}), shared[1]), Hiding()):
        assert list(modules_of(model).items()) == list(model.named_modules())
