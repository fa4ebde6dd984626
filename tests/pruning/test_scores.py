"""Every score, computed a second way by hand."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scored import GATES, NAMES, NETWORKS, Batch, Chain, Dense, Residual, add_up, batches, make, pruner_of, run
from torch import Tensor, nn

from secateur import Budget, InvalidModel, InvalidSetting, Limits, Plan, Pruner, Score, analyze, shrink
from secateur.channels.verify import mask_
from secateur.pruning import scores
from secateur.pruning.gates import Gates
from secateur.pruning.output_scores import APoZ
from secateur.pruning.scores import SCORES, Oracle, Random, register


class Factors:
    """A copy of a network whose activations are multiplied by vectors of ones."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.phi = copy.deepcopy(model), {}
        for name in sorted({name for places in GATES[type(model)].values() for name, _ in places}):
            module = self.model.get_submodule(name)
            width = module.num_features if isinstance(module, nn.BatchNorm2d) else module.out_channels
            phi = self.phi[name] = torch.ones(width, dtype=torch.float64, requires_grad=True)
            module.register_forward_hook(lambda m, args, out, phi=phi: out * phi.view(1, -1, 1, 1).to(out))

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def products(self, data: list[Batch]) -> dict[str, Tensor]:
        """dL/dphi * phi of each batch, as rows."""
        each = [torch.autograd.grad(self.loss(batch), list(self.phi.values())) for batch in data]
        pairs = zip(self.phi.items(), zip(*each, strict=True), strict=True)
        return {name: torch.stack([g * phi for g in gs]).detach() for (name, phi), gs in pairs}

    def taylor(self, data: list[Batch]) -> dict[str, Tensor]:
        return {name: rows.abs().sum(0) for name, rows in self.products(data).items()}

    @torch.no_grad()
    def differences(self, data: list[Batch], step: float = 1e-6) -> dict[str, Tensor]:
        def slope(phi: Tensor, index: int, batch: Batch) -> Tensor:
            losses = []
            for value in (1 + step, 1 - step):
                phi[index] = value
                losses.append(self.loss(batch))
            phi[index] = 1
            return (losses[0] - losses[1]) / (2 * step)

        return {
            name: torch.stack([sum(slope(phi, i, batch).abs() for batch in data) for i in range(phi.numel())])
            for name, phi in self.phi.items()
        }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", NETWORKS)
def test_taylor_is_the_sum_of_products_over_batches_and_gates(kind: type[nn.Module], training: bool) -> None:
    model = make(kind).train(training)
    by_hand = Factors(model)
    pruner = pruner_of(model)
    found = run(pruner, batches())
    torch.testing.assert_close(found, add_up(model, pruner.graph, by_hand.taylor(batches())))
    expected = add_up(model, pruner.graph, by_hand.differences(batches()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", NETWORKS)
def test_fisher_is_the_sum_of_their_squares(kind: type[nn.Module]) -> None:
    model = make(kind)
    squares = {name: (rows**2).sum(0) for name, rows in Factors(model).products(batches()).items()}
    pruner = pruner_of(model, score="fisher")
    torch.testing.assert_close(run(pruner, batches()), add_up(model, pruner.graph, squares))


def test_taylor_does_not_depend_on_the_scale_of_a_filters_gate() -> None:
    norm, mean = (run(pruner_of(make(Chain), filter_scale=s), batches()) for s in ("norm", "mean"))
    torch.testing.assert_close(norm, mean)


def test_scores_are_single_precision_under_autocast() -> None:
    data = batches(dtype=torch.float32)
    whole = run(pruner_of(make(Residual, torch.float32)), data)
    pruner = pruner_of(make(Residual, torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = run(pruner, data)
    assert pruner.score.total.dtype == torch.float32
    assert 0 < (mixed - whole).norm() < 0.1 * whole.norm()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_batch_with_a_gradient_that_is_not_finite_is_left_out_and_counted(bad: float) -> None:
    pruner = pruner_of(make(Chain))
    expected = run(pruner, batches())
    pruner.model.zero_grad()
    (F.cross_entropy(pruner.model(batches()[0][0]), batches()[0][1]) * bad).backward()
    pruner.observe()
    assert (pruner.skipped, pruner.observed) == (1, 4)
    assert torch.equal(pruner.score.end(), expected)
    pruner.prune(fraction=0.2)
    assert (pruner.skipped, pruner.observed) == (0, 0)


def test_accumulated_gradients_are_one_big_batch() -> None:
    """In evaluation mode, where no image depends on another."""
    images, labels = (torch.cat(parts) for parts in zip(*batches(2), strict=True))
    whole = run(pruner_of(make(Residual).eval()), [(images, labels)])
    pruner = pruner_of(make(Residual).eval())
    for part, answers in batches(2):
        (F.cross_entropy(pruner.model(part), answers) / 2).backward()
    pruner.observe()
    torch.testing.assert_close(pruner.score.end(), whole)


def test_scaled_gradients_count_as_themselves_after_unscaling() -> None:
    def train(scaler: torch.amp.GradScaler) -> Tensor:
        data = batches(dtype=torch.float32)
        pruner = pruner_of(make(Dense, torch.float32))
        optimizer = torch.optim.SGD(pruner.model.parameters(), lr=0.1)
        for images, labels in data:
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(pruner.model(images), labels)).backward()
            scaler.unscale_(optimizer)
            pruner.observe()
            scaler.step(optimizer)
            scaler.update()
        return pruner.score.end()

    scaled, plain = (train(torch.amp.GradScaler("cpu", enabled=enabled)) for enabled in (True, False))
    torch.testing.assert_close(scaled, plain, rtol=1e-4, atol=1e-6)


def test_slim_is_the_size_of_the_factor() -> None:
    model = make(Dense)
    sizes = {name: m.weight.detach().abs() if m.affine else torch.ones(12) for name, m in norms(model)}
    pruner = pruner_of(model, score="slim")
    torch.testing.assert_close(pruner.score.end(), add_up(model, pruner.graph, sizes))


def norms(model: nn.Module) -> Iterator[tuple[str, nn.BatchNorm2d]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d))


@pytest.mark.parametrize("kind", NETWORKS)
def test_pcnn_is_the_mean_product_with_every_layer_scaled_to_one(kind: type[nn.Module]) -> None:
    model = make(kind)
    watched, images = copy.deepcopy(model), 0
    seen, sums = {}, {}
    for name in Factors(model).phi:
        watched.get_submodule(name).register_forward_hook(lambda m, args, out, name=name: seen.update({name: out}))
    for batch, labels in batches():
        loss = F.cross_entropy(watched(batch), labels)
        images += len(batch)
        for name, gradient in zip(seen, torch.autograd.grad(loss, list(seen.values())), strict=True):
            sums[name] = sums.get(name, 0) + (seen[name] * gradient).mean((2, 3)).abs().sum(0).detach()
    pruner = pruner_of(model, score="pcnn")
    expected = {name: (total / images) / (total / images).square().sum().sqrt() for name, total in sums.items()}
    torch.testing.assert_close(run(pruner, batches()), add_up(model, pruner.graph, expected))


def test_apoz_is_the_share_of_places_that_pass_the_relu() -> None:
    model = make(Residual)
    places = {name: [] for name, _ in norms(model)}
    watched = copy.deepcopy(model)
    for name, module in norms(watched):
        module.register_forward_hook(lambda m, args, out, name=name: places[name].append(F.relu(out) != 0))
    for images, _ in batches():
        watched(images)
    pruner = pruner_of(model, score="apoz")
    shares = {name: torch.cat(parts).double().mean((0, 2, 3)) for name, parts in places.items()}
    torch.testing.assert_close(run(pruner, batches()), add_up(model, pruner.graph, shares))


def geometric(weight: Tensor) -> list[float]:
    return [sum(float((a - b).square().sum().sqrt()) for b in weight) for a in weight]


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("l1", lambda w: [float(row.abs().sum()) for row in w]),
        ("l2", lambda w: [float(row.square().sum().sqrt()) for row in w]),
        ("fpgm", geometric),
    ],
)
@pytest.mark.parametrize(
    ("kind", "layers"),
    [(Chain, {"stem": ["stem"], "bare": ["bare"]}), (Residual, {"stem": ["stem", "outer"], "inner": ["inner"]})],
)
def test_scores_of_filters_see_the_original_weights(
    name: str, formula: Callable[[Tensor], list[float]], kind: type[nn.Module], layers: dict[str, list[str]]
) -> None:
    model = make(kind)
    paths = [path for several in layers.values() for path in several]
    values = {path: torch.tensor(formula(getattr(model, path).weight.detach())) for path in paths}
    pruner = pruner_of(model, score=name)
    expected = torch.cat([sum(values[path] for path in layers[g.name]) for g in pruner.graph.groups])
    torch.testing.assert_close(pruner.score.end(), expected.double(), rtol=1e-5, atol=1e-5)


def test_chance_is_the_same_for_the_same_seed() -> None:
    def draw(seed: int) -> Tensor:
        return pruner_of(make(Chain), score=Random(seed)).score.end()

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


@torch.no_grad()
def whole_loss(model: nn.Module) -> Tensor:
    return sum(F.cross_entropy(model(images), labels) for images, labels in batches())


@pytest.mark.parametrize("kind", NETWORKS)
def test_the_oracle_is_the_change_when_the_channel_is_zeroed_in_a_plain_copy(kind: type[nn.Module]) -> None:
    model = make(kind).eval()
    plain = copy.deepcopy(model)
    pruner = pruner_of(model, score=Oracle(whole_loss), limits=Limits(min_ratio=0.5))

    def change(channel: int, kept: Tensor) -> float:
        masked = mask_(copy.deepcopy(plain), Plan(pruner.graph, kept))
        less = kept.clone()
        less[channel] = False
        return float((whole_loss(mask_(copy.deepcopy(plain), Plan(pruner.graph, less))) - whole_loss(masked)).abs())

    for _ in range(2):
        kept = pruner.kept.nonzero()[:, 0].tolist()
        expected = torch.tensor([change(channel, pruner.kept) for channel in kept], dtype=torch.float64)
        torch.testing.assert_close(pruner.score.end()[pruner.kept], expected)
        pruner.prune(fraction=0.3)


CASES = [
    (name, kind, cut)
    for name in NAMES
    for kind in NETWORKS
    for cut in (True, False)
    if (name, kind) != ("slim", Chain)  # phi of a filter is the norm it had when its gate was put in
]


@pytest.mark.parametrize(("name", "kind", "cut"), CASES)
def test_after_a_removal_scores_are_those_of_the_smaller_network(name: str, kind: type[nn.Module], cut: bool) -> None:
    model = make(kind)
    plain = copy.deepcopy(model)
    pruner = pruner_of(model, score=name, limits=Limits(min_ratio=0.5))
    run(pruner, batches(1))
    assert pruner.prune(fraction=0.4, cut=cut).removed
    smaller = shrink(plain, pruner.plan)
    fresh = Pruner(smaller, graph=analyze(smaller, batches()[0][0], probe=False), score=name)
    torch.testing.assert_close(run(pruner, batches())[pruner.kept], run(fresh, batches()))


@pytest.mark.parametrize("name", SCORES)
def test_no_hook_stays_behind(name: str) -> None:
    def hooks(model: nn.Module) -> int:
        return sum(len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules())

    pruner = pruner_of(make(Residual), score=name)
    run(pruner, batches())
    assert hooks(pruner.model) == 0
    pruner.prune(fraction=0.2)
    assert hooks(pruner.finish()) == 0


class LastFirst(Score):
    """The last channel of the graph is worth least."""

    seen = 0

    def observe(self) -> None:
        self.seen += 1

    def end(self) -> Tensor:
        return -torch.arange(self.gates.graph.num_channels).double()


def test_a_score_of_ones_own() -> None:
    score = LastFirst()
    pruner = pruner_of(make(Chain), score=score)
    run(pruner, batches())
    pruner.prune(budget=Budget(filters=(pruner.filters - 2.5) / pruner.filters))
    assert pruner.kept.tolist() == [True] * 8 + [False] * 3
    assert (score.seen, pruner.skipped) == (3, 0)


def test_a_score_that_remembers_more_than_its_state_cannot_go_on_in_a_tick() -> None:
    class Peaks(APoZ):
        def begin(self, gates: Gates) -> None:
            super().begin(gates)
            self.peaks = [torch.zeros_like(phi) for phi in gates.phis]

    class Kept(Peaks):
        def state(self) -> dict[str, Tensor]:
            return super().state() | {f"peak{number}": peak for number, peak in enumerate(self.peaks)}

    assert APoZ().resumable
    assert not Peaks().resumable
    assert Kept().resumable


def test_names_of_scores() -> None:
    model = make(Chain)
    with pytest.raises(InvalidSetting) as caught:
        pruner_of(model, score="tailor")
    assert "taylor" in str(caught.value.remedy)
    wrong: Any = LastFirst  # the class instead of an instance
    with pytest.raises(InvalidSetting):
        pruner_of(model, score=wrong)
    assert type(model.norm) is nn.BatchNorm2d
    with pytest.raises(ValueError, match="slim"):
        register("slim")(LastFirst)


def test_a_score_that_is_defined_anew_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "SCORES", {})
    for _ in range(2):

        @register("mine")
        class Mine(Score):
            pass

        assert type(scores.make_score("mine")) is Mine


@pytest.mark.parametrize("name", ["pcnn", "apoz"])
def test_layers_without_space_are_watched_too(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    vectors = torch.randn(4, 3)
    pruner = Pruner(model, vectors, score=name)
    assert run(pruner, [(vectors, torch.tensor([0, 1, 2, 0]))]).shape == (11,)


def test_pcnn_is_the_same_when_the_sum_is_made_in_place() -> None:
    class InPlace(Residual):
        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.norm0(self.stem(x)))
            y = self.norm2(self.outer(F.relu(self.norm1(self.inner(x)))))
            y += x
            return self.head(F.relu(y).mean((2, 3)))

    in_place, plain = (run(pruner_of(make(k), score="pcnn"), batches()) for k in (InPlace, Residual))
    torch.testing.assert_close(in_place, plain)


def test_pcnn_leaves_out_gradients_that_overflow() -> None:
    pruner = pruner_of(make(Residual), score="pcnn")
    images, labels = batches()[0]
    (F.cross_entropy(pruner.model(images), labels) * math.inf).backward()
    pruner.observe()
    found = run(pruner, batches())
    torch.testing.assert_close(found, run(pruner_of(make(Residual), score="pcnn"), batches()))


def test_a_score_that_has_seen_nothing_can_go_on() -> None:
    pruner = pruner_of(make(Residual), score="pcnn")
    with pytest.raises(InvalidModel):
        pruner.prune(fraction=0.2)
    run(pruner, batches())
    assert pruner.prune(fraction=0.2).removed


def ranks(values: Tensor) -> Tensor:
    return values.argsort().argsort().double()


def test_taylor_ranks_like_the_oracle_on_a_trained_network() -> None:
    torch.manual_seed(0)
    patterns = F.interpolate(torch.randn(4, 3, 3, 3), size=8, mode="bilinear")
    labels = torch.randint(4, (256,))
    images = patterns[labels] + 0.7 * torch.randn(256, 3, 8, 8)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for part in torch.arange(256).split(32) * 2:
        optimizer.zero_grad()
        F.cross_entropy(model(images[part]), labels[part]).backward()
        optimizer.step()
    data = list(zip(images.split(8), labels.split(8), strict=True))
    model.eval()
    pruner = Pruner(model, images[:1])
    taylor = run(pruner, data)
    oracle = Oracle(lambda m: F.cross_entropy(m(images), labels))
    oracle.begin(pruner.gates)
    assert torch.corrcoef(torch.stack([ranks(taylor), ranks(oracle.end())]))[0, 1] > 0.5


class Two(nn.Module):
    """Applies two weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(8, 8, 1, 1)) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(images, self.first).relu(), self.second)


@pytest.mark.parametrize("name", ["apoz", "pcnn"])
def test_outputs_that_are_not_those_of_the_weight_are_refused(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Two(), nn.Conv2d(8, 4, 1))
    images = torch.randn(2, 3, 4, 4)
    with pytest.raises(InvalidModel) as caught:
        Pruner(copy.deepcopy(model), images, score=name)
    assert "of '1'" in caught.value.what
    Pruner(model, score=name, graph=analyze(model, images, ignore=["1"]))


@pytest.mark.parametrize("name", ["apoz", "pcnn", "residual", "measured"])
def test_a_validation_is_not_observed(name: str) -> None:
    found = []
    for validates in (False, True):
        pruner = pruner_of(make(Chain), score=name)
        pruner.model.eval()
        for images, labels in batches():
            F.cross_entropy(pruner.model(images), labels).backward()
            pruner.observe()
            if validates:
                with torch.no_grad():
                    pruner.model(3 * images)
        found.append(pruner.score.end())
    assert torch.equal(*found)
