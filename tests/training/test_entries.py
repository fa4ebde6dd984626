"""Batches and outputs of other forms: the same numbers as of plain ones."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import secateur
from secateur import Diverged, InvalidData, InvalidSetting, Task, TickTock, classification, segmentation
from secateur.training.task import unlabelled


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


class Two(NamedTuple):
    features: Tensor
    logits: Tensor


FORMS: list[tuple[Any, str | int]] = [
    (lambda x, out: {"hidden": {"x": x}, "logits": out}, "logits"),
    (lambda x, out: Output(None, out), "logits"),
    (Two, "logits"),
    (Two, 1),
    (lambda x, out: (out, x), 0),
    (lambda x, out: [x, x, out], -1),
    (lambda x, out: out, "logits"),  # a plain tensor is the scores
]


class Net(nn.Module):
    """Its scores, in some form."""

    def __init__(self, form: Any = lambda x, out: out) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)
        self.form = form

    def forward(self, pixel_values: Tensor) -> Any:
        x = F.relu(self.second(F.relu(self.norm(self.first(pixel_values)))))
        return self.form(x, self.last(x.mean((2, 3))))


class Map(nn.Module):
    """Its input, in some form."""

    def __init__(self, form: Any = lambda x, out: out) -> None:
        super().__init__()
        self.one, self.form = nn.Parameter(torch.ones(())), form

    def forward(self, x: Tensor) -> Any:
        return self.form(x, x * self.one)


def made(form: Any = lambda x, out: out) -> Net:
    torch.manual_seed(0)
    return Net(form)


IMAGES, LABELS = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 4


@pytest.mark.parametrize(("form", "output"), FORMS)
def test_scores_are_found_in_any_output(form: Any, output: str | int) -> None:
    batch = IMAGES, LABELS
    plain, other = classification([], [batch]), classification([], [batch], output=output)
    assert torch.equal(other.loss(made(form), batch), plain.loss(made(), batch))
    assert other.metrics(made(form)) == plain.metrics(made())
    maps = IMAGES, torch.zeros(16, 8, 8, dtype=torch.long)
    plain, other = (segmentation([], [maps], num_classes=3, **given) for given in ({}, {"output": output}))
    assert torch.equal(other.loss(Map(form), maps), plain.loss(Map(), maps))
    assert other.metrics(Map(form)) == plain.metrics(Map())
    plain, other = (unlabelled([], [IMAGES], made(), **given) for given in ({}, {"output": output}))
    torch.manual_seed(1)
    wanted = plain.loss(made(), IMAGES)
    torch.manual_seed(1)
    assert torch.equal(other.loss(made(form), IMAGES), wanted)


@pytest.mark.parametrize(
    ("given", "entries"),
    [
        ({"id": 3, "image": IMAGES, "label": LABELS}, ("image", "label")),
        ({"a": LABELS.float(), "b": LABELS, "c": IMAGES}, ("c", "b")),
        ({"y": IMAGES, "x": LABELS}, ("y", "x")),  # the names say the contrary
        ((IMAGES, "names", LABELS), (0, 2)),
        ([LABELS, IMAGES], (1, 0)),
        (SimpleNamespace(image=IMAGES, label=LABELS), ("image", "label")),
    ],
)
@pytest.mark.parametrize("make", [classification, partial(segmentation, num_classes=4)])
def test_two_entries_of_a_batch(make: Any, given: Any, entries: Any) -> None:
    plain, other = make([], [(IMAGES, LABELS)]), make([], [given], batch=entries)
    assert torch.equal(other.loss(made(), given), plain.loss(made(), (IMAGES, LABELS)))
    assert other.metrics(made()) == plain.metrics(made())


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: classification([]).loss(Net(), (IMAGES, LABELS, 1)), InvalidData, r"a tuple of 3.*batch=\(0, 2\)"),
    (lambda: classification([]).loss(Net(), {"a": 1, "b": 2, "c": 3}), InvalidData, r"a, b, c.*batch=\(\"image\", "),
    (lambda: classification([]).loss(Net(), {"a": IMAGES, "b": IMAGES}), InvalidData, r"batch=\('b', 'a'\)"),
    (lambda: classification([], batch=("image", "y")).loss(Net(), {"image": 1}), InvalidData, "'y'.*dict of image"),
    (lambda: classification([], batch=(0, 4)).loss(Net(), (1, 2, 3)), InvalidData, "4.*a tuple of 3"),
    (lambda: classification([], batch=("a", "b")).loss(Net(), IMAGES), InvalidData, "'a': got Tensor"),
    (lambda: classification([]).loss(Net(Two), (IMAGES, LABELS)), InvalidData, "Two of 2.*output=0"),
    (lambda: classification([]).loss(Net(Output), (IMAGES, LABELS)), InvalidData, "Output with loss, logits.*output="),
    (lambda: classification([], output="x").loss(Net(Two), (IMAGES, LABELS)), InvalidData, "as 'x'"),
    (lambda: classification([], output=2).loss(Net(Two), (IMAGES, LABELS)), InvalidData, "as 2"),
    (lambda: classification([], output="loss").loss(Net(FORMS[1][0]), (IMAGES, LABELS)), InvalidData, "as 'loss'"),
    (lambda: classification([], output=0.5), InvalidSetting, "0.5"),  # pyright: ignore
    (lambda: classification([], batch="image"), InvalidSetting, "'image'"),  # pyright: ignore
    (lambda: classification([], batch=(0, 0)), InvalidSetting, r"\(0, 0\)"),
    (lambda: Task([], lambda model, batch: IMAGES, output=True), InvalidSetting, "True"),
]


@pytest.mark.parametrize(("act", "error", "text"), REFUSED)
def test_what_is_not_there_is_refused_with_what_is(act: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        act()


def test_a_run_that_distils_and_repairs_gives_the_same_network() -> None:
    settings = TickTock.of(
        keep_macs=0.6, tick_removes=0.2, tock_epochs=1, finetune_epochs=1, distill=0.5, repair=8, min_channels=1
    )
    plain = [(IMAGES[:8], LABELS[:8]), (IMAGES[8:], LABELS[8:])]
    named = [{"index": torch.arange(8), "labels": labels, "pixel_values": images} for images, labels in plain]
    results = [
        secateur.prune(made(), IMAGES[:1], classification(plain, plain), settings=settings),
        secateur.prune(
            made(lambda x, out: {"loss": None, "logits": out}),
            {"pixel_values": IMAGES[:1]},
            classification(named, named, output="logits", batch=("pixel_values", "labels")),
            settings=settings,
        ),
    ]
    expected, found = (result.model.state_dict() for result in results)
    assert results[0].metrics == results[1].metrics
    assert results[0].after.macs < results[0].before.macs
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_scores_that_cannot_be_distilled_name_the_remedy() -> None:
    model = made(lambda x, out: {"logits": out})
    task = Task([(IMAGES, LABELS)], lambda model, batch: model(batch[0])["logits"].square().mean())
    with pytest.raises(InvalidData, match=r'a dict of logits.*output="logits"'):
        secateur.prune(model, IMAGES[:1], task, preset="paper", keep_macs=0.5, distill=0.5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_of_ignored_labels_has_no_loss_and_others_keep_theirs(smoothing: float) -> None:
    task = classification([], label_smoothing=smoothing)
    some = LABELS.where(LABELS > 0, -100)
    for labels in (torch.full_like(LABELS, -100), some, LABELS):
        scores = (30 * torch.randn(16, 5, generator=torch.Generator().manual_seed(1))).requires_grad_()
        loss = task.loss(nn.Identity(), (scores, labels))
        loss.backward()
        again = scores.detach().clone().requires_grad_()
        wanted = F.cross_entropy(again, labels, label_smoothing=smoothing)
        wanted.backward()
        assert scores.grad is not None
        assert again.grad is not None
        if (labels == -100).all():
            assert wanted.isnan()
            wanted, again.grad = torch.zeros(()), torch.zeros_like(again)
        assert torch.equal(loss.detach(), wanted.detach())
        assert torch.equal(scores.grad, again.grad)


def test_ignored_labels_are_not_counted() -> None:
    scores, labels = 9 * torch.eye(4), torch.tensor([0, 1, 3, -100])
    task = classification([], [(scores, labels)], top5=True)
    assert task.metrics(nn.Identity())["accuracy"] == pytest.approx(200 / 3)
    assert task.metrics(nn.Identity())["loss"] == pytest.approx(float(F.cross_entropy(scores, labels)))
    assert task.metrics(nn.Identity())["top5"] == pytest.approx(100)
    assert task.chance is not None
    assert task.chance() == pytest.approx(100 / 3)


@pytest.mark.parametrize(("value", "in_data"), [(torch.nan, True), (torch.inf, True), (1.0, False)])
def test_a_loss_that_is_not_finite_says_whether_its_batch_is(value: float, in_data: bool) -> None:
    images = IMAGES.clone()
    images[3, 1, 2, 2] = value
    calls = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(model(batch["image"]), batch["label"]) * (torch.inf if calls == 2 else 1)

    task = Task([{"image": IMAGES, "label": LABELS}, {"image": images, "label": LABELS}], loss)
    with pytest.raises(Diverged) as caught:
        secateur.train(made(), IMAGES[:1], task, epochs=1)
    assert f"step 2; its batch holds {'' if in_data else 'no '}NaN or infinite values" in str(caught.value)
    assert ("Correct the data" in str(caught.value)) == in_data
