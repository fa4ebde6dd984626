import sys

import pytest
import torch
from torch import nn

from secateur.errors import InvalidExample, InvalidModel, MissingExtra, UnknownName
from secateur.models.lookup import BUILT_IN, example_for, find_model


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module of the user's own, importable as `users_networks`."""
    (tmp_path / "users_networks.py").write_text(
        "from torch import nn\n"
        "def build(channels=4): return nn.Conv2d(3, channels, 3)\n"
        "def number(): return 3\n"
        "def broken(): raise RuntimeError('no luck')\n"
    )
    (tmp_path / "own_faulty.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("users_networks", None)


@pytest.fixture
def no_downloads(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("weights must not be downloaded")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name):
    model = find_model(name, num_classes=10, width=0.25)
    assert model(torch.randn(1, 3, 32, 32)).shape[:2] == (1, 10)


def test_arguments_reach_the_builder(user_module):
    assert find_model("resnet20", num_classes=3).fc.out_features == 3
    assert find_model("timm:resnet10t", num_classes=3).fc.out_features == 3
    assert find_model("users_networks:build", channels=5).out_channels == 5


@pytest.mark.parametrize("name", ["resnet18", "fcn_resnet50", "googlenet", "ssdlite320_mobilenet_v3_large"])
def test_torchvision_without_downloads(name, no_downloads):
    assert isinstance(find_model(f"torchvision:{name}"), nn.Module)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet65", "there is no built-in network 'resnet65'; did you mean 'resnet56' or"),
        ("resnet50", "there is no built-in network 'resnet50'; did you mean torchvision:resnet50 or timm:resnet50?"),
        ("torchvision:resnet51", "there is no torchvision network 'resnet51'; did you mean 'resnet50' or"),
        ("timm:efficientnet_b00", "there is no timm network 'efficientnet_b00'; did you mean 'efficientnet_b0' or"),
        ("users_networks:biuld", "there is no callable in users_networks 'biuld'; did you mean 'build'?"),
        ("own_network:build", "there is no module 'own_network'; run from the folder that holds it"),
        ("users_networks.cnn:build", "there is no module 'users_networks.cnn'; run from the folder that holds it"),
    ],
)
def test_wrong_names_suggest_near_ones(name, message, user_module):
    with pytest.raises(UnknownName) as raised:
        find_model(name)
    assert message in str(raised.value)


def test_a_fault_inside_the_users_module_is_not_a_wrong_name(user_module):
    with pytest.raises(InvalidModel, match=r"own_faulty cannot be imported: ModuleNotFoundError: .*no_such_package"):
        find_model("own_faulty:build")


def test_a_module_that_python_cannot_read(user_module, tmp_path):
    (tmp_path / "own_broken.py").write_text("def build(:\n")
    with pytest.raises(InvalidModel, match=r"own_broken cannot be imported: SyntaxError: .*own_broken\.py, line 1"):
        find_model("own_broken:build")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("users_networks.py:small", "users_networks:small"),
        ("./users_networks.py:small", "users_networks:small"),
        ("lib/own.py:small", r"lib.own:small, or own:small, from the folder that holds it \(cd lib\)"),
        ("../there/own:small", r"own:small, from the folder that holds it \(cd ../there\)"),
    ],
)
def test_a_file_is_not_a_module(user_module, name, remedy):
    with pytest.raises(UnknownName, match=f"is a file: name the module, {remedy}$"):
        find_model(name)


def test_what_does_not_build_a_module(user_module):
    with pytest.raises(InvalidModel, match=r"users_networks:number must return a torch.nn.Module, got int"):
        find_model("users_networks:number")
    with pytest.raises(InvalidModel, match="building users_networks:broken raised RuntimeError: no luck"):
        find_model("users_networks:broken")


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_missing_package_says_what_to_install(package, monkeypatch):
    for module in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf'{package} is not installed; run: pip install "secateur\[vision\]"'):
        find_model(f"{package}:resnet18")


def test_a_package_built_for_another_torch_is_one_clear_error(monkeypatch):
    def fail(package):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(MissingExtra, match=r"torchvision does not import beside torch .*nms does not exist"):
        find_model("torchvision:resnet18")


def test_examples_have_the_size_of_the_network():
    assert example_for(find_model("resnet20")).shape == (1, 3, 32, 32)
    assert example_for(find_model("resnet20"), (2, 3, 8, 8)).shape == (2, 3, 8, 8)
    assert example_for(find_model("timm:test_byobnet")).shape == (1, 3, 160, 160)
    assert example_for(nn.Conv2d(3, 4, 3)).shape == (1, 3, 224, 224)


def test_detectors_take_a_list_of_images():
    model = find_model("torchvision:ssdlite320_mobilenet_v3_large")
    (images,) = example_for(model, (2, 3, 64, 96))
    assert [image.shape for image in images] == [(3, 64, 96), (3, 64, 96)]
    with pytest.raises(InvalidExample, match="NxCxHxW, got 3x64x96"):
        example_for(model, (3, 64, 96))
