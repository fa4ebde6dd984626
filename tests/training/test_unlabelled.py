"""The task without labels: its loss against the Fisher information, its metric against a second computation."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.errors import InvalidData
from secateur.training.task import unlabelled


class Fixed(nn.Module):
    """Gives back what it is shown, with some classes raised."""

    def __init__(self, *raised: float) -> None:
        super().__init__()
        self.raised = nn.Parameter(torch.tensor(raised or (0.0,)))
        self.calls = 0

    def forward(self, scores: Tensor) -> Tensor:
        self.calls += 1
        assert not self.training or torch.is_grad_enabled()
        return scores + self.raised.view(-1, *[1] * (scores.dim() - 2))


@pytest.mark.parametrize("shape", [(), (5, 2)])
def test_squared_gradients_are_the_fisher_information(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    row = torch.tensor([2.0, 0.0, -1.0, 1.0])
    scores = row.view(4, *[1] * len(shape)).expand(4000, 4, *shape).clone().requires_grad_()
    places = scores[:, 0].numel()
    unlabelled([], [], Fixed()).loss(Fixed(), scores).backward()
    assert scores.grad is not None
    gradients = places * scores.grad.movedim(1, -1).reshape(-1, 4)
    chances = row.softmax(0)
    # The gradient of a draw is the probabilities less the class that was drawn.
    fisher = chances.diag() - chances[:, None] * chances
    assert (gradients.mean(0)).abs().max() < 0.03
    assert (gradients.mT @ gradients / places - fisher).abs().max() < 0.03


def test_the_loss_is_of_the_class_drawn() -> None:
    # Where one class is certain, it is drawn.
    labels = torch.randint(3, (2, 4, 4))
    scores = 100 * F.one_hot(labels, 3).movedim(-1, 1).float()
    for given in (scores, scores.bfloat16()):
        assert unlabelled([], [], Fixed()).loss(Fixed(), given).item() == pytest.approx(0, abs=1e-6)


def test_torchs_random_numbers_decide_the_draw() -> None:
    task, scores = unlabelled([], [], Fixed()), torch.randn(8, 50)

    def draw(seed: int) -> float:
        torch.manual_seed(seed)
        return task.loss(Fixed(), scores).item()

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_agreement_counts_images_or_pixels_not_batches(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    data = torch.randn(40, 4, *shape)
    whole, model = Fixed(), Fixed(1.0, 0.0, 0.0, -1.0).train()
    task = unlabelled([], [data[:39], data[39:]], whole)
    with torch.no_grad():
        same = (whole.eval()(data).argmax(1) == model.eval()(data).argmax(1)).double()
    assert 0 < same.mean() < 1
    assert task.metrics(model) == {"agreement": pytest.approx(100 * float(same.mean()))}
    assert task.metrics(whole) == {"agreement": 100}


def test_the_whole_network_is_asked_once_and_not_before_it_is_needed() -> None:
    data = [torch.eye(4)]
    whole = Fixed().train()
    task = unlabelled([], data, whole)
    whole.raised.data = torch.tensor([0.0, 0.0, 0.0, 5.0])  # weights come after the task
    assert task.metrics(Fixed()) == {"agreement": 25}
    assert task.metrics(Fixed(0.0, 0.0, 0.0, 5.0)) == {"agreement": 100}
    assert whole.calls == 1
    assert whole.training


def test_the_whole_network_answers_in_its_own_precision() -> None:
    whole = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        whole.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [1 + 1e-4, 0, 0, 0]]))  # the same in bfloat16
    task = unlabelled([], [torch.ones(3, 4)], whole)
    with torch.autocast("cpu", torch.bfloat16):
        assert task.metrics(whole) == {"agreement": 0}
    assert task.metrics(whole) == {"agreement": 100}


@pytest.mark.parametrize("model", [nn.Flatten(0), nn.LSTM(4, 2)])
def test_other_outputs_are_refused(model: nn.Module) -> None:
    task = unlabelled([], [torch.zeros(2, 4)], model)
    for use in (lambda: task.metrics(model), lambda: task.loss(model, torch.zeros(2, 4))):
        with pytest.raises(InvalidData, match="the model does not give"):
            use()


def test_test_data_are_needed() -> None:
    with pytest.raises(InvalidData, match="test has no images"):
        unlabelled([], [], Fixed()).metrics(Fixed())
