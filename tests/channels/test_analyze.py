"""Analysis leaves no trace, listens to `ignore`, and refuses what it cannot look at."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur
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


IMAGE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


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
    image = IMAGE.clone()

    secateur.analyze(model, image)

    assert [m.training for m in model.modules()] == training
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.body.parameters(), strict=True))
    assert (model.calls, model.history) == attributes[:2]
    assert model.last is attributes[2]
    assert torch.equal(torch.random.get_rng_state(), random)
    assert dict(model.body._forward_hooks) == hooks
    assert torch.equal(image, IMAGE)
    assert not [name for p in model.parameters() for name in vars(p)]


def test_examples_may_be_tensors_tuples_or_dicts() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small_network()

        def forward(self, images: list[torch.Tensor], scale: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"out": self.body(torch.stack(images)) * scale["by"]}

    images, scale = [IMAGE[0], IMAGE[0]], {"by": torch.tensor(2.0)}
    by_position = secateur.analyze(Nested(), (images, scale))
    by_keyword = secateur.analyze(Nested(), {"images": images, "scale": scale})
    assert [g.size for g in by_position.groups] == [g.size for g in by_keyword.groups] == [8, 6]


def test_a_model_on_meta_is_analysed() -> None:
    graph = secateur.analyze(small_network().to("meta"), IMAGE.to("meta"))
    assert [(g.name, g.size) for g in graph.groups] == [("0", 8), ("3", 6)]


def test_ignored_layers_keep_their_filters() -> None:
    assert [g.name for g in secateur.analyze(small_network(), IMAGE, ignore="3").groups] == ["0"]
    assert [g.name for g in secateur.analyze(small_network(), IMAGE, ignore=["[01]"]).groups] == ["3"]
    chosen = secateur.analyze(small_network(), IMAGE, ignore=lambda name, module: isinstance(module, nn.BatchNorm2d))
    assert [g.name for g in chosen.groups] == ["3"]
    assert {f.name: f.reason for f in chosen.frozen}["0"] == Reason(Kind.IGNORED)
    model = small_network()
    assert [g.name for g in secateur.analyze(model, IMAGE, ignore=[model[3]]).groups] == ["0"]
    assert not secateur.analyze(model, IMAGE, ignore=model).groups


@pytest.mark.parametrize(
    ("ignore", "told"),
    [([3], "or a function of name and module, got int"), (nn.ReLU(), "a ReLU that is not a part of")],
)
def test_what_cannot_be_ignored(ignore: Any, told: str) -> None:
    with pytest.raises(secateur.InvalidSetting, match=told):
        secateur.analyze(small_network(), IMAGE, ignore=ignore)


def test_a_container_stands_for_what_is_in_it() -> None:
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(3, 4, 3))
    model.add_module("body", small_network()[3:])
    model.body[0] = nn.Conv2d(4, 6, 1)
    graph = secateur.analyze(model, IMAGE, ignore="body")
    assert [g.name for g in graph.groups] == ["stem"]


def test_a_wrong_name_to_ignore_suggests_the_nearest() -> None:
    model = nn.Sequential()
    model.add_module("features", small_network())
    with pytest.raises(secateur.InvalidSetting) as caught:
        secateur.analyze(model, IMAGE, ignore="feature")
    assert "'features'" in caught.value.remedy


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
    graph = secateur.analyze(model, IMAGE)
    (group,) = graph.groups
    assert "aux.weight" in {m.tensor for m in group.members if m.role == "consumes"}
    small = secateur.shrink(model, secateur.Plan.random(graph, 0.5))
    assert [out.shape[1] for out in small.train()(IMAGE)] == [2, 5]


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

    graph = secateur.analyze(NeedsTargets(), IMAGE)
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

    assert [g.size for g in secateur.analyze(Quiet(), IMAGE).groups] == [8, 6]
    with pytest.raises(secateur.InvalidModel, match=r"output \(NoneType\) holds no tensor"):
        secateur.analyze(nn.Sequential(small_network(), Nothing()), IMAGE)


def test_training_mode_sees_two_images_that_differ() -> None:
    seen: list[torch.Tensor] = []

    class Noted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                seen.append(x.detach().clone())
            return x

    secateur.analyze(nn.Sequential(Noted(), small_network()), IMAGE[:1])
    assert seen
    for images in seen:
        means = images.mean((1, 2, 3))
        assert len(means) == 2
        assert (means[0] - means[1]).abs() > 1e-3, "norms over two that are the same blow up rounding"


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> None:
        return None


def test_a_parameter_never_used_says_so() -> None:
    model = small_network()
    model.spare = nn.Linear(4, 4)
    model.forward = lambda x: nn.Sequential.forward(model[:6], x)
    graph = secateur.analyze(model, IMAGE, probe=False)
    assert {f.name: f.reason for f in graph.frozen}["spare"] == Reason(Kind.UNUSED)
    assert graph.partial


class HardCoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3, padding=1)
        self.inner = nn.Conv2d(8, 6, 1)
        self.outer = nn.Conv2d(6, 4, 1)
        self.linear = nn.Linear(256, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, _ = self.convolution(x).split([8, 8], 1)
        x = self.outer(self.inner(a).relu())
        return self.linear(x.view(-1, 256))


def test_the_probe_finds_fixed_sizes_and_names_the_line() -> None:
    graph = secateur.analyze(HardCoded(), IMAGE)
    assert [g.name for g in graph.groups] == ["inner"]
    reasons = {f.name: f.reason for f in graph.frozen}
    assert reasons["convolution"].kind is Kind.FIXED_SIZE
    assert "test_analyze.py" in reasons["convolution"].detail
    assert ".split([8, 8], 1)" in reasons["convolution"].detail
    assert "x.view(-1, 256)" in reasons["outer"].detail


def test_the_probe_finds_values_that_depend_on_the_number_of_channels() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 16, 1)
            self.second = nn.Conv2d(16, 2, 1)
            nn.init.zeros_(self.second.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x / x.shape[1])

    graph = secateur.analyze(Scaled(), IMAGE)
    assert not graph.groups
    assert graph.frozen[0].reason.kind is Kind.DIFFERS


def test_the_table_and_the_data_tell_the_same() -> None:
    graph = secateur.analyze(small_network(), IMAGE)
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


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ReLU(), "has no parameters"),
        (nn.DataParallel(small_network()), "wrapped in DataParallel: pass model.module instead"),
        (
            nn.Sequential(nn.DataParallel(small_network())),
            "'0' is wrapped in DataParallel: put its .module in its place",
        ),
        (nn.Sequential(nn.LazyConv2d(4, 3)), "has no shape yet"),
    ],
)
def test_models_that_cannot_be_analysed(model: object, message: str) -> None:
    with pytest.raises(secateur.InvalidModel, match=message):
        secateur.analyze(model, IMAGE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_compiled_in_place_are_watched_as_written() -> None:
    plain, model = small_network(), small_network()
    layer = next(model.children())
    layer.compile()
    compiled = layer._compiled_call_impl
    assert compiled is not None
    assert str(secateur.analyze(model, IMAGE)) == str(secateur.analyze(plain, IMAGE))
    assert layer._compiled_call_impl is compiled


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_functions_are_watched_as_written() -> None:
    doubled = torch.compile(lambda x: x * 2, backend="eager")

    class Calling(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(doubled(x))

    model = Calling(*small_network())
    assert [group.name for group in secateur.analyze(model, IMAGE).groups] == ["0", "3"]


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
    assert secateur.analyze(model, IMAGE).macs == rest + 3 * 64 * 16


def test_what_the_example_does_not_run_is_named() -> None:
    class Domains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
            self.norms = nn.ModuleDict({name: nn.BatchNorm2d(8) for name in "ab"})

        def forward(self, x: torch.Tensor, domain: str = "a") -> torch.Tensor:
            return self.last(self.norms[domain](self.first(x)))

    (note,) = secateur.analyze(Domains(), IMAGE).notes
    assert note.startswith("never run on this example, so that what they read may be cut: norms.b; ")


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning", "ignore:.*jit:FutureWarning")
def test_scripted_exported_and_compiled_models_are_refused() -> None:
    exported = torch.export.export(small_network().eval(), (IMAGE,)).module()
    with pytest.raises(secateur.InvalidModel, match="the model is an exported program"):
        secateur.analyze(exported, IMAGE)
    scripted = torch.jit.script(small_network())
    with pytest.raises(secateur.InvalidModel, match="TorchScript"):
        secateur.analyze(scripted, IMAGE)
    with pytest.raises(secateur.InvalidModel, match=r"model\._orig_mod"):
        secateur.analyze(torch.compile(small_network()), IMAGE)


class Quantisable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.add = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), torch.ao.nn.quantized.FloatFunctional()
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.head(self.add.add_relu(x, self.b(x)))


def test_what_is_ready_to_be_quantised_is_a_float_model_still() -> None:
    assert [group.size for group in secateur.analyze(Quantisable(), IMAGE).groups] == [8]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_what_is_prepared_to_be_quantised_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)).train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("qnnpack")
    torch.ao.quantization.prepare_qat(model, inplace=True)
    with pytest.raises(secateur.InvalidModel, match=r"is prepared to be quantised: prune the float model first"):
        secateur.analyze(model, IMAGE)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_tensors_are_refused() -> None:
    model = small_network()
    model.register_buffer("table", torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.quint8))
    with pytest.raises(secateur.InvalidModel, match="'table' is quantised"):
        secateur.analyze(model, IMAGE)


def test_two_devices_and_sick_weights_are_named() -> None:
    model = small_network()
    model[3].to("meta")
    with pytest.raises(secateur.InvalidModel, match=r"several devices .*'3.weight' on meta"):
        secateur.analyze(model, IMAGE)
    model = small_network()
    model[3].weight.data[0, 0, 0, 0] = float("nan")
    with pytest.raises(secateur.InvalidModel, match=r"'3.weight' holds NaN"):
        secateur.analyze(model, IMAGE)
    model = small_network()
    model[1].running_var[0] = float("nan")
    with pytest.raises(secateur.InvalidModel, match=r"'1.running_var' holds NaN"):
        secateur.analyze(model, IMAGE)


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
    with pytest.raises(secateur.InvalidExample, match=r"raised in its forward pass on input 1x4x8x8: RuntimeError"):
        secateur.analyze(model, torch.randn(1, 4, 8, 8))
    with pytest.raises(secateur.InvalidExample, match="holds no tensor"):
        secateur.analyze(model, ([],))
    with pytest.raises(secateur.InvalidExample, match="the model is on cpu, the example on meta"):
        secateur.analyze(model, IMAGE.to("meta"))
    plan = secateur.Plan.keep(secateur.analyze(model, IMAGE), {"0": [0, 1]})
    for look in (lambda image: secateur.analyze(model, image), lambda image: secateur.verify(model, plan, image)):
        with pytest.raises(secateur.InvalidExample, match="the example holds NaN"):
            look(torch.where(IMAGE > 2, torch.nan, IMAGE))
    filled = Filled()
    assert secateur.analyze(filled, torch.where(IMAGE > 2, torch.nan, IMAGE)).groups
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_an_error_of_the_model_keeps_its_line() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.convolution(x)
            raise RuntimeError("out of coffee")

    with pytest.raises(secateur.InvalidExample, match=r"out of coffee at test_analyze.py:\d+: raise RuntimeError"):
        secateur.analyze(Broken(), IMAGE)


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
