"""Batches of photographs: by worker processes, and by a decoder like a GPU's."""

import io
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import LAYOUT, noise, to_bytes, write
from PIL import Image
from torch import Tensor

from secateur.data import decode as photos_decode
from secateur.data import gpu_reader, photos, views, workers
from secateur.data.gpu_reader import GpuReader
from secateur.data.photos import Photos
from secateur.data.views import Crops, ResizedCrops
from secateur.errors import InvalidData, InvalidSetting
from secateur.training.batches import draw, unaugmented
from secateur.training.shards import weighted

with_workers = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")


def some(folder: Path, count: int, ending: str = "png", **options: Any) -> Photos:
    paths = [write(folder / f"{i}.{ending}", noise(40 + i, 32, seed=i)) for i in range(count)]
    given: dict[str, Any] = {"crops": Crops(28, 32, random=True), "batch_size": 4, "shuffle": True, **options}
    return Photos(paths, [i % 3 for i in range(count)], LAYOUT, **given)


def decode(contents: list[Tensor]) -> list[Tensor]:
    """As torchvision's decoder on a GPU."""
    found = []
    for content in contents:
        try:
            image = Image.open(io.BytesIO(content.numpy().tobytes()))
            assert (image.format, image.mode in ("RGB", "L"), "progressive" in image.info) == ("JPEG", True, False)
            found.append(torch.from_numpy(np.array(image.convert("RGB"))).movedim(2, 0))
        except OSError as error:
            raise RuntimeError("nvjpegDecodeBatched failed") from error
    return found


@pytest.fixture(params=["workers", "decoder"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to make batches."""
    if request.param == "decoder":
        monkeypatch.setattr(photos, "gpu_decoder", lambda device: decode)
    return request.param


def epoch(data: Photos, seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    images, labels = zip(*data, strict=True)
    return torch.cat(images), torch.cat(labels)


@with_workers
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_follow_from_the_seed(tmp_path: Path, reader: str, workers: int) -> None:
    data = some(tmp_path, 12, "jpg", workers=workers)
    first, other, again = epoch(data, 0), epoch(data, 1), epoch(data, 0)
    assert first[0].shape == (12, 3, 28, 28)
    assert first[1].dtype == torch.long
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0])
    assert sorted(first[1].tolist()) == sorted(other[1].tolist()) == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("crops", [Crops(28, 32, random=True), ResizedCrops(28), Crops(28, 32)], ids=str)
def test_a_decoder_shows_what_workers_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crops: Crops) -> None:
    data = some(tmp_path, 10, "jpg", crops=crops)
    for index, kind in enumerate(("L", "CMYK")):
        Image.open(data.paths[index]).convert(kind).save(data.paths[index])
    write(tmp_path / "2.jpg", noise(seed=2), format="PNG")
    write(tmp_path / "3.jpg", noise(seed=3), progressive=True)
    by_workers = epoch(data, 0)
    monkeypatch.setattr(photos, "gpu_decoder", lambda device: decode)
    monkeypatch.setattr(gpu_reader, "AT_ONCE", 3)
    by_decoder = epoch(data, 0)
    assert torch.equal(by_workers[1], by_decoder[1])
    pairs = zip(by_workers[0], by_decoder[0], strict=True)
    assert max(int((to_bytes(one).int() - to_bytes(other).int()).abs().max()) for one, other in pairs) == 1


@pytest.mark.parametrize("crops", [Crops(28, 32, random=True), ResizedCrops(28), Crops(28, 32)], ids=str)
def test_images_that_are_kept_look_the_same(tmp_path: Path, crops: Crops, monkeypatch: pytest.MonkeyPatch) -> None:
    data = some(tmp_path, 10, crops=crops)
    Image.open(data.paths[0]).convert("L").save(data.paths[0])
    wanted = epoch(data, 0), epoch(data.subset(0.5, None, torch.Generator().manual_seed(0)), 0)
    kept = data.decoded()
    monkeypatch.setattr(Photos, "_read", None)
    # Groups of images that are resized together, instead of all.
    for most in (views.MOST_PIXELS, 2000):
        monkeypatch.setattr(views, "MOST_PIXELS", most)
        part = kept.subset(0.5, None, torch.Generator().manual_seed(0))
        for (images, labels), (again, same) in zip(wanted, (epoch(kept, 0), epoch(part, 0)), strict=True):
            assert torch.equal(labels, same)
            for one, other in zip(images, again, strict=True):
                assert (to_bytes(one).int() - to_bytes(other).int()).abs().max() <= 1


def test_images_that_are_kept_do_not_have_the_precision_of_the_network(tmp_path: Path) -> None:
    kept = some(tmp_path, 4).decoded()
    wanted = epoch(kept, 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, wanted, epoch(kept, 0)))


def test_a_damaged_image_is_not_kept(tmp_path: Path) -> None:
    data = some(tmp_path, 4, "jpg")
    (tmp_path / "3.jpg").write_bytes((tmp_path / "3.jpg").read_bytes()[:-40])
    with pytest.raises(InvalidData, match=r"3\.jpg"):
        data.decoded()


def test_training_is_shuffled_and_testing_is_not(tmp_path: Path, reader: str) -> None:
    data = some(tmp_path, 30, batch_size=8)
    test = replace(unaugmented(data), shuffle=False)
    images, labels = epoch(test, 0)
    assert labels.tolist() == data.targets
    for index, image in enumerate(images):
        wanted = Image.open(data.paths[index]).resize((32, 32), Image.Resampling.BILINEAR).crop((2, 2, 30, 30))
        assert np.abs(to_bytes(image).numpy().astype(int) - np.array(wanted)).max() <= 1
    assert [len(labels) for _, labels in data] == [8, 8, 8, 6]
    assert len(data) == 4
    assert epoch(data, 0)[1].tolist() != data.targets
    with pytest.raises(InvalidSetting):
        replace(data, batch_size=0)


def test_a_part_can_be_drawn(tmp_path: Path) -> None:
    data = some(tmp_path, 30, batch_size=8)
    generator = torch.Generator().manual_seed(0)
    part: Any = draw(data, 1.0, 2, generator)
    assert Counter(part.targets) == {0: 2, 1: 2, 2: 2}
    classes = dict(zip(data.paths, data.targets or (), strict=True))
    assert [classes[path] for path in part.paths] == part.targets
    assert part.shuffle
    # A last batch of one image would not train norms.
    assert len(draw(data, 17 / 30, None, generator).paths) == 16  # pyright: ignore
    with pytest.raises(InvalidSetting, match="no classes"):
        replace(data, targets=None).subset(1.0, 2, generator)


def test_images_alone(tmp_path: Path, reader: str) -> None:
    (batch,) = replace(some(tmp_path, 4), targets=None)
    assert isinstance(batch, Tensor)
    assert batch.shape == (4, 3, 28, 28)


def test_channels_last_is_another_order_in_memory(tmp_path: Path) -> None:
    data = some(tmp_path, 4)
    one, other = epoch(data, 0)[0], epoch(replace(data, channels_last=True), 0)[0]
    assert one.is_contiguous()
    assert other.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(one, other)


def test_a_pass_can_start_in_the_middle(tmp_path: Path, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = some(tmp_path, 15, "jpg")
    torch.manual_seed(0)
    whole = list(data)
    shown: list[Any] = []
    view = Crops.view

    def noting(self: Crops, part: Any, numbers: Any) -> Any:
        shown.append(part)
        return view(self, part, numbers)

    monkeypatch.setattr(Crops, "view", noting)
    torch.manual_seed(0)
    rest = data.weighted_from(2)
    torch.manual_seed(1)  # the seed of the pass is drawn before
    found = list(rest)
    assert [weight for weight, _ in found] == [1.0, 1.0]
    assert all(
        torch.equal(a, b)
        for (_, pair), other in zip(found, whole[2:], strict=True)
        for a, b in zip(pair, other, strict=True)
    )
    assert len(shown) == 7


def test_parts_for_processes_fit_together(tmp_path: Path, reader: str) -> None:
    data = some(tmp_path, 13, "jpg", batch_size=5)
    torch.manual_seed(0)
    whole = list(data)
    parts = []
    for rank in (0, 1):
        torch.manual_seed(0)
        parts.append(list(weighted(data.shard(rank, 2))))
    for (images, labels), one, other in zip(whole, *parts, strict=True):
        assert [one[0], other[0]] == [2 * len(part[1][1]) / len(labels) for part in (one, other)]
        assert torch.equal(torch.cat([one[1][0], other[1][0]]), images)
        assert torch.equal(torch.cat([one[1][1], other[1][1]]), labels)
    assert len(data.shard(0, 2)) == 3


@with_workers
@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_is_named(tmp_path: Path, reader: str, workers: int) -> None:
    data = some(tmp_path, 6, "jpg", workers=workers)
    content = (tmp_path / "3.jpg").read_bytes()
    for broken, got in ((b"", "cannot identify"), (content[:-40], "truncated"), (None, "there is no")):
        (tmp_path / "3.jpg").unlink() if broken is None else (tmp_path / "3.jpg").write_bytes(broken)
        with pytest.raises(InvalidData, match=f"3.jpg.*{got}" if broken is not None else f"{got}.*3.jpg"):
            list(data)


def test_what_a_decoder_refuses_goes_the_careful_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = some(tmp_path, 6, "jpg")
    wanted = epoch(data, 0)

    def refuse(contents: list[Tensor]) -> list[Tensor]:
        raise RuntimeError("nvjpegDecodeBatched failed")

    monkeypatch.setattr(photos, "gpu_decoder", lambda device: refuse)
    assert all(map(torch.equal, wanted, epoch(data, 0)))


@pytest.mark.parametrize("crops", [Crops(28, 32, random=True), ResizedCrops(28)], ids=str)
def test_torchvision_decodes_plain_jpegs_where_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crops: Crops
) -> None:
    data = some(tmp_path, 5, "jpg", crops=crops)
    write(tmp_path / "0.jpg", noise(seed=2), progressive=True)
    wanted = epoch(data, 0)
    taken: list[int] = []

    def by_torchvision(contents: list[Tensor], device: str) -> list[Tensor]:
        taken.append(len(contents[0]))
        if len(taken) == 2:
            raise RuntimeError("it is damaged")
        return decode(contents)

    monkeypatch.setattr(photos_decode, "torchvision_decodes", lambda: True)
    monkeypatch.setattr(photos_decode, "_decode", by_torchvision)
    assert all(map(torch.equal, wanted, epoch(data, 0)))
    assert len(taken) == 4


@with_workers
def test_workers_say_which_file_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str) -> None:
    data = some(tmp_path, 12, "jpg", workers=2)
    (tmp_path / "3.jpg").write_bytes((tmp_path / "3.jpg").read_bytes()[:-40])
    with pytest.raises(InvalidData, match=r"3\.jpg"):
        list(data)


@with_workers
@pytest.mark.parametrize("workers", [0, 2])
def test_files_that_find_no_place_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    data = some(tmp_path, 12, "jpg", workers=workers)
    monkeypatch.setattr(photos, "gpu_decoder", lambda device: decode)
    monkeypatch.setattr(gpu_reader, "AT_ONCE", 4)
    wanted = epoch(data, 0)
    length = max(Path(path).stat().st_size for path in data.paths)
    for size in (1, length // 4, length // 2):  # of four files in a batch, none, one or two fit
        monkeypatch.setattr(gpu_reader, "BYTES", size)
        assert all(map(torch.equal, wanted, epoch(data, 0)))
    monkeypatch.setattr(gpu_reader, "MAX_BYTES", 1000)
    with pytest.raises(InvalidData, match="1,000 at most"):
        epoch(data, 0)


@with_workers
def test_shared_memory_is_used_again_and_not_too_early(tmp_path: Path) -> None:
    data = some(tmp_path, 100, "jpg", shuffle=False, workers=2)

    def keep(contents: list[Tensor]) -> list[Tensor]:
        # Whoever wrote there meanwhile would change these.
        held = [content.clone() for content in contents]
        threading.Event().wait(0.02)
        assert all(map(torch.equal, held, contents))
        return decode(contents)

    made = list(GpuReader(data, keep)(data.shard(0, 1)._plan(0, 0)))
    slow = list(GpuReader(replace(data, workers=0), decode)(data.shard(0, 1)._plan(0, 0)))
    assert len(made) == 25
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(made, slow, strict=True))


def test_photographs_are_told_apart_by_identity(tmp_path: Path) -> None:
    data = some(tmp_path, 1)
    assert len({data, replace(data)}) == 2


def test_lack_of_memory_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(contents: list[Tensor]) -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(photos, "gpu_decoder", lambda device: fail)
    with pytest.raises(torch.OutOfMemoryError):
        list(some(tmp_path, 4, "jpg"))


def test_a_pass_that_is_left_stops_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photos, "gpu_decoder", lambda device: decode)
    data = some(tmp_path, 40, "jpg", batch_size=2)
    batches = iter(data)
    next(batches)
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("secateur-")]
    assert len(ours) >= 2
    batches.close()  # pyright: ignore
    for thread in ours:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize(("cores", "count"), [(1, 0), (4, 3), (64, 8)])
def test_workers_are_for_large_datasets(monkeypatch: pytest.MonkeyPatch, cores: int, count: int) -> None:
    monkeypatch.setattr(workers, "num_cores", lambda: cores)
    assert (workers.num_workers(1000), workers.num_workers(999)) == (count, 0)
