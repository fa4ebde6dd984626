"""Detection: the loss and the mAP by hand, and detectors of torchvision that are pruned."""

import sys
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD, SSDHead

import secateur
from secateur import InvalidData, TickTock, detection
from secateur.errors import MissingExtra
from secateur.training.shards import shard

SIZE = 64
COLOURS = torch.tensor([[1.0, 0.1, 0.1], [0.1, 0.2, 1.0]])


def draw(count: int, seed: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Red and blue rectangles, one or two in a picture."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(count):
        image = 0.1 * torch.rand(3, SIZE, SIZE, generator=generator)
        boxes, labels = [], []
        for _ in range(int(torch.randint(1, 3, (), generator=generator))):
            width, height = torch.randint(14, 28, (2,), generator=generator).tolist()
            left, top = (int(torch.randint(0, SIZE - side, (), generator=generator)) for side in (width, height))
            label = int(torch.randint(2, (), generator=generator))
            image[:, top : top + height, left : left + width] = COLOURS[label][:, None, None]
            boxes.append([left, top, left + width, top + height])
            labels.append(label + 1)
        drawn.append((image, {"boxes": torch.tensor(boxes).float(), "labels": torch.tensor(labels)}))
    return drawn


def loader(data: Any, size: int = 4, shuffle: bool = False) -> DataLoader:
    generator = torch.Generator().manual_seed(0) if shuffle else None
    return DataLoader(data, size, shuffle, collate_fn=lambda batch: tuple(zip(*batch)), generator=generator)  # noqa: B905


class Backbone(nn.Sequential):
    out_channels = 32

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inner, outer, stride in [(3, 16, 2), (16, 24, 2), (24, 32, 2), (32, 32, 1)]:
            layers += [nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
        super().__init__(*layers)


MEAN: dict[str, Any] = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
SIDE: dict[str, Any] = {"min_size": SIZE, "max_size": SIZE}
ANCHORS = AnchorGenerator(((16, 24),), ((0.7, 1.0, 1.4),))
DETECTORS: dict[str, Any] = {
    "fcos": lambda: FCOS(Backbone(), 3, anchor_generator=AnchorGenerator(((8,),), ((1.0,),)), **SIDE, **MEAN),
    "retinanet": lambda: RetinaNet(Backbone(), 3, anchor_generator=ANCHORS, **SIDE, **MEAN),
    "faster_rcnn": lambda: FasterRCNN(
        Backbone(), 3, rpn_anchor_generator=ANCHORS, box_roi_pool=torchvision.ops.MultiScaleRoIAlign(["0"], 4, 2),
        rpn_post_nms_top_n_train=40, rpn_post_nms_top_n_test=40, box_batch_size_per_image=32, **SIDE, **MEAN,
    ),
    "ssd": lambda: SSD(
        Backbone(), DefaultBoxGenerator([[2]], scales=[0.25, 0.4]), (SIZE, SIZE), 3,
        head=SSDHead([32], [4], 3), **MEAN,
    ),
}  # fmt: skip


@pytest.fixture(params=DETECTORS)
def detector(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return DETECTORS[request.param]()


class Told(nn.Module):
    """Finds what it is told, and loses what it is told."""

    def __init__(self, found: Any = None, **losses: float) -> None:
        super().__init__()
        self.one, self.found, self.losses = nn.Parameter(torch.ones(())), found, losses

    def forward(self, images: Any, targets: Any = None) -> Any:
        if self.training:
            return {name: value * self.one for name, value in self.losses.items()}
        return self.found


def test_the_loss_is_the_sum() -> None:
    task, batch = detection([]), next(iter(loader(draw(2, 0))))
    assert task.loss(Told(one=0.5, two=0.25), batch).item() == 0.75
    with pytest.raises(InvalidData, match="no losses"):
        task.loss(Told(), batch)


@pytest.mark.slow  # torchmetrics takes long to import
def test_map_by_hand() -> None:
    """One box is found, one only by 62%, and a third is not there."""
    truth = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]])
    found = torch.tensor([[0.0, 0, 10, 10], [40, 40, 50, 50], [20, 20, 30, 26.2]])
    target = {"boxes": truth, "labels": torch.ones(2, dtype=torch.long)}
    answer = {"boxes": found, "scores": torch.tensor([0.9, 0.8, 0.7]), "labels": torch.ones(3, dtype=torch.long)}
    # Recall up to 0.5 has a precision of 1, at 51 of 101 places; beyond it 2/3, where the second box counts as found.
    both, one = (51 + 50 * 2 / 3) / 101, 51 / 101
    images = [torch.zeros(3, 64, 64)]
    metrics = detection([], [(images, [target])]).metrics(Told([answer]))
    assert metrics == {"map": pytest.approx(100 * (3 * both + 7 * one) / 10), "map50": pytest.approx(100 * both)}
    none = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
    with pytest.raises(InvalidData, match="no boxes"):
        detection([], [(images, [none])]).metrics(Told([{**none, "scores": torch.zeros(0)}]))


def test_scores_are_taken_in_evaluation_mode(detector: nn.Module) -> None:
    """Norms keep their statistics, the loss has gradients for all that trains, and modes come back."""
    batch = next(iter(loader(draw(4, 0))))
    before = {name: tensor.clone() for name, tensor in detector.named_buffers()}
    for training in (False, True):
        detector.train(training).zero_grad()
        detection([]).loss(detector, batch).backward()
        assert all(module.training == training for module in detector.modules())
        assert all(p.grad is not None for p in detector.parameters() if p.requires_grad)
        same = [torch.equal(tensor, before[name]) for name, tensor in detector.named_buffers()]
        assert all(same) != training


def test_other_batches_are_refused() -> None:
    good = draw(2, 0)
    images, targets = zip(*good, strict=True)
    task = detection([])
    for batch in (good, (torch.stack(images), targets[0]), (images, targets[:1]), ([], []), (images[0], targets)):
        with pytest.raises(InvalidData, match="collate_fn"):
            task.loss(Told(one=1.0), batch)
    assert detection([], batch=("image", "boxes")).loss(Told(one=1.0), {"boxes": targets, "image": images, "id": 1})
    with pytest.raises(InvalidData, match="DataLoader"):
        next(iter(shard([(images, targets)], 0, 2)))
    assert len(next(iter(shard(loader(good, 2), 0, 2)))[0]) == 1


def test_a_missing_package_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pycocotools", "pycocotools.mask"):
        monkeypatch.setitem(sys.modules, package, None)
    assert detection([]).evaluate is None
    with pytest.raises(MissingExtra, match=r"secateur\[detection\]"):
        detection([], [])


def test_a_list_of_images_is_not_repaired() -> None:
    model, data = DETECTORS["fcos"](), loader(draw(4, 0))
    graph = secateur.analyze(model, ([torch.rand(3, SIZE, SIZE)],), probe=False)
    with pytest.raises(InvalidData, match="a list of images"):
        secateur.repair(model, secateur.Plan.random(graph, 0.9), data)


EXAMPLE = ([torch.rand(3, SIZE, SIZE)],)


@pytest.mark.slow
@pytest.mark.parametrize("detector", ["fcos", "retinanet", "ssd"], indirect=True)
def test_detectors_train_improve_and_are_pruned(detector: nn.Module) -> None:
    task = detection(loader(draw(160, 1), 8, shuffle=True), loader(draw(24, 2), 8))
    before = task.metrics(detector)
    trained = secateur.train(detector, EXAMPLE, task, epochs=12, lr=3e-3, optimizer="adamw")
    settings = TickTock.of(
        keep_macs=0.6, tick_removes=0.1, tock_every=2, tock_epochs=1, tock_lr=1e-3, tick_lr=0.0, finetune_epochs=6,
        finetune_lr=2e-3, optimizer="adamw",
    )  # fmt: skip
    result = secateur.prune(trained.model, EXAMPLE, task, settings=settings)
    print(before, trained.metrics, result.metrics, result.after.macs / result.before.macs)
    assert before["map50"] < 10 < 50 < trained.metrics["map50"]
    assert result.after.macs <= 0.6 * result.before.macs
    assert result.metrics["map50"] > 50
    secateur.verify(trained.model, result.plan, EXAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("detector", ["faster_rcnn"], indirect=True)
def test_a_detector_with_proposals_is_pruned(detector: nn.Module) -> None:
    """Briefly: without its compiled operators, torchvision's takes minutes to learn anything."""
    batches = loader(draw(16, 1), 8)
    task = detection(batches, batches)
    settings = TickTock.of(keep_macs=0.6, tick_removes=0.2, tick_lr=0.0, tock_epochs=1, finetune_epochs=1)
    result = secateur.prune(detector, EXAMPLE, task, settings=settings)
    assert result.after.macs <= 0.6 * result.before.macs
    assert list(result.metrics) == ["map", "map50"]
    secateur.verify(detector, result.plan, EXAMPLE)
