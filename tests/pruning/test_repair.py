"""Repair: the cut network is re-fitted to the whole one without training."""

import copy
from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import PICTURES
from layers import network as many_layers
from networks import KINDS, every_option, inputs
from oracle import randomize_
from torch import Tensor, nn

import secateur
from secateur import InvalidData, InvalidSetting, Plan
from secateur.channels.example import Example
from secateur.models.lookup import find_model
from secateur.pruning import repair as repairing
from secateur.pruning.least_squares import LeastSquares
from secateur.pruning.repair import gather, repair, repair_


def error(model: nn.Module, whole: nn.Module, data: Tensor) -> float:
    """Of the output, relative to that of the whole network."""
    with torch.no_grad():
        wanted = whole.eval()(data)
        return float((model.eval()(data) - wanted).norm() / wanted.norm())


class Redundant(nn.Module):
    """Half of the channels that `layer` reads are twice the other half."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...] = (8, 8), groups: int = 1) -> None:
        super().__init__()
        convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(shape)]
        self.first = convolution(3, 8, 3, padding=1)
        self.layer = layer
        self.shape = shape
        with torch.no_grad():
            # In every group the second half of the channels.
            order = torch.arange(8).reshape(groups, 2, -1)
            self.first.weight[order[:, 1].flatten()] = 2 * self.first.weight[order[:, 0].flatten()]
            self.first.bias[order[:, 1].flatten()] = 2 * self.first.bias[order[:, 0].flatten()]
        self.kept = order[:, 0].flatten().tolist()

    def forward(self, data: Tensor) -> Tensor:
        return self.layer(self.first(data).relu()).flatten(1)


LAYERS: dict[str, Any] = {
    "convolution": (nn.Conv2d(8, 5, 3), {}),
    "strided": (nn.Conv2d(8, 5, 1, stride=2), {}),
    "padded": (nn.Conv2d(8, 5, 3, padding=1), {}),
    "line": (nn.Conv1d(8, 5, 3), {"shape": (16,)}),
    "volume": (nn.Conv3d(8, 5, 3), {"shape": (4, 4, 4)}),
    "transposed": (nn.ConvTranspose2d(8, 5, 3, stride=2), {}),
    "grouped": (nn.Conv2d(8, 6, 3, groups=2), {"groups": 2}),
    "linear behind a flatten": (nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 5)), {}),
    "linear behind pooling": (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)), {}),
    "squeeze and excite": (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 5, 1)), {}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_combinations_of_what_is_left_are_made_up_for(name: str) -> None:
    layer, options = LAYERS[name]
    model = Redundant(layer, **options).double().eval()
    data = torch.randn(64, 3, *model.shape, dtype=torch.float64)
    graph = secateur.analyze(model, data[:1])
    # A channel of a grouped convolution is one position of every group.
    indices = [0, 1] if graph.group("first").size == 4 else model.kept
    plan = Plan.keep(graph, {"first": indices})
    assert error(secateur.shrink(model, plan), model, data) > 0.05
    assert error(repair(model, plan, data), model, data) < 1e-3


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_the_fit_is_never_worse_than_the_plain_cut(seed: int) -> None:
    """On the images of the fit; computed from the data instead of the moments."""
    generator = torch.Generator().manual_seed(seed)
    inputs, outputs = (int(torch.randint(1, 7, (), generator=generator)) for _ in range(2))
    fitted, held = (int(torch.randint(1, 40, (), generator=generator)) for _ in range(2))
    prior, truth = torch.randn(2, 3, outputs, inputs, generator=generator, dtype=torch.float64)
    data = torch.randn(3, fitted + held, inputs, generator=generator, dtype=torch.float64)
    noise = torch.randn(3, fitted + held, outputs, generator=generator, dtype=torch.float64)
    wanted = data @ truth.mT + noise
    fit = LeastSquares(prior)
    fit.add(data[:, :fitted], wanted[:, :fitted], held=False)
    fit.add(data[:, fitted:], wanted[:, fitted:], held=True)
    found = fit.solve()
    for group in range(3):
        plain = (wanted[group] - data[group] @ prior[group].T).norm()
        assert (wanted[group] - data[group] @ found[group].T).norm() <= plain * (1 + 1e-9)


def test_what_lost_nothing_and_did_not_drift_keeps_its_weight() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 1)).eval()
    plan = Plan.keep(secateur.analyze(model, torch.randn(1, 3, 8, 8)), {"2": [0, 1, 2, 3]})
    repaired = repair(model, plan, torch.randn(16, 3, 8, 8))
    assert torch.equal(repaired[0].weight, model[0].weight)
    assert torch.equal(repaired[2].weight, model[2].weight[:4])
    assert not torch.equal(repaired[4].weight, model[4].weight[:, :4])


class Shared(nn.Module):
    """One convolution, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, data: Tensor) -> Tensor:
        x = self.twice(self.first(data).relu()).relu()
        return self.last(self.twice(x).relu().mean((2, 3)))


def test_a_weight_with_several_uses_is_fitted_to_all() -> None:
    model = Shared().double().eval()
    data = torch.randn(64, 3, 8, 8, dtype=torch.float64)
    plan = Plan.random(secateur.analyze(model, data[:1]), 0.4, seed=0)
    assert error(repair(model, plan, data), model, data) < 0.5 * error(secateur.shrink(model, plan), model, data)


@pytest.mark.parametrize(("name", "options"), [("resnet14", {}), ("torchvision:mobilenet_v2", {"width_mult": 0.25})])
def test_real_networks_get_nearer_to_the_whole_one(name: str, options: dict[str, float]) -> None:
    torch.manual_seed(0)
    model = find_model(name, **options).eval()
    data, other = torch.randn(48, 3, 32, 32), torch.randn(16, 3, 32, 32)
    plan = Plan.random(secateur.analyze(model, data[:1], probe=False), 0.2, seed=0)
    plain, repaired = secateur.shrink(model, plan), repair(model, plan, data)
    assert error(repaired, model, other) < 0.7 * error(plain, model, other)
    assert {n: t.shape for n, t in repaired.state_dict().items()} == {n: t.shape for n, t in plain.state_dict().items()}


@pytest.mark.slow  # the fuzzer's networks are repaired every day
@pytest.mark.parametrize("kind", KINDS)
def test_random_networks_stay_finite_and_the_same_each_time(kind: str) -> None:
    for option, network in every_option(kind):
        if option % 8:
            continue
        model, data = randomize_(network).eval(), inputs(option)
        graph = secateur.analyze(model, data, probe=False)
        if not graph.groups:
            continue
        plan = Plan.random(graph, 0.4, seed=option)
        found = [repair(model, plan, [data]) for _ in range(2)]
        for one, other in zip(*(each.state_dict().values() for each in found), strict=True):
            assert torch.equal(one, other)
            assert not one.is_floating_point() or bool(one.isfinite().all())


@pytest.mark.parametrize("images", [1, 2, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dead_constant_and_duplicate_channels(images: int, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 4, 3)).eval()
    with torch.no_grad():
        model[0].weight[:4] = 0
        model[0].bias[:2] = -1  # dead
        model[0].bias[2:4] = 1  # constant
        model[0].weight[5] = model[0].weight[4]
        model[0].bias[5] = model[0].bias[4]
    model = model.to(dtype)
    data = torch.randn(images, 3, 6, 6).to(dtype)
    plan = Plan.keep(secateur.analyze(model, data[:1]), {"0": [0, 1, 2, 4, 6, 7]})
    repaired = repair(model, plan, data)
    assert all(bool(tensor.isfinite().all()) for tensor in repaired.state_dict().values())
    assert next(repaired.parameters()).dtype == dtype


def test_batches_of_a_loader_and_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1)).train()
    data = torch.randn(32, 3, 8, 8)
    plan = Plan.random(secateur.analyze(model, data[:1]), 0.5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data, torch.zeros(32)), batch_size=10)
    found = [repair(model, plan, given) for given in (loader, data, [data[:20], data[20:]], [{"image": data}])]
    assert model.training
    for other in found[1:]:
        assert error(other, found[0], data) < 1e-4
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    few = repair(model, plan, loader, images=10)
    assert all(map(torch.equal, few.state_dict().values(), repair(model, plan, data[:10]).state_dict().values()))
    for nothing in ([], [data[:0]]):
        with pytest.raises(InvalidData):
            repair(model, plan, nothing)


class Remembers(nn.Module):
    """Its forward pass writes to a buffer and an attribute, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)
        self.seen, self.calls = nn.Buffer(torch.zeros(8)), 0

    def forward(self, data: Tensor) -> Tensor:
        data = self.first(data)
        self.seen.mul_(0.9).add_(0.1 * data.mean((0, 2, 3)))
        self.calls += 1
        return self.last((data - self.seen.view(-1, 1, 1)).relu())


def test_what_a_forward_pass_writes_is_not_kept() -> None:
    model, data = Remembers(), torch.randn(16, 3, 6, 6)
    repaired = repair(model, Plan.random(secateur.analyze(model, data[:2]), 0.5), data)
    for each in (model, repaired):
        assert not each.seen.any()
        assert not each.calls
    assert not torch.equal(repaired.last.weight, model.last.weight[:, :4])


def test_code_that_squeezes_the_axis_of_a_single_image() -> None:
    class Squeezes(nn.Sequential):
        def forward(self, data: Tensor) -> Tensor:
            features = self[1](self[0](data).relu().mean((2, 3), keepdim=True)).squeeze()
            return features.softmax(1)

    model, data = Squeezes(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)), torch.randn(16, 3, 6, 6)
    repaired = repair(model, Plan.random(secateur.analyze(model, data[:2]), 0.5), data)
    assert repaired(data).shape == (16, 4)


def test_layers_within_vmap_keep_their_plain_cut() -> None:
    class Mapped(nn.Sequential):
        def forward(self, data: Tensor) -> Tensor:
            return self[2](torch.func.vmap(self[1])(self[0](data).relu()[:, None])[:, 0].relu())

    torch.manual_seed(0)
    model = Mapped(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 2, 1))
    data, lines = torch.randn(16, 3, 6, 6), list[str]()
    plan = Plan.random(secateur.analyze(model, data[:2]), 0.5)
    repaired = repair(model, plan, data, note=lines.append)
    assert [line for line in lines if line.startswith("1.weight keeps its plain cut")]
    assert torch.equal(repaired[1].weight, secateur.shrink(model, plan)[1].weight)
    assert error(repaired, model, data) < error(secateur.shrink(model, plan), model, data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e20, 1e38, torch.inf, torch.nan])
@pytest.mark.parametrize("images", [1, 16])
def test_images_of_any_size_leave_finite_weights(factor: float, images: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1)).to(dtype)
    data = torch.randn(images, 3, 6, 6)
    plan = Plan.random(secateur.analyze(model, data[:1].to(dtype)), 0.5)
    for batch in (factor * data, factor * data[:1].expand(images, -1, -1, -1)):
        repaired = repair(model, plan, batch.to(dtype))
        assert all(bool(tensor.isfinite().all()) for tensor in repaired.parameters())


def test_inputs_that_are_not_finite_are_said() -> None:
    model, lines = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1)), list[str]()
    plan = Plan.random(secateur.analyze(model, torch.randn(2, 3, 6, 6)), 0.5)
    repair(model, plan, torch.full((8, 3, 6, 6), torch.nan), note=lines.append)
    assert "2.weight keeps its plain cut: its inputs are not finite" in lines


def test_what_is_not_fitted_is_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3), nn.Parameter(torch.randn(4, 8))

        def forward(self, data: Tensor) -> Tensor:
            return self.first(data).relu().mean((2, 3)) @ self.last.T

    model, data, lines = Scaled().eval(), torch.randn(8, 3, 8, 8), list[str]()
    plan = Plan.random(secateur.analyze(model, data[:1]), 0.5)
    repair(model, plan, data, note=lines.append)
    assert any(line.startswith("last ") for line in lines)


def test_an_error_of_the_network_reaches_the_caller() -> None:
    class Picky(nn.Sequential):
        def forward(self, data: Tensor) -> Tensor:
            if data.shape[0] > 8:
                raise RuntimeError("too many images")
            return super().forward(data)

    model = Picky(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval()
    plan = Plan.random(secateur.analyze(model, torch.randn(1, 3, 8, 8)), 0.5)
    with pytest.raises(RuntimeError, match="too many images"):
        repair(model, plan, torch.randn(16, 3, 8, 8))


def written_back(model: nn.Module, plan: Plan, cut: nn.Module) -> nn.Module:
    """A copy of the whole network with the numbers of the cut one where its channels are."""
    model = copy.deepcopy(model)
    for (name, whole), own in zip(model.state_dict().items(), cut.state_dict().values(), strict=True):
        sizes = [plan.remaining.get((name, axis), torch.arange(size)) for axis, size in enumerate(whole.shape)]
        whole[torch.meshgrid(*sizes, indexing="ij") if sizes else ()] = own
    return model


@pytest.mark.parametrize(
    ("make", "example"),
    [(many_layers, PICTURES), (lambda: find_model("resnet14"), torch.randn(2, 3, 32, 32))],
    ids=["layers", "resnet14"],
)
def test_repaired_weights_in_the_whole_network_stand_a_cut(make: Callable[[], nn.Module], example: Tensor) -> None:
    torch.manual_seed(0)
    model = make().eval()
    plan = Plan.random(secateur.analyze(model, example[:1], probe=False), 0.4, seed=1)
    repaired = repair(model, plan, torch.randn(24, *example.shape[1:]))
    whole = written_back(model, plan, repaired)
    assert secateur.verify(whole, plan, example).agrees
    again = secateur.shrink(whole, plan)
    assert list(again.state_dict()) == list(repaired.state_dict())
    assert all(map(torch.equal, again.state_dict().values(), repaired.state_dict().values()))
    plain = secateur.shrink(model, plan).state_dict()
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in repaired.state_dict().items())


class Several(nn.Module):
    """Two inputs, joined, with squeeze-and-excite behind; two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(1, 6, 3, padding=1)
        self.joined, self.norm = nn.Conv2d(14, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.squeeze, self.excite = nn.Conv2d(12, 6, 1), nn.Conv2d(6, 12, 1)
        self.scores, self.picture = nn.Linear(12, 5), nn.ConvTranspose2d(12, 3, 2, stride=2)

    def forward(self, image: Tensor, depth: Tensor) -> dict[str, Tensor]:
        x = torch.cat([self.left(image).relu(), self.right(depth).relu()], 1)
        x = self.norm(self.joined(x)).relu()
        x = x * self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return {"scores": self.scores(x.mean((2, 3))), "picture": self.picture(x)}


def test_several_inputs_and_outputs_in_batches_of_different_sizes() -> None:
    torch.manual_seed(0)
    model = Several().double().eval()
    image, depth = (torch.randn(48, channels, 8, 8, dtype=torch.float64) for channels in (3, 1))
    plan = Plan.random(secateur.analyze(model, (image[:1], depth[:1])), 0.3, seed=0)
    assert len(plan.groups) == 4
    plain = secateur.shrink(model, plan)
    by_name = Plan(secateur.analyze(model, {"image": image[:1], "depth": depth[:1]}), plan.kept)
    sizes = [20, 1, 3, 24]
    parts = list(zip(image.split(sizes), depth.split(sizes), strict=True))
    labelled = [(*part, torch.zeros(len(part[0]))) for part in parts]
    named = [{"depth": part[1], "name": "x", "image": part[0]} for part in parts]
    first, *others = (repair(model, plan, parts), repair(model, plan, labelled), repair(model, by_name, named))
    for other in others:
        assert all(map(torch.equal, first.state_dict().values(), other.state_dict().values()))
    at_once = repair(model, plan, [(image, depth)]).state_dict()
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(tensor, at_once[name], rtol=1e-6, atol=1e-8)
    fresh = [torch.randn(16, channels, 8, 8, dtype=torch.float64) for channels in (3, 1)]
    for name in ("scores", "picture"):
        with torch.no_grad():
            wanted, cut, repaired = (each(*fresh)[name] for each in (model, plain, first))
        assert float((repaired - wanted).norm()) < 0.7 * float((cut - wanted).norm())


def chain(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *layers).double().eval()


def test_wide_layers_are_fitted_by_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairing, "WIDEST", 16)
    lines: list[str] = []
    model, data = chain(nn.Conv2d(8, 5, 3)), torch.randn(64, 3, 8, 8, dtype=torch.float64)
    plan = Plan.random(secateur.analyze(model, data[:1]), 0.4, seed=0)
    repaired = repair(model, plan, data, note=lines.append)
    assert error(repaired, model, data) < 0.9 * error(secateur.shrink(model, plan), model, data)
    assert not lines
    # One combination of channels for all taps of the kernel.
    wide, narrow = (each[2].weight.detach().movedim(1, -1).flatten(0, -2) for each in (model, repaired))
    torch.testing.assert_close(wide @ torch.linalg.lstsq(wide, narrow).solution, narrow)


WIDE = {
    "grouped": nn.Conv2d(8, 6, 3, groups=2),
    "transposed": nn.ConvTranspose2d(8, 5, 3),
    "linear": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    "one tap": nn.Conv2d(8, 5, 1),
}


@pytest.mark.parametrize("name", WIDE)
def test_wide_layers_that_are_not_fitted_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairing, "WIDEST", 4)  # five are left
    lines: list[str] = []
    model, data = chain(WIDE[name]), torch.randn(16, 3, 8, 8, dtype=torch.float64)
    plan = Plan.random(secateur.analyze(model, data[:1]), 0.4, seed=0)
    repaired = repair(model, plan, data, note=lines.append)
    assert all(map(torch.equal, repaired.state_dict().values(), secateur.shrink(model, plan).state_dict().values()))
    assert [line.split()[0] in ("2.weight", "2.2.weight") for line in lines] == [True]


def test_the_moments_of_several_processes_are_averaged() -> None:
    """Two threads stand for them; they must fit the images of both, and end with the same weights."""
    model = chain(nn.Conv2d(8, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 4))
    data = torch.randn(32, 3, 8, 8, dtype=torch.float64)
    plan = Plan.random(secateur.analyze(model, data[:1]), 0.4, seed=0)
    barrier, given = Barrier(2, timeout=30), [torch.zeros(0), torch.zeros(0)]
    cuts = [secateur.shrink(model, plan) for _ in range(2)]

    def process(rank: int) -> None:
        def average(tensor: Tensor) -> Tensor:
            given[rank] = tensor
            barrier.wait()
            mean = (given[0] + given[1]) / 2
            barrier.wait()
            return mean

        repair_(cuts[rank], copy.deepcopy(model), plan, [Example((data[rank * 16 :][:16],), {})], average=average)

    threads = [Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = repair(model, plan, data).state_dict()
    half = repair(model, plan, data[:16]).state_dict()
    for name, tensor in cuts[0].state_dict().items():
        assert torch.equal(tensor, cuts[1].state_dict()[name])
        torch.testing.assert_close(tensor, alone[name], rtol=1e-6, atol=1e-8)
    assert not torch.allclose(cuts[0][2].weight, half["2.weight"], rtol=1e-3)


@pytest.mark.parametrize("last", [nn.Conv2d(12, 8, 3, groups=2), nn.ConvTranspose2d(12, 8, 2, stride=2, groups=2)])
def test_a_network_that_was_cut_before_is_repaired_as_one_that_was_made_so(last: nn.Module) -> None:
    torch.manual_seed(0)
    model = chain(nn.Conv2d(8, 12, 3), nn.ReLU(), copy.deepcopy(last), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    data = torch.randn(24, 3, 8, 8, dtype=torch.float64)
    model(data[:1])
    graph = secateur.analyze(model.double(), data[:1])
    before = Plan.random(graph, 0.3, seed=0)
    whole = secateur.shrink(model, before)
    own = secateur.analyze(whole, data[:1])
    wanted = Plan.random(own, 0.4, seed=1)
    kept = before.kept.clone()
    kept[before.kept] = wanted.kept
    plan = Plan(graph, kept)
    cut = secateur.shrink(model, plan)
    fitted = repair_(cut, whole, plan, [Example((data,), {})], since=before)
    assert len(fitted) == 3
    for one, other in zip(repair(whole, wanted, data).state_dict().values(), cut.state_dict().values(), strict=True):
        assert torch.equal(one, other)


class Tied(nn.Module):
    """One weight for an embedding and for the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(20, 12), nn.Linear(12, 12)
        self.last = nn.Linear(12, 20, bias=False)
        self.last.weight = self.words.weight

    def forward(self, numbers: Tensor) -> Tensor:
        return self.last(self.first(self.words(numbers)).relu())


class Autoencoder(nn.Module):
    """One weight for a convolution and its transposed counterpart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Conv2d(3, 12, 3), nn.Parameter(torch.randn(16, 12, 3, 3) / 10)

    def forward(self, data: Tensor) -> Tensor:
        inner = F.conv2d(self.first(data).relu(), self.weight).relu()
        return F.conv_transpose2d(inner, self.weight)


@pytest.mark.parametrize(
    ("model", "data", "name"),
    [(Tied(), torch.randint(20, (64, 5)), "words.weight"), (Autoencoder(), torch.randn(16, 3, 8, 8), "weight")],
    ids=["an embedding and a linear layer", "a convolution and its transposed counterpart"],
)
def test_weights_with_uses_of_other_kinds_keep_their_plain_cut(model: nn.Module, data: Tensor, name: str) -> None:
    notes: list[str] = []
    plan = Plan.random(secateur.analyze(model.eval(), data[:1]), 0.3)
    repaired, plain = repair(model, plan, data, note=notes.append), secateur.shrink(model, plan)
    assert torch.equal(repaired.get_parameter(name), plain.get_parameter(name))
    assert [line for line in notes if line.startswith(f"{name} keeps its plain cut")]


class Remembering(nn.Module):
    """Keeps a tensor on itself from one layer to another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, data: Tensor) -> Tensor:
        self.skip = self.first(data).relu()
        return self.last(self.second(self.skip).relu() + self.skip)


def test_batches_do_not_mix_in_what_a_network_keeps() -> None:
    torch.manual_seed(0)
    model, data = Remembering().double().eval(), torch.randn(200, 3, 8, 8, dtype=torch.float64)
    plan = Plan.random(secateur.analyze(model, data[:1]), 0.4)
    once, several = repair(model, plan, data), repair(model, plan, data.split(80))
    assert error(several, once, data) < 1e-6


def test_small_batches_are_joined_where_they_fit() -> None:
    example = Example((torch.zeros(1, 3, 8, 8),), {})
    one, other = torch.randn(40, 3, 8, 8), torch.randn(5, 3, 9, 9)
    found = gather([*one.split(1), other, other], example, 1000)
    assert [call.size for call in found] == [40, 10]
    assert torch.equal(found[0].args[0], one)
    assert [call.size for call in gather(one.split(1), example, 7)] == [7]
    with pytest.raises(InvalidSetting):
        gather([one], example, 0)


def test_batches_of_other_forms() -> None:
    x, y, labels = torch.randn(4, 3), torch.randn(4, 2), torch.zeros(4)
    pair, named, mapping = Example((x, y), {}), Example((), {"x": x}), Example(({"x": x},), {})
    cases: list[tuple[Example, Any]] = [
        *((pair, each) for each in ((x, y), (x, y, labels), ((x, y), labels), [[x, y], labels], {"a": x, "b": y})),
        *((named, each) for each in ({"x": x, "label": labels}, ({"x": x}, labels))),
        *((mapping, each) for each in ({"x": x}, ({"x": x}, labels))),
    ]
    for example, batch in cases:
        (found,) = gather([batch], example, 4)
        assert (len(found.args), set(found.kwargs)) == (len(example.args), set(example.kwargs))
        assert all(map(torch.equal, found.tensors, example.tensors))
