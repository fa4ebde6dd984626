"""Prune while Lightning trains."""

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import secateur
from secateur.data.digits import digits
from secateur.integrations.lightning import Prune
from secateur.models.resnet_cifar import CifarResNet


class Digits(lightning.LightningModule):
    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def training_step(self, batch, number):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)


lightning.seed_everything(0, verbose=False)
train, test = digits()
loader = DataLoader(TensorDataset(train.images, train.labels), batch_size=64, shuffle=True)
model = CifarResNet(8, in_channels=1)
pruner = secateur.Pruner(model, torch.randn(1, 1, 8, 8))
trainer = lightning.Trainer(
    max_epochs=4,
    accelerator="cpu",
    callbacks=[Prune(pruner, secateur.Budget(macs=0.5), fraction=0.2, every=20, progress=print)],
    gradient_clip_val=5.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Digits(model), loader)

model.eval()  # the gates are merged
accuracy = (model(test.images).argmax(1) == test.labels).float().mean()
print(f"{pruner.cost.macs / pruner.graph.macs:.0%} of the MACs, {100 * accuracy:.1f}% of the test images correct")
