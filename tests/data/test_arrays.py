"""Datasets in memory."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from secateur.data.arrays import Arrays
from secateur.data.digits import digits
from secateur.errors import InvalidData, InvalidSetting

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def arrays(**options: Any) -> Arrays:
    return Arrays(torch.arange(10.0).reshape(10, 1, 1, 1), torch.arange(10) % 3, batch_size=4, **options)


def pictures(count: int = 200, dtype: torch.dtype = torch.uint8, **options: Any) -> Arrays:
    """Noise without black pixels."""
    images = torch.randint(1, 256, (count, 3, 5, 4), generator=torch.Generator().manual_seed(0))
    images = images.to(dtype) if dtype == torch.uint8 else images.to(dtype) / 255
    return Arrays(images, torch.arange(count) % 10, **{"batch_size": 64, **options})


def everything(batches: Any) -> Tensor:
    return torch.cat([images for images, _ in batches])


def test_batches_in_order_with_a_smaller_last_one() -> None:
    batches = list(arrays())
    assert len(arrays()) == len(batches) == 3
    assert [images.shape[0] for images, _ in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([images for images, _ in batches]).flatten(), torch.arange(10.0))
    assert all(torch.equal(labels, images.flatten().long() % 3) for images, labels in batches)
    assert len(arrays(drop_last=True)) == 2
    assert torch.equal(everything(arrays(drop_last=True)).flatten(), torch.arange(8.0))
    assert len(everything(arrays(drop_last=True, shuffle=True)).unique()) == 8
    data = Arrays(torch.zeros(4, 1), torch.arange(4, dtype=torch.uint8), 2, shuffle=True)
    assert next(iter(data))[1].dtype == torch.long
    moved = data.to("meta")
    assert (moved.images.is_meta, moved.labels.is_meta, moved.shuffle) == (True, True, True)


def test_shuffling_is_anew_each_time_and_by_seed() -> None:
    def order(seed: int) -> list[list[float]]:
        torch.manual_seed(seed)
        data = arrays(shuffle=True)
        return [torch.cat([images for images, _ in data]).flatten().tolist() for _ in range(2)]

    assert order(0) == order(0)
    assert order(0)[0] != order(0)[1]
    assert sorted(order(1)[0]) == list(range(10))


def test_parts() -> None:
    part = arrays().subset(0.6, None, torch.Generator().manual_seed(0))
    assert len(part.labels) == 6
    assert torch.equal(part.labels, part.images.flatten().long() % 3)
    part = arrays().subset(1.0, 2, torch.Generator().manual_seed(0))
    assert Counter(part.labels.tolist()) == {0: 2, 1: 2, 2: 2}
    assert torch.equal(part.labels, part.images.flatten().long() % 3)
    assert not torch.equal(part.labels, part.labels.sort().values)
    halves = [part.shard(rank, 2) for rank in range(2)]
    assert sorted(torch.cat([everything(half) for half in halves]).flatten()) == sorted(part.images.flatten())


def test_examples_held_out_are_tested_on_as_they_are() -> None:
    options: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.2,) * 3, "channels_last": True}
    data = pictures(1500, shuffle=True, crop=2, flip=True, augment=torch.neg, drop_last=True, **options)
    rest, held = data.hold_out(1100)
    assert vars(rest) == vars(replace(data, images=rest.images, labels=rest.labels))
    assert vars(held) == vars(Arrays(held.images, held.labels, 1000, **options))
    assert [len(labels) for _, labels in held] == [1000, 100]
    assert all(map(torch.equal, everything(held), everything(held)))
    # Each example is in one of the two, beside its label, in the order it had.
    stored = {image.numpy().tobytes(): place for place, image in enumerate(data.images)}
    places = [[stored[image.numpy().tobytes()] for image in part.images] for part in (rest, held)]
    assert sorted(places[0] + places[1]) == list(range(1500))
    assert all(part == sorted(part) for part in places)
    assert all(torch.equal(p.labels, data.labels[i]) for p, i in zip((rest, held), places, strict=True))


def test_what_is_held_out_is_drawn_by_the_seed_alone() -> None:
    def held(seed: int) -> list[float]:
        before = torch.get_rng_state()
        chosen = pictures().hold_out(50, seed)[1].images[:, 0, 0, 0].tolist()
        assert torch.equal(torch.get_rng_state(), before)
        return chosen

    first = held(0)
    torch.manual_seed(7)
    assert held(0) == first == pictures().hold_out(50)[1].images[:, 0, 0, 0].tolist()
    assert held(1) != first
    # From all over: a quarter of each half.
    ordered = Arrays(torch.arange(1000.0), torch.arange(1000), 10)
    assert abs(int((ordered.hold_out(250)[1].labels < 500).sum()) - 125) < 25


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("crop", "flip"), [(1, False), (2, False), (0, True), (2, True)])
def test_each_image_is_moved_and_mirrored_by_itself(dtype: torch.dtype, crop: int, flip: bool) -> None:
    torch.manual_seed(0)
    data = pictures(1000, dtype, crop=crop, flip=flip)
    stored = data.images / 255 if dtype == torch.uint8 else data.images
    moved = everything(data)
    assert moved.shape == stored.shape
    padded, places = F.pad(stored, [crop] * 4), range(2 * crop + 1)
    ways = [padded[:, :, y : y + 5, x : x + 4] for y in places for x in places]
    found = count_ways(moved, [*ways, *(way.flip(-1) for way in ways if flip)])
    assert min(found) > 0
    assert max(found) < 3 * min(found) + 10


def count_ways(images: Tensor, ways: list[Tensor]) -> list[int]:
    """How many of the images are as each of these ways would have made them; each is as one of them alone."""
    alike = torch.stack([(way == images).flatten(1).all(1) for way in ways])
    assert bool((alike.sum(0) == 1).all())
    return alike.sum(1).tolist()


@pytest.mark.parametrize("side", [1, 2, 3, 4])
@pytest.mark.parametrize("mean", [None, (2.0,) * 3])
def test_a_square_of_each_image_is_made_the_mean_colour(side: int, mean: tuple[float, ...] | None) -> None:
    torch.manual_seed(0)
    numbers: dict[str, Any] = {"mean": mean, "std": mean and (0.5,) * 3}
    plain, erased = (everything(pictures(1000, **numbers, erase=number)) for number in (0, side))
    ways = []
    for y in range(5):
        for x in range(4):
            top, left = y - side // 2, x - side // 2
            wanted = plain.clone()
            wanted[:, :, max(top, 0) : top + side, max(left, 0) : left + side] = 0
            ways.append(wanted)
    found = count_ways(erased, ways)
    assert max(found) < 3 * min(found)


def test_augmentation_is_anew_each_time_and_by_seed() -> None:
    def passes(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        data = pictures(crop=2, flip=True, erase=3, shuffle=True)
        return [everything(data) for _ in range(2)]

    assert all(map(torch.equal, passes(0), passes(0)))
    assert not torch.equal(*passes(0))
    assert not torch.equal(passes(0)[0], passes(1)[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_normalization_comes_last(dtype: torch.dtype) -> None:
    images = everything(pictures(100, dtype))
    assert torch.equal(images, pictures(100, dtype).images / (255 if dtype == torch.uint8 else 1))
    mean, std = (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)
    torch.manual_seed(0)
    plain = everything(pictures(100, dtype, crop=2))
    torch.manual_seed(0)
    normal = everything(pictures(100, dtype, crop=2, mean=mean, std=std))
    for channel in range(3):
        assert torch.allclose(normal[:, channel], (plain[:, channel] - mean[channel]) / std[channel])
        # The padding is black, not grey.
        black = normal[:, channel][plain[:, channel] == 0]
        assert black.numel() > 0
        assert torch.allclose(black, torch.full_like(black, -mean[channel] / std[channel]))
    assert normal.dtype == plain.dtype == (torch.float32 if dtype == torch.uint8 else dtype)


def test_an_own_augmentation_sees_images_as_they_are_stored() -> None:
    def invert(images: Tensor) -> Tensor:
        assert images.dtype == torch.uint8
        return 255 - images

    (images, _), *_ = pictures(augment=invert, mean=(0.0,) * 3, std=(1.0,) * 3)
    assert torch.equal(images, (255 - pictures().images[:64]) / 255)


@pytest.mark.parametrize("options", [{}, {"crop": 1}, {"erase": 2}, {"mean": (0.5,) * 3, "std": (0.5,) * 3}])
def test_order_in_memory(options: dict[str, Any]) -> None:
    for last, (images, _) in ((last, next(iter(pictures(channels_last=last, **options)))) for last in (False, True)):
        assert images.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        assert not images.is_contiguous(memory_format=torch.contiguous_format if last else torch.channels_last)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("own", [False, True])
def test_the_parts_of_all_processes_make_up_the_whole(world: int, own: bool) -> None:
    def noise(images: Tensor) -> Tensor:
        return images // 2 + torch.randint_like(images, 100)

    data = pictures(
        100,
        batch_size=14,
        shuffle=True,
        crop=1,
        flip=True,
        erase=2,
        augment=noise if own else None,
        mean=(0.5,) * 3,
        std=(1,) * 3,
    )
    torch.manual_seed(0)
    whole = list(data)
    parts = []
    for rank in range(world):
        torch.manual_seed(0)
        part = data.shard(rank, world)
        parts.append(list(part.weighted()))
        torch.manual_seed(0)
        assert all(torch.equal(a, b) for (_, (a, _)), (b, _) in zip(parts[-1], part, strict=True))
    # The last batch has two images, which three processes leave out.
    assert len(data.shard(0, world)) == len(parts[0]) == (8 if world == 2 else 7)
    for (images, labels), *cut in zip(whole, *parts, strict=world == 2):
        assert torch.equal(torch.cat([part[0] for _, part in cut]), images)
        assert torch.equal(torch.cat([part[1] for _, part in cut]), labels)
        sizes = [len(part[1]) for _, part in cut]
        assert max(sizes) - min(sizes) <= 1
        assert [weight for weight, _ in cut] == [size * world / len(labels) for size in sizes]
        # Weighted means of the parts come to the mean of the whole.
        mean = sum(weight * part[0].double().mean() for weight, part in cut) / world
        assert float(mean) == pytest.approx(float(images.double().mean()))


def made(**options: Any) -> Arrays:
    return Arrays(**{"images": torch.zeros(10, 3, 2, 2), "labels": torch.arange(10), "batch_size": 4, **options})


def test_a_small_part_is_a_batch_even_where_the_last_is_dropped() -> None:
    part = made(drop_last=True).subset(0.2, None, torch.Generator())
    assert [labels.shape[0] for _, labels in part] == [2]


def test_a_part_does_not_end_with_a_single_example() -> None:
    assert [labels.shape[0] for _, labels in made().subset(0.9, None, torch.Generator())] == [4, 4]


def test_classes_of_label_maps_cannot_be_drawn() -> None:
    maps = made(labels=torch.zeros(10, 2, 2).long())
    with pytest.raises(InvalidData, match=r"labels of shape \(10, 2, 2\) for 10 examples, wanted one class for each"):
        maps.subset(1.0, 2, torch.Generator())


@pytest.mark.parametrize(
    ("act", "got", "wanted"),
    [
        (lambda: made(labels=torch.arange(9)), "images of shape (10, 3, 2, 2) and labels of shape (9,)", "a label for"),
        (lambda: made(labels=torch.arange(10.0)), torch.float32, "numbers of classes"),
        (lambda: made(labels=torch.ones(10, dtype=torch.bool)), torch.bool, "numbers of classes"),
        (lambda: made(labels=torch.arange(10, device="meta")), "cpu and meta", "one device"),
        (lambda: made(drop_last=True, batch_size=11), 10, "11 examples"),
        (lambda: made(crop=-1), -1, "0 pixels or more"),
        (lambda: made(erase=-1), -1, "0 to 2 pixels"),
        (lambda: made(erase=3), 3, "0 to 2 pixels"),
        (lambda: made(erase=1, images=torch.zeros(10, 3, 2)), "10x3x2", "NxCxHxW"),
        (lambda: made(crop=1, images=torch.zeros(10, 3, 2)), "10x3x2", "NxCxHxW"),
        (lambda: made(flip=True, labels=torch.zeros(10, 2, 2).long()), None, "None"),
        (lambda: made(mean=(0.5,) * 3), [3, 0], "3 numbers each"),
        (lambda: made(mean=(0.5,), std=(0.5,)), [1, 1], "3 numbers each"),
        (lambda: made(mean=(0.5,) * 3, std=(0.5, 0.0, 0.5)), (0.5, 0.0, 0.5), "above 0"),
        *((lambda count=count: made().hold_out(count), count, "1 to 9") for count in (-1, 0, 10, 11)),
        (lambda: made().shard(2, 2), 2, "0 to 1"),
        (lambda: made().shard(0, 5), 4, "an example for each of 5 processes"),
    ],
)
def test_what_does_not_fit_is_refused(act: Any, got: Any, wanted: str) -> None:
    with pytest.raises(InvalidData) as caught:
        act()
    assert caught.value.got == got
    assert str(caught.value.wanted).startswith(wanted)


def test_a_batch_has_examples() -> None:
    with pytest.raises(InvalidSetting) as caught:
        made(batch_size=0)
    assert (caught.value.got, caught.value.wanted) == (0, "1 or more")


@on_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_on_a_gpu_no_batch_is_waited_for() -> None:
    data = pictures(shuffle=True, crop=2, flip=True, erase=2, mean=(0.5,) * 3, std=(1.0,) * 3, channels_last=True).to(
        "cuda"
    )
    batches = iter(data)
    next(batches)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert all(images.is_cuda and labels.is_cuda for images, labels in batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_digits() -> None:
    train, test = digits()
    assert (len(train.labels), len(test.labels)) == (1438, 359)
    assert set(train.labels.tolist()) == set(range(10))
    everything = torch.cat([train.images, test.images])
    assert abs(float(everything.mean())) < 1e-3
    assert abs(float(everything.std()) - 1) < 1e-3
    assert next(iter(train))[0].shape == (64, 1, 8, 8)
