"""Weights from files."""

import pickle
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn
from torchvision.models import vgg

from secateur.errors import InvalidData, InvalidSetting
from secateur.models.fcn import Fcn32s
from secateur.models.resnet_cifar import CifarResNet, resnet20
from secateur.models.vgg_cifar import CifarVgg, scaled
from secateur.models.weights import NewHead, load_weights_


def disturb_(model: nn.Module) -> nn.Module:
    """Give every tensor values of its own, as training does."""
    generator = torch.Generator().manual_seed(0)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data += 0.1 * torch.rand(tensor.shape, generator=generator)
    return model.eval()


@pytest.mark.parametrize(
    "wrap",
    [
        dict,
        lambda s: {"state_dict": s, "epoch": 3},
        lambda s: {f"module.{n}": s[n] for n in s},
        lambda s: {f"module._orig_mod.{n}": s[n] for n in s},
        lambda s: {f"_orig_mod.module.{n}": s[n] for n in s},
    ],
)
@pytest.mark.parametrize("authors", [False, True])
def test_resnet_from_any_file_of_torch(tmp_path, wrap, authors):
    trained = disturb_(resnet20())
    state = trained.state_dict()
    if authors:
        state = {n.replace("stage", "layer").replace("fc.", "linear."): t for n, t in state.items()}
        assert {"layer2.0.shortcut.0.weight", "linear.bias"} <= set(state)
    torch.save(wrap(state), tmp_path / "weights.ckp")
    model = resnet20()
    load_weights_(model, tmp_path / "weights.ckp")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model.eval()(images), trained(images))


def test_safetensors(tmp_path):
    trained = disturb_(resnet20())
    save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    model = resnet20()
    load_weights_(model, tmp_path / "weights.safetensors")
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), trained.state_dict().values(), strict=True)
    )


def test_files_without_counts_of_batches(tmp_path):
    state = {n: t for n, t in resnet20().state_dict().items() if "num_batches" not in n}
    torch.save(state, tmp_path / "old.pth")
    load_weights_(resnet20(), tmp_path / "old.pth")


def narrow_vgg(width: float, batch_norm: bool) -> torchvision.models.VGG:
    """Torchvision's VGG-16 with fewer channels, under the same names."""
    stages = [scaled(channels, width) if isinstance(channels, int) else channels for channels in vgg.cfgs["D"]]
    with torch.device("meta"):
        theirs = torchvision.models.VGG(nn.Sequential(), num_classes=5)
    theirs.features = vgg.make_layers(stages, batch_norm)  # pyright: ignore
    hidden = scaled(4096, width)
    theirs.classifier[0] = nn.Linear(stages[-2] * 49, hidden)  # pyright: ignore
    theirs.classifier[3] = nn.Linear(hidden, hidden)
    theirs.classifier[6] = nn.Linear(hidden, 5)
    return disturb_(theirs)  # pyright: ignore


@pytest.mark.parametrize("training", [False, True])
def test_vgg_from_torchvision_with_batch_norm(tmp_path, training):
    """The biases that ours does not have change nothing, whether batch norm looks at the batch or at its memory."""
    theirs = narrow_vgg(1 / 8, batch_norm=True).double().train(training)
    torch.save(theirs.state_dict(), tmp_path / "vgg16_bn.pth")
    ours = CifarVgg(num_classes=7, width=1 / 8).double().train(training)
    head = ours.fc.weight.clone()
    load_weights_(ours, tmp_path / "vgg16_bn.pth")
    assert torch.equal(ours.fc.weight, head)
    images = torch.randn(2, 3, 64, 64).double()
    with torch.no_grad():
        before_last_pool = theirs.features[:-1](images)
        gap = (ours.features(images) - before_last_pool).abs().max()
    assert gap < 1e-12 * before_last_pool.abs().max()


def test_fcn_from_torchvision(tmp_path):
    """On one 7x7 window of features, the convolutions that were linear layers give what those give."""
    theirs = narrow_vgg(1 / 8, batch_norm=False)
    torch.save(theirs.state_dict(), tmp_path / "vgg16.pth")
    ours = Fcn32s(num_classes=3, width=1 / 8).eval()
    load_weights_(ours, tmp_path / "vgg16.pth")
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        features = theirs.features(images)
        hidden = theirs.classifier[:6](features.flatten(1))
        convolved = ours.fc7(ours.fc6(features).relu()).relu().flatten(1)
        assert torch.allclose(hidden, convolved, rtol=1e-4, atol=1e-4)
        inside = ours.features[0](images)[:, :, 99:-99, 99:-99]
        assert torch.allclose(inside, theirs.features[0](images), rtol=1e-4, atol=1e-4)
        assert ours.score.weight.abs().max() == 0


class Trap:
    def __reduce__(self):
        return Path.touch, (Path("sprung"),)


def hostile(path: Path) -> None:
    torch.save({"weight": Trap()}, path)


def cut_short(path: Path) -> None:
    torch.save(resnet20().state_dict(), path)
    path.write_bytes(path.read_bytes()[:5000])


def with_nan(path: Path) -> None:
    state = resnet20().state_dict()
    state["conv1.weight"][0, 0, 0, 0] = torch.nan
    torch.save(state, path)


TORN = ("features.0.bias", "features.5.running_mean")
CASES = {
    "none": (lambda path: None, "there is no file"),
    "hostile": (hostile, "read safely"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(Trap())), "read safely"),
    "short": (cut_short, "read safely"),
    "a list": (lambda path: torch.save([torch.ones(1)], path), "not a state dict"),
    "numbers": (lambda path: torch.save({"epoch": 3}, path), "not a state dict"),
    "other": (lambda path: torch.save(nn.Linear(1, 1).state_dict(), path), "has no bn1.bias"),
    "wider": (lambda path: torch.save(resnet20(width=2).state_dict(), path), "conv1.weight"),
    "deeper": (lambda path: torch.save(CifarResNet(26).state_dict(), path), "stage1.3.bn1.bias"),
    "nan": (with_nan, "not finite"),
    "half of torchvision's": (lambda path: torch.save(dict.fromkeys(TORN, torch.ones(1)), path), "another network"),
    "bytes": (lambda path: path.with_suffix(".safetensors").write_bytes(b"\xff" * 40), "read safely"),
}


@pytest.mark.parametrize("case", CASES)
def test_files_that_do_not_fit(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    write, what = CASES[case]
    write(tmp_path / "weights.pth")
    model = CifarVgg(width=1 / 8) if "torchvision" in case else resnet20()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = tmp_path / ("weights.safetensors" if case == "bytes" else "weights.pth")
    with pytest.raises(InvalidData) as caught:
        load_weights_(model, path)
    assert str(path) in caught.value.what
    assert what in caught.value.what
    if case == "wider":
        assert (caught.value.got, caught.value.wanted) == ("32x3x3x3", "16x3x3x3")
    assert not (tmp_path / "sprung").exists()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


# Weights for other classes


def classifier(classes: int, hidden: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, hidden, 3), nn.BatchNorm2d(hidden)), nn.Flatten(), nn.Linear(hidden, classes)
    )


@pytest.mark.parametrize("if_needed", [False, True])
def test_a_new_classifier(tmp_path, if_needed):
    trained, model = disturb_(classifier(10)), classifier(3)
    torch.save(trained.state_dict(), tmp_path / "weights.pth")
    own = model[2].weight.clone()  # pyright: ignore
    head = load_weights_(model, tmp_path / "weights.pth", new_head="2", if_needed=if_needed)
    assert head == NewHead("2", classes=3, before=10)
    assert "2 is made anew" in str(head)
    state, given = model.state_dict(), trained.state_dict()
    assert torch.equal(state["2.weight"], own)
    assert all(torch.equal(state[name], given[name]) for name in state if not name.startswith("2."))


def test_a_classifier_that_fits_is_made_anew_only_on_request(tmp_path):
    trained = disturb_(classifier(3))
    torch.save(trained.state_dict(), tmp_path / "weights.pth")
    model = classifier(3)
    assert load_weights_(model, tmp_path / "weights.pth", new_head="2", if_needed=True) is None
    assert torch.equal(model[2].weight, trained[2].weight)  # pyright: ignore
    model = classifier(3)
    own = model[2].weight.clone()  # pyright: ignore
    assert load_weights_(model, tmp_path / "weights.pth", new_head="2") == NewHead("2", classes=3, before=3)
    assert torch.equal(model[2].weight, own)  # pyright: ignore


def test_a_file_without_a_classifier(tmp_path):
    trained = disturb_(classifier(10))
    torch.save({n: t for n, t in trained.state_dict().items() if not n.startswith("2.")}, tmp_path / "weights.pth")
    assert load_weights_(classifier(3), tmp_path / "weights.pth", new_head="2") == NewHead("2", classes=3, before=None)
    with pytest.raises(InvalidData, match=r"has no 2\.bias"):
        load_weights_(classifier(3), tmp_path / "weights.pth", new_head="2", if_needed=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state | {"2.weight": torch.zeros(10, 5)}, r"2\.weight .* got 10x5, wanted 3x4"),
        (lambda state: state | {"2.bias": torch.zeros(9)}, r"2\.weight .* got 10x4, wanted 3x4"),
        (lambda state: state | {"2.bias": torch.zeros(10, 1)}, r"2\.weight .* got 10x4, wanted 3x4"),
        (lambda state: state | {"0.0.bias": torch.zeros(10)}, r"0\.0\.bias .* got 10, wanted 4"),
        (lambda state: state | {"0.0.weight": torch.zeros(5, 3, 3, 3)}, r"0\.0\.weight .* got 5x3x3x3"),
        (lambda state: state | {"3.bias": torch.zeros(3)}, r"has '3\.bias'"),
    ],
)
def test_whatever_else_does_not_fit_is_refused(tmp_path, change, words):
    torch.save(change(classifier(10).state_dict()), tmp_path / "weights.pth")
    model = classifier(3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InvalidData, match=words):
        load_weights_(model, tmp_path / "weights.pth", new_head="2", if_needed=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_two_classifiers_are_not_made_anew(tmp_path):
    class Two(nn.Module):
        def __init__(self, classes: int) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, classes), nn.Linear(4, classes)

    torch.save(Two(10).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(InvalidData, match=r"got 10x4, wanted 3x4"):
        load_weights_(Two(3), tmp_path / "weights.pth", new_head="second", if_needed=True)


def test_a_new_classifier_that_does_not_exist(tmp_path):
    torch.save(classifier(10).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(InvalidSetting, match="'4'"):
        load_weights_(classifier(3), tmp_path / "weights.pth", new_head="4")
