"""Datasets in memory."""

from collections import Counter

import torch

from secateur.data.arrays import Arrays, random_shift
from secateur.data.digits import digits


def arrays(**options) -> Arrays:
    return Arrays(torch.arange(10.0).reshape(10, 1, 1, 1), torch.arange(10) % 3, batch_size=4, **options)


def test_batches_in_order_with_a_smaller_last_one() -> None:
    batches = list(arrays())
    assert len(arrays()) == len(batches) == 3
    assert [images.shape[0] for images, _ in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([images for images, _ in batches]).flatten(), torch.arange(10.0))
    assert all(torch.equal(labels, images.flatten().long() % 3) for images, labels in batches)


def test_shuffling_is_anew_each_time_and_by_seed() -> None:
    def order(seed: int) -> list[list[float]]:
        torch.manual_seed(seed)
        data = arrays(shuffle=True)
        return [torch.cat([images for images, _ in data]).flatten().tolist() for _ in range(2)]

    assert order(0) == order(0)
    assert order(0)[0] != order(0)[1]
    assert sorted(order(1)[0]) == list(range(10))


def test_parts() -> None:
    part = arrays().subset(0.5, None, torch.Generator().manual_seed(0))
    assert len(part.labels) == 5
    assert torch.equal(part.labels, part.images.flatten().long() % 3)
    part = arrays().subset(1.0, 2, torch.Generator().manual_seed(0))
    assert Counter(part.labels.tolist()) == {0: 2, 1: 2, 2: 2}
    assert torch.equal(part.labels, part.images.flatten().long() % 3)


def test_shifts_move_each_image_by_itself_and_bring_in_zeros() -> None:
    torch.manual_seed(0)
    images = torch.rand(200, 2, 5, 4) + 1
    moved = random_shift(images, 1)
    assert moved.shape == images.shape
    found = Counter()
    for before, after in zip(images, moved, strict=True):
        padded = torch.nn.functional.pad(before, [1, 1, 1, 1])
        offsets = [(y, x) for y in range(3) for x in range(3) if torch.equal(padded[:, y : y + 5, x : x + 4], after)]
        assert len(offsets) == 1
        found[offsets[0]] += 1
    assert len(found) == 9


def test_digits() -> None:
    train, test = digits()
    assert (len(train.labels), len(test.labels)) == (1438, 359)
    assert set(train.labels.tolist()) == set(range(10))
    everything = torch.cat([train.images, test.images])
    assert abs(float(everything.mean())) < 1e-3
    assert abs(float(everything.std()) - 1) < 1e-3
    assert next(iter(train))[0].shape == (64, 1, 8, 8)
