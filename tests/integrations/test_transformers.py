"""The Trainer of transformers with the callback, against a loop without any; imported late, since that takes long."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from trained import BUDGET, EVERY, FRACTION, STEPS, assert_same, by_hand, data, made, optimizer_of

from secateur import InvalidSetting

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
IMAGES, LABELS = data()
EXAMPLES = [{"pixel_values": image, "labels": label} for image, label in zip(IMAGES, LABELS, strict=True)]


def trained(model: nn.Module, folder: Path, callback: Any, resume: Path | None = None, **options: Any) -> Any:
    """With every example in every batch, in an order of the trainer's own."""
    from transformers import Trainer, TrainingArguments

    given = {"max_steps": STEPS, "save_strategy": "no", "max_grad_norm": 0.0, "learning_rate": 0.05, **options}
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=8, use_cpu=True, disable_tqdm=True, report_to="none", **given
    )
    optimizer = None
    if "optim" not in options:
        optimizer = optimizer_of(model)
    optimizers = (optimizer, LambdaLR(optimizer, lambda step: 1.0) if optimizer is not None else None)
    trainer = Trainer(model, arguments, train_dataset=EXAMPLES, callbacks=[callback], optimizers=optimizers)
    trainer.train(resume_from_checkpoint=str(resume) if resume is not None else None)
    return trainer


def pruning(pruner: Any) -> Any:
    from secateur.integrations.transformers import Prune

    return Prune(pruner, BUDGET, fraction=FRACTION, every=EVERY)


def test_the_same_network_as_by_hand(tmp_path: Path) -> None:
    expected, by_hands = by_hand(lambda step: [(IMAGES, LABELS)])
    model, pruner = made()
    trained(model, tmp_path, pruning(pruner))
    assert torch.equal(pruner.kept, by_hands.kept)
    assert pruner.cost.macs <= 0.5 * pruner.graph.macs
    assert_same(model, expected, tolerance=1e-10)


def test_training_is_resumed(tmp_path: Path) -> None:
    expected, _ = by_hand(lambda step: [(IMAGES, LABELS)])
    model, pruner = made()
    trained(model, tmp_path, pruning(pruner), save_strategy="steps", save_steps=4)
    model, pruner = made()
    callback = pruning(pruner)
    callback.resume(tmp_path / "checkpoint-4")
    assert pruner.cost.macs < pruner.graph.macs
    trained(model, tmp_path, callback, tmp_path / "checkpoint-4")
    assert callback.step == STEPS
    assert_same(model, expected, tolerance=1e-10)


def test_the_trainers_own_optimizer_trains_the_gates(tmp_path: Path) -> None:
    model, pruner = made()
    trainer = trained(model, tmp_path, pruning(pruner), optim="adamw_torch")
    assert pruner.cost.macs <= 0.5 * pruner.graph.macs
    assert not [name for name in model.state_dict() if "gate" in name]
    state = trainer.optimizer.optimizer.state
    assert all(state[parameter]["exp_avg"].shape == parameter.shape for parameter in state)
    assert len(state) == 9  # gates in place of the norm's factors, and gates of the filters without a norm


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"load_best_model_at_end": True, "save_strategy": "epoch", "eval_strategy": "epoch"}, "other shapes"),
        ({"fp16": True}, "max_grad_norm"),
    ],
)
def test_settings_that_do_not_go_with_it(options: dict[str, Any], text: str) -> None:
    _, pruner = made()
    given = {"load_best_model_at_end": False, "fp16": False, "max_grad_norm": 0.0, **options}
    with pytest.raises(InvalidSetting, match=text):
        pruning(pruner).on_train_begin(SimpleNamespace(**given), None, None, optimizer=None)
