"""Branches that can go: which ones are found, and that a network without them is one with zeros in their place."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from branched import PICTURE, names, scrambled, zeroed
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torchvision.ops import FrozenBatchNorm2d

import secateur
from secateur import ChannelGraph, Plan
from secateur.channels.reasons import Kind
from secateur.channels.verify import mask_
from secateur.models.resnet_cifar import CifarResNet


def conv(inner: int = 8, outer: int = 8) -> nn.Conv2d:
    return nn.Conv2d(inner, outer, 3, padding=1)


class Net(nn.Module):
    """A stem, one block or several, and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem = conv(3)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Block(nn.Module):
    """A block whose forward pass is given as a function, with parts of its own."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def branch() -> nn.Sequential:
    return nn.Sequential(conv(8, 6), nn.BatchNorm2d(6), nn.ReLU(inplace=True), conv(6, 8))


def check(model: nn.Module, graph: ChannelGraph, x: Tensor = PICTURE) -> None:
    """Every branch alone: gone is the same as an addend of zeros, and as zeros for its parameters."""
    for each in graph.branches:
        plan = Plan.keep(graph, {}, without=[each.name])
        small = secateur.shrink(model, plan)
        count = sum(p.numel() for p in small.parameters())
        assert plan.cost.params == count < graph.params
        assert plan.cost == secateur.analyze(small, x[:1], probe=False).cost()
        for mode in (False, True):
            with torch.no_grad():
                got = without_chance(copy.deepcopy(small).train(mode))(x)
                masked = without_chance(mask_(copy.deepcopy(model), plan).train(mode))(x)
                torch.testing.assert_close(got, masked, atol=1e-5, rtol=1e-4)
                if each.addend is not None:
                    work = without_chance(copy.deepcopy(model).train(mode))
                    torch.testing.assert_close(got, zeroed(work, graph, each.name, x))


def without_chance(model: nn.Module) -> nn.Module:
    for module in model.modules():
        module.training &= not isinstance(module, nn.Dropout)
    return model


def act_after(m: Any, x: Tensor) -> Tensor:
    return F.relu(x + m.branch(x))


def in_place(m: Any, x: Tensor) -> Tensor:
    out = m.branch(x)
    out += x
    return m.relu(out)


def two(m: Any, x: Tensor) -> Tensor:
    return F.leaky_relu(m.one(x) + m.branch(x), 0.2)


def scaled(m: Any, x: Tensor) -> Tensor:
    return m.scale * m.branch(x) + x


def own_convolution(m: Any, x: Tensor) -> Tensor:
    return x + F.conv2d(x, m.weight, padding=1)


def frozen_norm() -> nn.Module:
    return Block(lambda m, x: F.relu(x + m.norm(m.conv(x))), conv=conv(), norm=FrozenBatchNorm2d(8))


CAN_GO: dict[str, tuple[Callable[[], nn.Module], list[str], str]] = {
    "functional activation": (lambda: Block(act_after, branch=branch()), ["0"], "Sequential(relu: ReLU())"),
    "in place": (
        lambda: Block(in_place, branch=branch(), relu=nn.ReLU(inplace=True)), ["0"], "Sequential(relu: ReLU())",
    ),
    "nothing left": (lambda: Block(lambda m, x: x + m.branch(x), branch=branch()), ["0"], "Identity()"),
    "written into the input": (
        lambda: Block(lambda m, x: x.add_(m.branch(x)), branch=branch()), ["0"], "Identity()",
    ),
    "either": (
        lambda: Block(two, one=conv(), branch=branch()), ["0"],
        "Sequential(one: Conv2d(), leaky_relu: LeakyReLU(negative_slope=0.2))",
    ),
    "scaled by a parameter": (
        lambda: Block(scaled, branch=branch(), scale=nn.Parameter(torch.rand(8, 1, 1))), ["0"], "Identity()",
    ),
    "parameters of the block itself": (
        lambda: Block(own_convolution, weight=nn.Parameter(torch.rand(8, 8, 3, 3))), ["0"], "Identity()",
    ),
    "empty shortcut": (
        lambda: Block(lambda m, x: m.branch(x) + m.short(x), branch=branch(), short=nn.Sequential()), ["0"],
        "Identity()",
    ),
    "dropout within and after": (
        lambda: Block(
            lambda m, x: m.after(x + m.within(m.branch(x))), branch=branch(), within=nn.Dropout(), after=nn.Dropout(0.1)
        ),
        ["0"], "Sequential(after: Dropout(p=0.1, inplace=False))",
    ),
    "a norm whose parameters are buffers": (frozen_norm, ["0"], "Sequential(relu: ReLU())"),
    "a module that adds": (
        lambda: Block(lambda m, x: m.add(x, m.branch(x)), branch=branch(), add=Block(lambda m, a, b: a + b)), ["0"],
        "Identity()",
    ),
}  # fmt: skip


def shown(module: nn.Module) -> str:
    """The module on one line, without the arguments of convolutions."""
    if isinstance(module, nn.Conv2d):
        return "Conv2d()"
    inside = ", ".join(f"{name}: {shown(child)}" for name, child in module.named_children())
    return f"Sequential({inside})" if inside else repr(module)


@pytest.mark.parametrize("name", CAN_GO)
def test_what_can_go(name: str) -> None:
    make, expected, left = CAN_GO[name]
    torch.manual_seed(0)
    model = scrambled(Net(make())).eval()
    graph = secateur.analyze(model, PICTURE[:1])
    assert names(graph) == [f"blocks.{each}" for each in expected]
    check(model, graph)
    small = secateur.shrink(model, Plan.keep(graph, {}, without=["blocks.0"]))
    assert shown(small.blocks[0]) == left
    again = torch.load(io.BytesIO(_pickled(copy.deepcopy(small))), weights_only=False)
    assert torch.equal(again(PICTURE), small(PICTURE))


def _pickled(model: nn.Module) -> bytes:
    buffer = io.BytesIO()
    for block in model.modules():
        vars(block).pop("function", None)
    torch.save(model, buffer)
    return buffer.getvalue()


def twice(m: Any, x: Tensor) -> Tensor:
    y = x + m.branch(x)
    return y + m.other(y)


def after(m: Any, x: Tensor) -> Tensor:
    y = x + m.branch(x)
    return y * y.mean()


def constant(m: Any, x: Tensor) -> Tensor:
    return x + m.branch(x).sigmoid()


def dropped(m: Any, x: Tensor) -> Tensor:
    return F.dropout(x + m.branch(x), 0.2, m.training)


def unclear(m: Any, x: Tensor) -> Tensor:
    y = m.drop(x)
    return x + m.branch(y)


def looks(m: Any, x: Tensor) -> Tensor:
    return x + m.branch(x) if x.sum() > -1e9 else x


def changes_input(m: Any, x: Tensor) -> Tensor:
    x += m.branch(x)
    return F.relu_(x)


def in_place_twice(m: Any, x: Tensor) -> Tensor:
    return F.relu_(m.first(x)) + x


class TiedBlocks(nn.Module):
    """Two blocks whose branches share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (Block(act_after, branch=branch()) for _ in range(2))
        self.two.branch[0].weight = self.one.branch[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


class Reads(nn.Module):
    """Code around a block that uses something of it."""

    def __init__(self, function: Callable[..., Any], block: nn.Module | None = None) -> None:
        super().__init__()
        self.block = block or Block(lambda m, x: x + m.branch(x), branch=branch())
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def hooked() -> nn.Module:
    block = Block(act_after, branch=branch())
    block.branch[0].register_forward_hook(lambda module, args, output: output * 2)
    return block


def kept_by_list(m: Any, x: Tensor) -> Tensor:
    y = m.block(x)
    return F.relu_(y) + x


MUST_STAY: dict[str, tuple[Callable[[], nn.Module], Kind]] = {
    "three addends": (lambda: Block(lambda m, x: x + m.one(x) + m.two(x), one=conv(), two=conv()), Kind.NO_CHAIN),
    "two sums": (lambda: Block(twice, branch=branch(), other=branch()), Kind.NO_CHAIN),
    "sum read twice": (lambda: Block(after, branch=branch()), Kind.NO_CHAIN),
    "not zero": (lambda: Block(constant, branch=branch()), Kind.NOT_NEUTRAL),
    "dropout as a function": (lambda: Block(dropped, branch=branch()), Kind.TRAINING),
    "dropout on one side, or on both": (lambda: Block(unclear, branch=branch(), drop=nn.Dropout()), Kind.NO_CHAIN),
    "values": (lambda: Block(looks, branch=branch()), Kind.VALUES),
    "hooks": (hooked, Kind.HOOKED),
    "an activation that changes the input": (lambda: Block(changes_input, branch=branch()), Kind.NO_CHAIN),
    "weights of another block": (TiedBlocks, Kind.USED_ELSEWHERE),
    "called twice": (lambda: Reads(lambda m, x: m.block(m.block(x))), Kind.USED_ELSEWHERE),
    "a layer that runs elsewhere too": (
        lambda: Reads(lambda m, x: m.block(x) + m.block.branch[3](m.block.branch[0](x))), Kind.USED_ELSEWHERE,
    ),
    "an attribute that is read": (lambda: Reads(lambda m, x: m.block(x) / len(m.block.branch)), Kind.NEEDED),
    "a result that is changed in place": (lambda: Reads(kept_by_list), Kind.WRITTEN_LATER),
    "unused parameters": (
        lambda: Block(lambda m, x: x + m.branch(x), branch=branch(), spare=conv()), Kind.UNUSED_PARAMETER,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUST_STAY)
def test_what_must_stay(name: str) -> None:
    make, kind = MUST_STAY[name]
    graph = secateur.analyze(Net(make()), PICTURE[:1])
    assert graph.branches == ()
    assert kind in {reason.kind for reason in graph.bound.values()}


def test_ignored_layers_keep_their_branch() -> None:
    graph = secateur.analyze(CifarResNet(14), PICTURE[:1], ignore="stage1.0.conv1", probe=False)
    assert graph.bound["stage1.0"].kind is Kind.IGNORED
    assert "stage1.0" not in names(graph)
    assert "stage1.1" in names(graph)
    assert secateur.analyze(CifarResNet(14), PICTURE[:1], ignore=lambda name, module: True, probe=False).branches == ()


def test_what_the_block_takes_is_changed_later() -> None:
    def later(m: Any, x: Tensor) -> Tensor:
        y = m.block(x)
        return y + F.relu_(x)

    graph = secateur.analyze(Net(Reads(later)), PICTURE[:1], probe=False)
    assert graph.bound["blocks.0.block"].kind is Kind.WRITTEN_LATER


def plain_norm() -> nn.Sequential:
    """Where its convolution is zero, it gives what the norm has as its mean."""
    norm = nn.BatchNorm2d(8, affine=False)
    norm.running_mean = torch.linspace(-1, 1, 8)
    return nn.Sequential(conv(), norm)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.act(x + m.branch(x)),
        lambda m, x: m.act(x + m.branch(x) * 2),
    ],
    ids=["of a module", "of the code"],
)
def test_what_a_branch_leaves_is_seen_where_another_hides_it(function: Callable[..., Any]) -> None:
    """Found by the fuzzer: without the second branch, no value of the first block is left."""
    hides = Block(lambda m, x: F.relu(x + m.branch(x)), branch=branch())
    graph = secateur.analyze(Net(Block(function, branch=plain_norm(), act=nn.LogSigmoid()), hides).eval(), PICTURE[:1])
    assert graph.bound["blocks.0"].kind is Kind.NOT_NEUTRAL
    assert names(graph) == ["blocks.1"]


def test_without_values_or_a_copy() -> None:
    with torch.device("meta"):
        graph = secateur.analyze(CifarResNet(14), torch.empty(1, 3, 32, 32))
    assert len(graph.branches) == 6


def test_keyword_arguments_are_seen_and_no_hook_stays() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = conv()

        def forward(self, x: Tensor, add: bool = True) -> Tensor:
            return x + self.conv(x) if add else x

    graph = secateur.analyze(Net(Reads(lambda m, x: m.block(x, add=True), Keywords())), PICTURE[:1], probe=False)
    assert graph.bound["blocks.0.block"].kind is Kind.SEVERAL_TENSORS
    assert not module_hooks._has_any_global_hook()


def test_the_models_own_sums_have_no_block() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.inner, self.head = conv(3), branch(), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head((x + self.inner(x)).mean((2, 3)))

    graph = secateur.analyze(Flat(), PICTURE[:1])
    assert graph.branches == ()
    assert graph.bound[""].kind is Kind.NO_BLOCK


def test_a_shortcut_that_others_read_too() -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.block = conv(3), Block(act_after, branch=branch())

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.stem(x)
            return x, self.block(x)

    model = scrambled(Features())
    graph = secateur.analyze(model, PICTURE[:1])
    assert names(graph) == ["block"]
    assert secateur.verify(model, Plan.keep(graph, {}, without=["block"]), PICTURE).agrees


def nested() -> Net:
    inner = Block(act_after, branch=branch())
    around = Block(lambda m, x: F.relu(m.short(x) + m.body(x)), short=inner, body=nn.Sequential(branch()))
    around.body.append(Block(act_after, branch=branch()))
    around.body.append(conv())
    return scrambled(Net(around)).eval()


def test_branches_within_branches() -> None:
    model = nested()
    graph = secateur.analyze(model, PICTURE[:1])
    inside, beside, outer = "blocks.0.body.1", "blocks.0.short", "blocks.0"
    assert {inside, beside, outer} <= set(names(graph))
    check(model, graph)
    for without in ([inside, outer], [beside, outer], [inside, beside, outer], [inside, beside]):
        plan = Plan.keep(graph, {}, without=without)
        assert secateur.verify(model, plan, PICTURE).agrees
        small = secateur.shrink(model, plan)
        assert plan.cost == secateur.analyze(small, PICTURE[:1], probe=False).cost()
        for first in without:
            since = Plan.keep(graph, {}, without=[first])
            steps = secateur.shrink_(secateur.shrink(model, since), plan, since=since)
            assert torch.equal(steps(PICTURE), small(PICTURE))
            assert repr(steps) == repr(small)


def test_a_graph_says_what_can_go() -> None:
    graph = secateur.analyze(CifarResNet(14), PICTURE[:1])
    line = next(line for line in str(graph).splitlines() if line.startswith("stage2.0 "))
    saved = graph.params - graph.cost(without=["stage2.0"]).params
    assert line.split()[-2:] == ["shortcut,", "relu"]
    assert f"{saved / 1e3:.2f} k" in line
    data = graph.to_dict()["branches"]
    assert [each["name"] for each in data] == names(graph)
    assert data[0]["addend"] == "stage1.0.bn2"
    branch = graph.branch("stage2.0")
    assert [graph.layers[row].name for row in branch.rows] == ["stage2.0.conv1", "stage2.0.conv2"]
    assert branch.modules == [f"stage2.0.{name}" for name in ("conv1", "bn1", "conv2", "bn2")]
