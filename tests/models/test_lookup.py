"""Networks by name."""

import sys

import pytest
import torch
from torch import nn

from secateur.errors import InvalidModel, InvalidSetting, MissingExtra
from secateur.models.lookup import BUILT_IN, example_for, find_model, normalization


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module of the user's own, importable as `users_networks`."""
    (tmp_path / "users_networks.py").write_text(
        "from torch import nn\n"
        "def build(channels=4): return nn.Conv2d(3, channels, 3)\n"
        "def number(): return 3\n"
        "def broken(): raise RuntimeError('no luck')\n"
        "def greedy(channels): return nn.Conv2d(3, channels, 3)\n"
    )
    (tmp_path / "own_faulty.py").write_text("import no_such_package\n")
    (tmp_path / "own_broken.py").write_text("def build(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("users_networks", None)


@pytest.fixture
def no_downloads(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("weights must not be downloaded")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)


@pytest.mark.parametrize("name", sorted({*BUILT_IN} - {"resnet50_v1"}))
def test_built_in(name):
    model = find_model(name, num_classes=10, width=0.25)
    assert model(torch.randn(1, 3, 32, 32)).shape[:2] == (1, 10)


def test_resnet50_with_its_first_strides():
    model, theirs = find_model("resnet50_v1", num_classes=10), find_model("torchvision:resnet50", num_classes=10)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 10)
    shapes = {key: tensor.shape for key, tensor in theirs.state_dict().items()}
    assert {key: tensor.shape for key, tensor in model.state_dict().items()} == shapes
    strides = [[model.get_submodule(f"{stage}.0.conv{i}").stride for i in (1, 2)] for stage in ("layer2", "layer4")]
    assert strides == [[(2, 2), (1, 1)]] * 2
    white = (1 - torch.tensor(normalization(model)["mean"])) / torch.tensor(normalization(model)["std"])
    torch.testing.assert_close(white, 255 - torch.tensor([123.68, 116.779, 103.939]))


def test_arguments_reach_the_builder(user_module):
    assert find_model("resnet20", num_classes=3).fc.out_features == 3
    assert find_model("timm:resnet10t", num_classes=3).fc.out_features == 3
    assert find_model("users_networks:build", channels=5).out_channels == 5


@pytest.mark.parametrize("name", ["resnet18", "fcn_resnet50", "googlenet", "ssdlite320_mobilenet_v3_large"])
def test_torchvision_without_downloads(name, no_downloads):
    assert isinstance(find_model(f"torchvision:{name}"), nn.Module)


@pytest.mark.parametrize(
    ("name", "thing", "remedy"),
    [
        ("resnet65", "built-in network 'resnet65'", "'resnet56'"),
        ("resnet50", "built-in network 'resnet50'", "torchvision:resnet50 or timm:resnet50"),
        ("torchvision:resnet51", "torchvision network 'resnet51'", "'resnet50'"),
        ("timm:efficientnet_b00", "timm network 'efficientnet_b00'", "'efficientnet_b0'"),
        ("users_networks:biuld", "callable in users_networks 'biuld'", "'build'"),
        ("own_network:build", "module 'own_network'", "folder"),
        ("users_networks.cnn:build", "module 'users_networks.cnn'", "folder"),
    ],
)
def test_wrong_names_suggest_near_ones(name, thing, remedy, user_module):
    with pytest.raises(InvalidSetting) as caught:
        find_model(name)
    assert thing in caught.value.what
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("users_networks.py:small", ["users_networks:small"]),
        ("./users_networks.py:small", ["users_networks:small"]),
        ("lib/own.py:small", ["lib.own:small", "own:small from the folder lib"]),
        ("../there/own:small", ["own:small from the folder ../there"]),
        (":small", ["package.module:callable"]),
    ],
)
def test_a_file_is_not_a_module(user_module, name, wanted):
    with pytest.raises(InvalidSetting) as caught:
        find_model(name)
    assert all(each in caught.value.wanted for each in wanted)


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("own_faulty:build", "no_such_package"),  # a fault in the user's module is not a wrong name
        ("own_broken:build", "own_broken.py, line 1"),
        ("users_networks:number", "int"),
        ("users_networks:broken", "no luck"),
        ("users_networks:greedy", "'channels'"),
    ],
)
def test_what_does_not_build_a_network(user_module, name, got):
    with pytest.raises(InvalidModel) as caught:
        find_model(name)
    assert got in str(caught.value.got)


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_missing_package_says_what_to_install(package, monkeypatch):
    for module in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra) as caught:
        find_model(f"{package}:resnet18")
    assert (caught.value.what, caught.value.remedy) == (
        f"{package} is not installed",
        'Run: pip install "secateur[vision]"',
    )


def test_a_package_built_for_another_torch_is_one_clear_error(monkeypatch):
    def fail(package):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(MissingExtra) as caught:
        find_model("torchvision:resnet18")
    assert "nms does not exist" in str(caught.value.got)


def test_examples_have_the_size_of_the_network():
    assert example_for(find_model("resnet20")).shape == (1, 3, 32, 32)
    assert example_for(find_model("resnet20"), (2, 3, 8, 8)).shape == (2, 3, 8, 8)
    assert example_for(find_model("timm:test_byobnet")).shape == (1, 3, 160, 160)
    assert example_for(nn.Conv2d(3, 4, 3)).shape == (1, 3, 224, 224)


def test_detectors_take_a_list_of_images():
    model = find_model("torchvision:ssdlite320_mobilenet_v3_large")
    (images,) = example_for(model, (2, 3, 64, 96))
    assert [image.shape for image in images] == [(3, 64, 96), (3, 64, 96)]
    with pytest.raises(InvalidModel) as caught:
        example_for(model, (3, 64, 96))
    assert caught.value.got == "3x64x96"
