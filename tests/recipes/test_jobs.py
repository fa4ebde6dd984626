"""From an order to a network, an example of its input, and a task."""

from pathlib import Path
from typing import Any

import miniature  # pyright: ignore
import miniature_images  # pyright: ignore
import own_networks
import pytest
import torch
from torch import Tensor, nn

from secateur.data.arrays import Arrays
from secateur.data.photos import Photos
from secateur.data.views import ResizedCrops
from secateur.errors import InvalidData, InvalidModel, InvalidSetting, SecateurError
from secateur.models.resnet_cifar import CifarResNet
from secateur.models.vgg_cifar import CifarVgg
from secateur.recipes.jobs import Job, Order, build, narrower
from secateur.recipes.paper import RECIPES
from secateur.recipes.recipe import Recipe

CPU = torch.device("cpu")


def built(recipe: str, data: Path | None = None, seed: int = 0, **values) -> Job:
    return build(Order(recipe=recipe, data=str(data) if data is not None else None, **values), seed, CPU)


def batches(job: Job) -> list[tuple[Tensor, Tensor]]:
    return list(job.task.train)


def looked_at(job: Job) -> list[Tensor]:
    """The images that the task's metrics look at."""
    seen: list[Tensor] = []

    class Listener(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.anywhere = nn.Parameter(torch.zeros(1))

        def forward(self, images: Tensor) -> Tensor:
            seen.extend(images)
            return torch.zeros(len(images), 10)

    job.task.metrics(Listener())
    return seen


def test_a_built_in_network_on_cifar(cifar: Path) -> None:
    job = built("resnet20@cifar10", cifar)
    assert isinstance(job.model, CifarResNet)
    assert job.example.shape == (1, 3, 32, 32)
    assert job.model(job.example).shape == (1, 10)
    assert job.network == {"name": "resnet20", "options": {"num_classes": 10}}
    assert len(looked_at(job)) == 8


def test_photographs_as_a_recipe_wants_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    miniature_images.write_class_folders(tmp_path)
    recipe = Recipe(network="resnet20", data="class_folders", input_size=(3, 28, 28), crop_area=0.5, batch_size=8)
    monkeypatch.setitem(RECIPES, "small-photographs", lambda: recipe)
    job = built("small-photographs", tmp_path, in_memory=True)
    train, test = job.task.train, looked_at(job)
    assert isinstance(train, Photos)
    assert train.crops == ResizedCrops(28, (0.5, 1.0))
    assert {tuple(image.shape) for image in test} == {tuple(job.example.shape[1:])} == {(3, 28, 28)}
    assert train.kept is not None
    assert len(train.kept) == len(train.paths)
    assert built("small-photographs", tmp_path, image_size=14).example.shape == (1, 3, 14, 14)
    # It is the same run where images are.
    orders = [Order(recipe="small-photographs", in_memory=kept) for kept in (False, True)]
    assert orders[0].compared() == orders[1].compared()


def test_only_photographs_are_decoded_into_memory(cifar: Path) -> None:
    with pytest.raises(InvalidSetting, match="in_memory is for photographs"):
        built("resnet20@cifar10", cifar, in_memory=True)


def test_images_without_colours(tmp_path: Path) -> None:
    miniature.write_fashion_mnist(tmp_path, num_train=20, num_test=10)
    job = built("vgg16_m@fashion_mnist", tmp_path, width=0.1)
    assert isinstance(job.model, CifarVgg)
    assert job.example.shape == (1, 1, 28, 28)
    assert job.model.eval()(job.example).shape == (1, 10)
    images, labels = batches(job)[0]
    assert images.shape[1:] == (1, 28, 28)
    assert job.task.loss(job.model, (images, labels)).isfinite()
    assert job.task.metrics(job.model)["accuracy"] >= 0


def test_a_network_of_torchvision_on_ones_own_images(tmp_path: Path) -> None:
    miniature_images.write_class_folders(tmp_path, num_classes=4, per_class=2)
    job = built("torchvision:resnet18@class_folders", tmp_path, batch_size=8)
    assert type(job.model).__module__ == "torchvision.models.resnet"
    assert job.network == {"name": "torchvision:resnet18", "options": {"num_classes": 4}}
    assert job.model.eval()(job.example).shape == (1, 4)
    ((images, labels),) = batches(job)
    assert images.shape == (8, 3, 224, 224)
    assert sorted(labels.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_network_of_ones_own_on_cifar(cifar: Path) -> None:
    job = built("own_networks:plain@cifar10", cifar, width=0.5)
    assert job.network == {"name": "own_networks:plain", "options": {"num_classes": 10, "width": 0.5}}
    assert job.model(job.example).shape == (1, 10)
    assert job.model[0].out_channels == 4  # pyright: ignore


def test_images_without_labels(tmp_path: Path) -> None:
    miniature_images.write_class_folders(tmp_path, num_classes=4, per_class=2)
    job = built("own_networks:plain@images", tmp_path, width=0.5, batch_size=16)
    assert job.network == {"name": "own_networks:plain", "options": {"width": 0.5}}
    assert job.model.eval()(job.example).shape == (1, 2)
    (images,) = job.task.train
    assert images.shape == (12, 3, 224, 224)
    assert job.task.loss(job.model, images).isfinite()
    assert not job.task.labelled


def test_label_maps(tmp_path: Path) -> None:
    miniature_images.write_camvid(tmp_path, num_images=2)
    job = built("fcn32s@camvid", tmp_path, width=0.03, batch_size=2)
    assert job.model(job.example).shape == (1, 11, 360, 480)
    ((images, labels),) = batches(job)
    assert images.shape == (2, 3, 32, 64)
    assert labels.shape == (2, 32, 64)
    assert set(job.task.metrics(job.model)) == {"miou", "pixel_accuracy"}


def test_the_loss_of_fcn_is_summed_over_the_pixels(tmp_path: Path) -> None:
    miniature_images.write_voc2011_sbd(tmp_path, num_images=1)
    job = built("fcn32s-voc", tmp_path, width=0.03)
    ((images, labels),) = batches(job)
    # Its scores begin at zero, so that every pixel that counts costs log(21).
    counted = int((labels != 255).sum())
    assert job.task.loss(job.model, (images, labels)).item() == pytest.approx(counted * 3.0445224, rel=1e-5)


def test_top_5_on_imagenet(tmp_path: Path) -> None:
    miniature_images.write_imagenet(tmp_path, num_classes=2, per_class=2)
    job = built("resnet50-imagenet", tmp_path, batch_size=2)
    assert job.network == {"name": "torchvision:resnet50", "options": {"num_classes": 2}}
    assert "top5" in job.task.metrics(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)))


def test_the_seed_decides_the_weights(cifar: Path) -> None:
    one, same, other = (built("resnet20@cifar10", cifar, seed).model.state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["conv1.weight"], other["conv1.weight"])


def test_building_leaves_the_users_random_numbers_alone(cifar: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    built("resnet20@cifar10", cifar)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("wanted", "got"), [(None, 40), (16, 16)])
def test_the_size_of_a_batch(cifar: Path, wanted: int | None, got: int) -> None:
    # The recipe's is 128, and there are 40 images.
    images, _ = batches(built("resnet20@cifar10", cifar, batch_size=wanted))[0]
    assert len(images) == got


@pytest.mark.parametrize(("recipe", "width", "channels"), [("resnet20@cifar10", 0.25, 4), ("vgg16_m@cifar10", 0.5, 32)])
def test_width_is_times_the_channels_of_every_layer(cifar: Path, recipe: str, width: float, channels: int) -> None:
    whole, narrow = built(recipe, cifar), built(recipe, cifar, width=width)
    first = next(module for module in narrow.model.modules() if isinstance(module, nn.Conv2d))
    assert first.out_channels == channels
    sizes = [
        [module.out_channels for module in job.model.modules() if isinstance(module, nn.Conv2d)]
        for job in (whole, narrow)
    ]
    assert sizes[1] == [round(width * size) for size in sizes[0]]


def test_narrower_is_relative_to_the_width_that_was_ordered(cifar: Path) -> None:
    order = Order(recipe="vgg16_m@cifar10", data=str(cifar), width=0.5)
    model = narrower(order, build(order, 0, CPU))(0.25)
    assert model.features[0].out_channels == 8  # pyright: ignore


@pytest.mark.parametrize("count", [1, 15])
def test_images_held_out_are_tested_on_and_not_trained_on(cifar: Path, count: int) -> None:
    plain, held = (built("resnet20@cifar10", cifar, hold_out=number) for number in (0, count))
    train, whole = held.task.train, plain.task.train
    assert isinstance(train, Arrays)
    assert isinstance(whole, Arrays)
    assert len(train.labels) == 40 - count
    test = torch.stack(looked_at(held))
    assert len(test) == count

    def keys(images: Tensor) -> set[bytes]:
        return {bytes(image.flatten().tolist()) for image in images}

    # The test images come normalised; undo that to compare bytes.
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (train.mean, train.std))
    pixels = ((test * std + mean) * 255).round().to(torch.uint8)
    assert keys(pixels) | keys(train.images) == keys(whole.images)
    assert not keys(pixels) & keys(train.images)


def test_the_same_images_are_held_out_whatever_the_seed(cifar: Path) -> None:
    one, other = (built("resnet20@cifar10", cifar, seed, hold_out=10) for seed in (0, 5))
    assert torch.equal(torch.stack(looked_at(one)), torch.stack(looked_at(other)))


@pytest.mark.parametrize(
    ("recipe", "given", "side"), [("cifar10", None, 0), ("cifar10", 3, 3), ("ours", None, 8), ("ours", 0, 0)]
)
def test_training_images_are_erased_as_the_recipe_says_or_the_user(
    cifar: Path, recipe: str, given: int | None, side: int
) -> None:
    names = {"cifar10": "resnet20@cifar10", "ours": "resnet56-cifar10-ours"}
    job = built(names[recipe], cifar, erase=given, batch_size=4, hold_out=5)
    assert isinstance(job.task.train, Arrays)
    assert job.task.train.erase == side
    plain = built("resnet20@cifar10", cifar, hold_out=5)
    assert torch.equal(torch.stack(looked_at(job)), torch.stack(looked_at(plain)))


def test_ones_own_job() -> None:
    job = built("own_networks:job")
    assert job.network is None
    assert job.model[0].out_channels == 8  # pyright: ignore
    assert built("own_networks:job", width=0.5).model[0].out_channels == 4  # pyright: ignore
    narrow = narrower(Order(recipe="own_networks:job", width=0.5), job)(0.5)
    assert narrow[0].out_channels == 2  # pyright: ignore


def test_the_seed_decides_the_weights_of_ones_own_job() -> None:
    one, again, other = (built("own_networks:unseeded", None, seed).model[0].weight for seed in (3, 3, 4))  # pyright: ignore
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_ones_own_job_moves_with_its_data() -> None:
    job = own_networks.job().to(torch.device("meta"))
    assert job.example.device.type == "meta"
    assert isinstance(job.task.train, Arrays)
    assert job.task.train.images.device.type == "meta"
    assert next(job.model.parameters()).device.type == "meta"


@pytest.mark.parametrize(
    ("recipe", "values", "kind", "word"),
    [
        ("digits", {"data": "there"}, InvalidData, "folder"),
        ("resnet20@cifar10", {}, InvalidData, "folder"),
        ("digist", {}, InvalidSetting, "'digits'"),
        ("table1", {}, InvalidSetting, "experiment"),
        ("resnet21@digits", {}, InvalidSetting, "'resnet20'"),
        ("own_networks:plain", {}, InvalidModel, "Sequential"),
        ("own_networks:without_task", {}, InvalidData, "NoneType"),
        ("own_networks:jobs", {}, InvalidSetting, "'job'"),
        ("torchvision:resnet18@digits", {"width": 0.5}, InvalidModel, "torchvision:resnet18"),
        ("own_networks:job_of_one_width", {"width": 0.5}, InvalidModel, "width"),
        ("digits", {"hold_out": 1438}, SecateurError, "1438"),
        ("digits", {"hold_out": -1}, SecateurError, "-1"),
        ("digits", {"erase": 9}, SecateurError, "9"),
        ("digits", {"batch_size": "64"}, InvalidSetting, "batch_size"),
        ("digits", {"weights": 3}, InvalidSetting, "weights"),
        ("digits", {"batch_size": 0}, SecateurError, "batch_size"),
        ("digits", {"batch_size": -1}, SecateurError, "batch_size"),
        ("resnet20@digits", {"width": 0.0}, InvalidSetting, "width"),
        *(("own_networks:job", {name: 1}, InvalidSetting, name) for name in ("batch_size", "hold_out", "erase")),
        ("own_networks:job", {"data": "somewhere"}, InvalidSetting, "data"),
    ],
)
def test_a_mistake_is_named(recipe: str, values: dict[str, Any], kind: type[Exception], word: str) -> None:
    with pytest.raises(kind) as caught:
        built(recipe, **values)
    assert word in str(caught.value)


def test_erasing_is_for_datasets_in_memory(tmp_path: Path) -> None:
    miniature_images.write_class_folders(tmp_path, num_classes=2, per_class=2)
    with pytest.raises(InvalidSetting, match="erase"):
        built("torchvision:resnet18@class_folders", tmp_path, erase=1)


def test_holding_out_is_for_images_with_a_class(tmp_path: Path) -> None:
    miniature_images.write_camvid(tmp_path)
    with pytest.raises(InvalidSetting, match="hold_out"):
        built("fcn32s@camvid", tmp_path, hold_out=1)


def test_photographs_of_a_size_and_some_held_out(tmp_path: Path) -> None:
    miniature_images.write_class_folders(tmp_path, num_classes=2, per_class=4)
    job = built("own_networks:plain@class_folders", tmp_path, image_size=32, hold_out=2)
    assert job.example.shape == (1, 3, 32, 32)
    assert {images.shape[1:] for images, _ in batches(job)} == {(3, 32, 32)}
    assert job.files is not None
    assert [len(job.files[part]) for part in ("train", "test")] == [6, 2]
    assert len(looked_at(job)) == 2
    assert built("own_networks:plain@class_folders", tmp_path).files is None


def test_sizes_that_cannot_be_chosen(cifar: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"CIFAR-10.*got 64"):
        built("resnet20@cifar10", cifar, image_size=64)
    with pytest.raises(InvalidSetting, match="image_size"):
        built("own_networks:job", image_size=64)
