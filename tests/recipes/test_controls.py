"""What a pruned network is compared with."""

from pathlib import Path

import doing
import own_networks
import pytest
import torch
from torch import nn

from secateur import Plan, analyze, shrink_
from secateur.errors import InvalidModel, InvalidSetting
from secateur.models.fcn import Fcn32s
from secateur.models.lookup import find_model
from secateur.models.resnet_cifar import CifarResNet
from secateur.models.vgg_cifar import CifarVgg
from secateur.recipes.controls import initialize_, narrowed, solve_width
from secateur.recipes.jobs import Order

IMAGE = torch.zeros(1, 3, 32, 32)


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def test_a_quarter_of_the_macs_of_vgg_is_half_its_width() -> None:
    def build(width: float) -> nn.Module:
        return CifarVgg(num_classes=100, width=width)

    width = solve_width(build, IMAGE, 0.25)
    assert width == pytest.approx(0.5, abs=0.01)
    macs = [doing.count_macs(build(w), IMAGE) for w in (1.0, width)]
    assert macs[1] / macs[0] == pytest.approx(0.25, abs=0.005)
    # The paper's "shrunk" network has 3.7 million.
    assert doing.count_params(build(0.5)) == 3_707_972


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_no_other_width_of_resnet_is_nearer(share: float) -> None:
    def build(width: float) -> nn.Module:
        return CifarResNet(8, width=width)

    macs = {width: doing.count_macs(build(width / 16), IMAGE) for width in range(1, 17)}
    nearest = min(macs, key=lambda width: abs(macs[width] - share * macs[16]))
    found = solve_width(build, IMAGE, share)
    assert convolutions(build(found))[0].out_channels == nearest


def test_all_of_the_macs_is_the_whole_network() -> None:
    def build(width: float) -> nn.Module:
        return own_networks.plain(width=width)

    assert doing.count_params(build(solve_width(build, IMAGE, 1.0))) == doing.count_params(build(1.0))


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(InvalidSetting) as caught:
        solve_width(lambda width: own_networks.plain(width=width), IMAGE, share)
    assert caught.value.got == share


def test_an_order_is_narrowed_from_the_width_it_has(cifar: Path) -> None:
    order = Order(recipe="own_networks:plain@cifar10", data=str(cifar), width=4.0)
    found = narrowed(order, 0.25, seed=0)
    assert found.width == pytest.approx(2.0, abs=0.3)
    models = [own_networks.plain(10, width) for width in (4.0, found.width)]
    macs = [doing.count_macs(model, IMAGE) for model in models]
    assert macs[1] / macs[0] == pytest.approx(0.25, abs=0.03)


def test_ones_own_job_is_narrowed_too() -> None:
    found = narrowed(Order(recipe="own_networks:job", width=4.0), 0.25, seed=0)
    jobs = [own_networks.job(width) for width in (4.0, found.width)]
    macs = [doing.count_macs(job.model, job.example) for job in jobs]
    assert macs[1] / macs[0] == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("recipe", ["torchvision:squeezenet1_1@cifar10", "own_networks:job_of_one_width"])
def test_a_network_that_takes_no_width_is_named(recipe: str, cifar: Path) -> None:
    with pytest.raises(InvalidModel, match="width"):
        narrowed(Order(recipe=recipe, data=str(cifar) if "@" in recipe else None), 0.25, seed=0)


def cut(model: nn.Module, size: int) -> nn.Module:
    """Without a third of the channels of every group."""
    graph = analyze(model, torch.zeros(1, 3, size, size), probe=False)
    shrink_(model, Plan.random(graph, 0.33))
    return model


def spread(weight: torch.Tensor, wanted: float) -> None:
    assert weight.std().item() == pytest.approx(wanted, rel=5 / weight.numel() ** 0.5)


@pytest.mark.parametrize("build", [lambda: CifarResNet(8), lambda: CifarVgg(width=0.2)], ids=["resnet", "vgg"])
def test_our_networks_are_initialised_as_when_they_are_built(build) -> None:
    whole, model = build(), cut(build(), 32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.fill_(7.0)
    initialize_(model)
    for was, now in zip(convolutions(whole), convolutions(model), strict=True):
        assert now.out_channels < was.out_channels
        # He's, for what a layer puts out.
        spread(now.weight, (2 / (now.out_channels * now.kernel_size[0] ** 2)) ** 0.5)
        spread(was.weight, (2 / (was.out_channels * was.kernel_size[0] ** 2)) ** 0.5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert (module.weight == 1).all()
            assert not module.bias.any()
            assert not module.running_mean.any()
    assert isinstance(model.fc, nn.Linear)
    assert model.fc.weight.abs().max() <= model.fc.in_features**-0.5


def test_fcn_is_initialised_for_what_a_layer_takes_in_and_its_scores_at_zero() -> None:
    model = Fcn32s(width=0.05)
    shrink_(model, Plan.random(analyze(model, torch.zeros(1, 3, 40, 40), probe=False), 0.33))
    upsampling = model.get_buffer("upsampling").clone()
    initialize_(model)
    *filters, score = convolutions(model)
    for module in filters:
        spread(module.weight, (2 / module.weight[0].numel()) ** 0.5)
    assert not score.weight.any()
    assert torch.equal(model.get_buffer("upsampling"), upsampling)


def test_networks_of_others_get_torchs_defaults() -> None:
    model = cut(find_model("torchvision:squeezenet1_1", num_classes=5), 64)
    initialize_(model)
    for module in convolutions(model):
        bound = module.weight[0].numel() ** -0.5
        assert module.weight.abs().max() <= bound
        spread(module.weight, bound / 3**0.5)


def test_drawn_by_the_seed_alone() -> None:
    models = [own_networks.plain(), own_networks.plain()]
    for model in models:
        torch.manual_seed(3)
        initialize_(model)
    assert doing.same(dict(models[0].state_dict()), dict(models[1].state_dict()))
