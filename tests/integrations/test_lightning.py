"""Lightning's trainer with the callback, against a loop without any; imported late, since that takes long."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trained import BUDGET, EVERY, FRACTION, STEPS, assert_same, by_hand, data, made, optimizer_of

from secateur import InvalidData

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
IMAGES, LABELS = data(8)
LOADER = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=2)


def accumulated(step: int) -> list[Any]:
    """Two steps in an epoch, of two batches each."""
    return [(IMAGES[i : i + 2], LABELS[i : i + 2]) for i in (4 * (step % 2), 4 * (step % 2) + 2)]


def trained(model: nn.Module, callbacks: list[Any], ckpt_path: Path | None = None, **options: Any) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, number: int) -> Any:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.model)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    more = {"max_epochs": STEPS // 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1, **quiet, **options}
    trainer = lightning.Trainer(accelerator="cpu", callbacks=callbacks, **more)
    trainer.fit(Module(), LOADER, ckpt_path=ckpt_path)


def pruning(pruner: Any) -> Any:
    from secateur.integrations.lightning import Prune

    return Prune(pruner, BUDGET, fraction=FRACTION, every=EVERY)


def test_the_same_network_as_by_hand() -> None:
    expected, by_hands = by_hand(accumulated, clip=0.1)
    model, pruner = made()
    trained(model, [pruning(pruner)], enable_checkpointing=False)
    assert torch.equal(pruner.kept, by_hands.kept)
    assert pruner.cost.macs <= 0.5 * pruner.graph.macs
    assert_same(model, expected)


def test_training_is_resumed(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    expected, _ = by_hand(accumulated, clip=0.1)
    model, pruner = made()
    trained(model, [pruning(pruner), ModelCheckpoint(tmp_path, "saved")], max_epochs=2)
    model, pruner = made()
    callback = pruning(pruner)
    callback.resume(tmp_path / "saved.ckpt")
    assert pruner.cost.macs < pruner.graph.macs
    trained(model, [callback], tmp_path / "saved.ckpt", enable_checkpointing=False)
    assert callback.step == STEPS
    assert_same(model, expected)
    torch.save({"callbacks": {}}, tmp_path / "other.ckpt")
    with pytest.raises(InvalidData, match="no state of this callback"):
        callback.resume(tmp_path / "other.ckpt")
