"""Images with label maps that are kept in memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pictures import LAYOUT, MEAN, STD, noise, to_bytes, write
from torch import Tensor

from secateur.data.decode import read_map
from secateur.data.maps import Maps, compose
from secateur.data.scenes import Scenes, jittered, moved, read
from secateur.errors import InvalidData, InvalidSetting
from secateur.training.shards import shard


def scenes(count: int = 10, **options: Any) -> Scenes:
    """The classes of the pixels are written in their colours."""
    labels = torch.randint(12, (count, 6, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Scenes((20 * labels[:, None]).expand(-1, 3, -1, -1).clone(), labels, **{"batch_size": 4, **options})


def drawn(*numbers: float) -> Tensor:
    return torch.tensor([numbers])


def test_images_and_maps_as_they_are() -> None:
    data = scenes()
    batches = list(data)
    assert len(data) == len(batches) == 3
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert torch.equal(torch.stack([to_bytes(image) for image in images]).movedim(-1, 1), data.images)
    assert torch.equal(labels, data.labels.long())
    last = next(iter(replace(data, channels_last=True)))[0]
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert data.to("meta").labels.is_meta


def test_twice_as_large_at_the_upper_left() -> None:
    images, labels = torch.rand(1, 3, 6, 8), torch.arange(48).view(1, 6, 8)
    large, classes = moved(images, labels, (0.5, 2.0), False, drawn(1.0, 0.0, 0.0, 0.0))
    wanted = F.interpolate(images, scale_factor=2, mode="bilinear")[:, :, :6, :8]
    assert torch.allclose(large[:, :, 1:, 1:], wanted[:, :, 1:, 1:], atol=1e-6)  # at the border zeros come in
    assert torch.equal(classes, labels.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, :6, :8].float())


def test_half_as_large_with_void_around() -> None:
    images, labels = torch.rand(1, 3, 8, 8), torch.arange(64).view(1, 8, 8)
    small, classes = moved(images, labels, (0.5, 2.0), False, drawn(0.0, 1.0, 0.0, 0.0))
    # In whichever corner, the image is there in whole, and nothing else is.
    seen = classes != 255
    rows, columns = seen[0].any(1), seen[0].any(0)
    assert (int(rows.sum()), int(columns.sum()), int(seen.sum())) == (4, 4, 16)
    assert torch.allclose(small[0][:, seen[0]].view(3, 4, 4), F.avg_pool2d(images, 2)[0], atol=1e-6)
    assert not small[0][:, ~rows].any()


def test_mirrored_half_of_the_time() -> None:
    images, labels = torch.rand(1, 3, 6, 8), torch.arange(48).view(1, 6, 8)
    for number, turned in ((0.2, True), (0.7, False)):
        image, classes = moved(images, labels, (1.0, 1.0), True, drawn(0.5, 0.5, 0.5, number))
        assert torch.allclose(image, images.flip(3) if turned else images, atol=1e-5)
        assert torch.equal(classes, (labels.flip(2) if turned else labels).float())


def test_other_colours_stay_between_black_and_white() -> None:
    images = torch.rand(4, 3, 5, 5)
    assert jittered(images, 0.0, torch.rand(4, 3)) is images
    assert torch.allclose(jittered(images, 0.4, torch.full((4, 3), 0.5)), images, atol=1e-6)
    dark = jittered(images, 0.4, torch.tensor([[0.0, 0.5, 0.5]] * 4))
    assert torch.allclose(dark, 0.6 * images, atol=1e-6)
    grey = jittered(images, 1.0, torch.tensor([[0.5, 0.5, 0.0]] * 4))
    assert torch.allclose(grey, images.mean(1, keepdim=True).expand_as(grey), atol=1e-6)
    wild = jittered(images, 0.9, torch.rand(4, 3))
    assert wild.min() >= 0
    assert wild.max() <= 1


def test_images_and_maps_are_moved_alike() -> None:
    """With one class per image, what is not void has its colour."""
    torch.manual_seed(0)
    labels = torch.arange(40, dtype=torch.uint8)[:, None, None].expand(-1, 12, 16).clone()
    data = Scenes((5 * labels[:, None]).expand(-1, 3, -1, -1).clone(), labels, 40, True, (0.5, 2.0), flip=True)
    ((images, classes),) = data
    assert set(classes.unique().tolist()) == {*range(40), 255}
    inside = F.max_pool2d((classes == 255).float(), 3, 1, 1) == 0  # at the border zeros come in
    inside[:, [0, -1]] = False
    inside[:, :, [0, -1]] = False
    shade = ((images * STD[:, None, None] + MEAN[:, None, None]) * 255 / 5).mean(1)
    assert torch.allclose(shade[inside], classes[inside].float(), atol=1e-2)
    assert inside.float().mean() > 0.3


def test_chance_follows_the_seed() -> None:
    data = scenes(shuffle=True, scale=(0.5, 2.0), flip=True, jitter=0.4)

    def batches(seed: int, source: Any = data) -> list[Tensor]:
        torch.manual_seed(seed)
        return [images for images, _ in source]

    assert all(map(torch.equal, batches(0), batches(0)))
    assert not torch.equal(batches(0)[0], batches(1)[0])
    # Two processes see halves of the batches that one would see.
    halves = [batches(0, shard(data, rank, 2)) for rank in range(2)]
    assert all(torch.allclose(torch.cat(pair), whole) for *pair, whole in zip(*halves, batches(0), strict=True))


def test_a_random_part() -> None:
    data, generator = scenes(shuffle=True, flip=True), torch.Generator().manual_seed(0)
    part = data.subset(0.5, None, generator)
    assert (len(part.labels), part.flip, part.shuffle) == (4, True, True)  # a fifth one would be a batch of its own
    assert all((part.labels[i] == data.labels).flatten(1).all(1).any() for i in range(4))
    with pytest.raises(InvalidSetting, match="no class each"):
        data.subset(1.0, 1, generator)


def test_files_of_one_size_are_read(tmp_path: Path) -> None:
    values = np.random.default_rng(0).choice(np.array([0, 1, 7], np.uint8), (32, 40))
    paths = [write(tmp_path / f"{n}.png", noise(seed=n)) for n in range(3)]
    maps = [write(tmp_path / f"map{n}.png", np.roll(values, n)) for n in range(3)]
    files = Maps(paths, maps, {0: 0, 1: 1, 7: 255}, compose(), LAYOUT, read_map)
    found = read(files, 2)
    assert torch.equal(found.images, torch.stack([torch.from_numpy(noise(seed=n)).movedim(-1, 0) for n in range(3)]))
    assert np.array_equal(found.labels[1], np.where(np.roll(values, 1) == 7, 255, np.roll(values, 1)))
    # The same as one by one.
    assert all(torch.allclose(one, two[0], atol=1e-5) for one, two in zip(files[0], next(iter(found)), strict=True))
    write(tmp_path / "2.png", noise(width=30))
    write(tmp_path / "map2.png", values[:, :30])
    with pytest.raises(InvalidData) as caught:
        read(files, 2)
    assert (caught.value.got, caught.value.wanted) == ("30x32 pixels", "40x32 pixels, as the others")
