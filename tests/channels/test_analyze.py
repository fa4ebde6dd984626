"""Analysis leaves no trace, watches both modes, obeys `ignore`, and refuses what it cannot run."""

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import masked, outputs, randomize_
from sandwich import IMAGE, Sandwich, kinds, parameter, sizes
from torch import Tensor, nn

import secateur
from secateur import Plan
from secateur.channels.reasons import Kind, Reason


def small_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 2, 1),
    )


PICTURE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Restless(nn.Module):
    """Changes itself in every forward pass in every way a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_network()
        self.dropout = nn.Dropout(0.5)
        self.calls = 0
        self.history: list[int] = []
        self.register_buffer("seen", torch.zeros(3))
        self.centre, self.slow = (nn.Parameter(torch.ones(3), requires_grad=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.centre.data.mul_(0.5).add_(x.mean())
        self.slow.data = self.slow.data * 0.9
        self.calls += 1
        self.history.append(self.calls)
        self.seen = self.seen + 1
        self.last = x
        x.mul_(1.0)
        return self.dropout(self.body(x))


def test_the_model_is_left_exactly_as_it_was() -> None:
    model = Restless()
    model.train()
    model.body[1].eval()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    calls: list[str] = []
    model.body.register_forward_hook(lambda *_: calls.append("hook"))
    hooks = dict(model.body._forward_hooks)
    state = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.body.parameters()]
    parameters = list(model.parameters())
    training = [m.training for m in model.modules()]
    attributes = model.calls, list(model.history), model.last
    random = torch.random.get_rng_state()
    image = PICTURE.clone()

    secateur.analyze(model, image)

    assert [m.training for m in model.modules()] == training
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.body.parameters(), strict=True))
    assert (model.calls, model.history) == attributes[:2]
    assert model.last is attributes[2]
    assert torch.equal(torch.random.get_rng_state(), random)
    assert dict(model.body._forward_hooks) == hooks
    assert torch.equal(image, PICTURE)
    assert not [name for p in model.parameters() for name in vars(p)]


def test_examples_may_be_tensors_tuples_or_dicts() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small_network()

        def forward(self, images: list[torch.Tensor], scale: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"out": self.body(torch.stack(images)) * scale["by"]}

    images, scale = [PICTURE[0], PICTURE[0]], {"by": torch.tensor(2.0)}
    by_position = secateur.analyze(Nested(), (images, scale))
    by_keyword = secateur.analyze(Nested(), {"images": images, "scale": scale})
    assert [g.size for g in by_position.groups] == [g.size for g in by_keyword.groups] == [8, 6]


def test_a_model_on_meta_is_analysed() -> None:
    graph = secateur.analyze(small_network().to("meta"), PICTURE.to("meta"))
    assert [(g.name, g.size) for g in graph.groups] == [("0", 8), ("3", 6)]


def test_ignored_layers_keep_their_filters() -> None:
    assert [g.name for g in secateur.analyze(small_network(), PICTURE, ignore="3").groups] == ["0"]
    assert [g.name for g in secateur.analyze(small_network(), PICTURE, ignore=["[01]"]).groups] == ["3"]
    chosen = secateur.analyze(small_network(), PICTURE, ignore=lambda name, module: isinstance(module, nn.BatchNorm2d))
    assert [g.name for g in chosen.groups] == ["3"]
    assert {f.name: f.reason for f in chosen.frozen}["0"] == Reason(Kind.IGNORED)
    model = small_network()
    assert [g.name for g in secateur.analyze(model, PICTURE, ignore=[model[3]]).groups] == ["0"]
    assert not secateur.analyze(model, PICTURE, ignore=model).groups


@pytest.mark.parametrize(
    ("ignore", "got", "remedy"),
    [([3], "int", None), (nn.ReLU(), "ReLU", None), ("00", None, "Did you mean '0'?")],
)
def test_what_cannot_be_ignored(ignore: Any, got: str | None, remedy: str | None) -> None:
    with pytest.raises(secateur.InvalidSetting) as caught:
        secateur.analyze(small_network(), PICTURE, ignore=ignore)
    assert (caught.value.got, caught.value.remedy) == (got, remedy)


def test_a_container_stands_for_what_is_in_it() -> None:
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(3, 4, 3))
    model.add_module("body", small_network()[3:])
    model.body[0] = nn.Conv2d(4, 6, 1)
    graph = secateur.analyze(model, PICTURE, ignore="body")
    assert [g.name for g in graph.groups] == ["stem"]


def test_train_only_heads_hold_on_to_their_channels() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3)
            self.head = nn.Conv2d(8, 2, 1)
            self.aux = nn.Conv2d(8, 5, 1)

        def forward(self, x: torch.Tensor) -> object:
            x = self.stem(x).relu()
            return (self.head(x), self.aux(x)) if self.training else self.head(x)

    model = Auxiliary()
    graph = secateur.analyze(model, PICTURE)
    (group,) = graph.groups
    assert "aux.weight" in {m.tensor for m in group.members if m.role == "consumes"}
    small = secateur.shrink(model, secateur.Plan.random(graph, 0.5))
    assert [out.shape[1] for out in small.train()(PICTURE)] == [2, 5]


def test_a_head_that_cannot_be_run_is_frozen_with_that_reason() -> None:
    class NeedsTargets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small_network()
            self.extra = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
            if self.training:
                assert target is not None, "no target"
                return self.extra(target)
            return self.body(x)

    graph = secateur.analyze(NeedsTargets(), PICTURE)
    assert {f.name: f.reason for f in graph.frozen}["extra"] == Reason(Kind.UNUSED)
    assert graph.partial
    assert any("no target" in note for note in graph.notes)


def test_training_mode_may_return_nothing() -> None:
    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small_network()

        def forward(self, x: torch.Tensor) -> torch.Tensor | None:
            x = self.body(x)
            return None if self.training else x

    assert [g.size for g in secateur.analyze(Quiet(), PICTURE).groups] == [8, 6]
    model = small_network()
    model.forward = lambda x: None
    with pytest.raises(secateur.InvalidModel) as caught:
        secateur.analyze(model, PICTURE)
    assert caught.value.got == "NoneType"


def test_training_mode_sees_two_images_that_differ() -> None:
    seen: list[torch.Tensor] = []

    class Noted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                seen.append(x.detach().clone())
            return x

    secateur.analyze(nn.Sequential(Noted(), small_network()), PICTURE[:1])
    assert seen
    for images in seen:
        means = images.mean((1, 2, 3))
        assert len(means) == 2
        assert (means[0] - means[1]).abs() > 1e-3, "norms over two that are the same blow up rounding"


def test_the_table_and_the_data_tell_the_same() -> None:
    graph = secateur.analyze(small_network(), PICTURE)
    text, data = str(graph), graph.to_dict()
    assert "14 channels in 2 groups" in text
    assert "reaches the model's output" in text
    assert [g["name"] for g in data["groups"]] == ["0", "3"]
    assert data["macs"] == graph.macs
    assert data["groups"][0]["members"][0] == {
        "tensor": "0.weight",
        "axis": 0,
        "role": "produces",
        "indices": [[i] for i in range(8)],
    }


def changed(change: Callable[[nn.Sequential], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = small_network()
        change(model)
        return model

    return make


def prepared() -> nn.Module:
    model = small_network().train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("qnnpack")
    return torch.ao.quantization.prepare_qat(model)


def quantised(model: nn.Module) -> None:
    model.register_buffer("table", torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.quint8))


FLOAT = "Prune the float model first, then quantise"
PYTHON = "Pass the Python model that it was made from"
REFUSED: dict[str, tuple[Callable[[], Any], str, str | None]] = {
    "no parameters": (nn.ReLU, "ReLU", None),
    "wrapped": (lambda: nn.DataParallel(small_network()), "the model", "Pass model.module instead"),
    "wrapped inside": (lambda: nn.Sequential(nn.DataParallel(small_network())), "'0'", "Put its .module in its place"),
    "compiled": (lambda: torch.compile(small_network()), "the model", "Pass model._orig_mod instead"),
    "lazy": (lambda: nn.Sequential(nn.LazyConv2d(4, 3)), "'0.weight'", "Run the model once on an example"),
    "exported": (lambda: torch.export.export(small_network().eval(), (PICTURE,)).module(), "exported", PYTHON),
    "scripted": (lambda: torch.jit.script(small_network()), "TorchScript", PYTHON),
    "prepared": (prepared, "prepared", FLOAT),
    "quantised": (changed(quantised), "'table'", FLOAT),
    "two devices": (changed(lambda m: m[3].to("meta")), "several devices", "Move it to one with model.to(device)"),
    "NaN": (changed(lambda m: m[3].weight.data.view(-1)[0].fill_(torch.nan)), "'3.weight'", None),
    "NaN in statistics": (changed(lambda m: m[1].running_var[0].fill_(torch.nan)), "'1.running_var'", None),
    "no variance": (changed(lambda m: m[1].running_var[0].fill_(-1e-3)), "'1.running_var'", "Load sound weights"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_analysed(name: str) -> None:
    make, what, remedy = REFUSED[name]
    with pytest.raises(secateur.InvalidModel) as caught:
        secateur.analyze(make(), PICTURE)
    assert what in caught.value.what
    assert caught.value.remedy == remedy


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_compiled_in_place_are_watched_as_written() -> None:
    plain, model = small_network(), small_network()
    layer = next(model.children())
    layer.compile()
    compiled = layer._compiled_call_impl
    assert compiled is not None
    assert str(secateur.analyze(model, PICTURE)) == str(secateur.analyze(plain, PICTURE))
    assert layer._compiled_call_impl is compiled


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_functions_are_watched_as_written() -> None:
    doubled = torch.compile(lambda x: x * 2, backend="eager")

    class Calling(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(doubled(x))

    model = Calling(*small_network())
    assert [group.name for group in secateur.analyze(model, PICTURE).groups] == ["0", "3"]


def test_fused_attention_is_watched_layer_by_layer() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Conv1d(3, 16, 4, 4), nn.Flatten(2), nn.TransformerEncoder(layer, 1), nn.Linear(16, 2))
    sequence = torch.randn(1, 3, 64)
    assert torch.backends.mha.get_fastpath_enabled()
    graph = secateur.analyze(model.eval(), sequence)
    assert torch.backends.mha.get_fastpath_enabled()
    assert [group.name for group in graph.groups] == ["2.layers.0.linear1"]
    layers = {row.name for row in graph.layers}
    assert {"2.layers.0.linear1", "2.layers.0.linear2"} <= layers


def test_products_without_weights_count() -> None:
    class Spectrogram(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward((x.flatten(2) @ self.filters).unflatten(2, (4, 4)))

    model = Spectrogram(*small_network())
    model.filters = torch.randn(64, 16)
    rest = secateur.analyze(small_network(), torch.randn(1, 3, 4, 4)).macs
    assert secateur.analyze(model, PICTURE).macs == rest + 3 * 64 * 16


def test_what_the_example_does_not_run_is_named() -> None:
    class Domains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
            self.norms = nn.ModuleDict({name: nn.BatchNorm2d(8) for name in "ab"})

        def forward(self, x: torch.Tensor, domain: str = "a") -> torch.Tensor:
            return self.last(self.norms[domain](self.first(x)))

    (note,) = secateur.analyze(Domains(), PICTURE).notes
    assert note.startswith("modules that do not run on this example, so that their inputs may be cut: norms.b; ")


class Quantisable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.add = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), torch.ao.nn.quantized.FloatFunctional()
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.head(self.add.add_relu(x, self.b(x)))


def test_what_is_ready_to_be_quantised_is_a_float_model_still() -> None:
    assert [group.size for group in secateur.analyze(Quantisable(), PICTURE).groups] == [8]


class Filled(nn.Module):
    """Takes images with pixels that are missing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(torch.nan_to_num(x))


def test_examples_that_do_not_fit() -> None:
    model = small_network()
    before = copy.deepcopy(model.state_dict())
    for example, got in ((torch.randn(1, 4, 8, 8), "RuntimeError"), (([],), None), (PICTURE.to("meta"), "meta")):
        with pytest.raises(secateur.InvalidModel) as caught:
            secateur.analyze(model, example)
        assert str(caught.value.got).startswith(str(got))
    plan = secateur.Plan.keep(secateur.analyze(model, PICTURE), {"0": [0, 1]})
    for look in (lambda image: secateur.analyze(model, image), lambda image: secateur.verify(model, plan, image)):
        with pytest.raises(secateur.InvalidModel, match="NaN"):
            look(torch.where(PICTURE > 2, torch.nan, PICTURE))
    filled = Filled()
    assert secateur.analyze(filled, torch.where(PICTURE > 2, torch.nan, PICTURE)).groups
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_an_error_of_the_model_keeps_its_line() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.convolution(x)
            raise RuntimeError("out of coffee")

    with pytest.raises(secateur.InvalidModel, match=r"out of coffee at test_analyze.py:\d+: raise RuntimeError"):
        secateur.analyze(Broken(), PICTURE)


def test_what_we_look_at_ourselves_is_not_the_models_doing() -> None:
    """A gate of its own on every channel makes the analysis look at its labels, and the model's code at nothing."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.last(x * x.mean((2, 3), keepdim=True).sigmoid())

    assert secateur.analyze(Gated(), torch.randn(1, 3, 8, 8)).notes == ()


def test_hooks_and_flags_that_a_forward_pass_sets_are_undone() -> None:
    class Setting(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            self[0].register_forward_hook(lambda *_: None)
            self[0].weight.requires_grad_(False)
            return super().forward(input)

    model = Setting(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1))
    secateur.analyze(model, torch.randn(1, 3, 8, 8))
    assert (len(model[0]._forward_hooks), model[0].weight.requires_grad) == (0, True)


def test_training_mode_is_watched_when_code_asks_for_it() -> None:
    class Hidden(nn.Module):
        """Gives its inner channels away in training mode only, without a parameter of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> object:
            x = self.first(x)
            return (self.second(x), x) if self.training else self.second(x)

    graph = secateur.analyze(Hidden(), torch.randn(1, 3, 4, 4))
    assert not graph.groups
    assert {f.name: f.reason for f in graph.frozen}["first"].kind is Kind.OUTPUT
    assert "training" not in vars(nn.Module)


def test_values_that_leave_for_python_keep_their_channels() -> None:
    class Numpy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            shares = x.mean((0, 2, 3)).tolist()
            return self.second(x) * len(shares)

    graph = secateur.analyze(Numpy(), torch.randn(1, 3, 4, 4), probe=False)
    assert {f.name: f.reason for f in graph.frozen}["first"].kind is Kind.READ_BY_PYTHON


def test_what_is_not_counted_is_said() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.memory, self.head = nn.Conv1d(3, 8, 3), nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.memory(self.body(x).relu().transpose(1, 2))[0].mean(1))

    graph = secateur.analyze(Recurrent(), torch.randn(1, 3, 12))
    assert "the MACs of recurrent layers are not counted: memory" in graph.notes


def test_a_branch_taken_by_value_is_the_one_that_is_analysed() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
            self.bright, self.dark = nn.Conv2d(8, 2, 1), nn.Conv2d(8, 2, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.first(x))
            bright = bool(x.abs().sum() > 0)
            return self.bright(x) if bright else self.dark(x)

    graph = secateur.analyze(Branch(), torch.ones(1, 3, 4, 4))
    frozen = {f.name: f.reason for f in graph.frozen}
    assert "bright" in frozen
    assert {row.name for row in graph.layers} == {"first", "bright"}
    assert frozen["dark"].kind is Kind.UNUSED
    assert any("the code depends on values" in note for note in graph.notes)
    assert any("do not run on this example" in note and ": dark;" in note for note in graph.notes)
    assert graph.partial


def test_training_that_cannot_run() -> None:
    def body(module: nn.Module, x: Tensor) -> Tensor:
        if module.training:
            module.extra(x)
            raise ValueError("targets are missing")
        return x

    model = Sandwich(body, extra=nn.Conv2d(8, 4, 1), spare=nn.Conv2d(8, 4, 1)).double()
    graph = secateur.analyze(model, IMAGE)
    assert sizes(graph) == {"first": 8}
    assert kinds(graph)["spare"] is Kind.UNUSED


@pytest.mark.parametrize(
    "wrap",
    [lambda x: {"f": x}.values(), lambda x: collections.deque([x]), lambda x: map(torch.relu, [x]), iter],
    ids=["values", "deque", "map", "iterator"],
)
def test_outputs_in_any_container_stay(wrap: Callable[[Tensor], Any]) -> None:
    model = randomize_(Sandwich(lambda m, x: (m.mid(x), wrap(x)), inner=0, mid=nn.Conv2d(8, 2, 1)))
    assert kinds(secateur.analyze(model, IMAGE))["first"] is Kind.OUTPUT


def test_weights_computed_in_one_module_are_told_apart() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        x = F.conv2d(F.conv2d(x, m.w * 0.5).relu(), m.v * 0.5)
        return x + m.mid(x)

    model = randomize_(Sandwich(body, w=parameter(8, 8, 1, 1), v=parameter(8, 8, 1, 1), mid=nn.Conv2d(8, 8, 1)))
    graph = secateur.analyze(model, IMAGE)
    computed = Reason(Kind.COMPUTED_WEIGHT)
    assert graph.ungated == {"w": computed, "v": computed}


def test_a_train_that_returns_nothing() -> None:
    class Frozen(Sandwich):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.norm.eval()

    assert sizes(secateur.analyze(randomize_(Frozen(lambda m, x: x)), IMAGE)) == {"first": 8}


class Batch(dict[str, Tensor]):
    """Reached by attribute, as some libraries have it."""

    __getattr__ = dict.__getitem__


def test_an_example_in_a_dict_of_its_own_kind() -> None:
    class Takes(Sandwich):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch.image)

    assert sizes(secateur.analyze(randomize_(Takes(lambda m, x: x)), (Batch(image=IMAGE),))) == {"first": 8}


def test_a_tensor_kept_from_another_analysis_is_a_stranger() -> None:
    kept: dict[Any, Tensor] = {}

    def body(m: Any, x: Tensor) -> Tensor:
        return x + kept.setdefault(x.shape[1:], torch.zeros_like(x[:1]))

    secateur.analyze(randomize_(Sandwich(body, more=nn.Conv2d(64, 64, 3))), IMAGE)
    model = randomize_(Sandwich(body))
    graph = secateur.analyze(model, IMAGE)
    assert outputs(masked(model, Plan.random(graph, 0.4)), (IMAGE,), "eval")
