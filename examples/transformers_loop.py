"""Prune while the Trainer of transformers trains."""

import torch
import torch.nn.functional as F
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments, set_seed

import secateur
from secateur.data.digits import digits
from secateur.integrations.transformers import Prune

set_seed(0)
train, test = digits()
images = F.interpolate(train.images, scale_factor=4)  # this ResNet begins with two strides
data = [{"pixel_values": image, "labels": label} for image, label in zip(images, train.labels, strict=True)]
config = ResNetConfig(
    num_channels=1, embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic", num_labels=10
)
model = ResNetForImageClassification(config)  # or from_pretrained
pruner = secateur.Pruner(model, {"pixel_values": torch.randn(1, 1, 32, 32)})
trainer = Trainer(
    model,
    TrainingArguments(
        "trained",
        num_train_epochs=5,
        per_device_train_batch_size=64,
        learning_rate=0.005,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=data,
    callbacks=[Prune(pruner, secateur.Budget(macs=0.5), fraction=0.2, every=15, progress=print)],
)
trainer.train()

model.eval()  # the gates are merged
with torch.no_grad():
    logits = model(F.interpolate(test.images, scale_factor=4)).logits
accuracy = (logits.argmax(1) == test.labels).float().mean()
print(f"{pruner.cost.macs / pruner.graph.macs:.0%} of the MACs, {100 * accuracy:.1f}% of the test images correct")
