"""Prune a network of transformers, save it, and load it with `from_pretrained`."""

from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub import ModelHubMixin, snapshot_download
from transformers import ResNetConfig, ResNetForImageClassification, set_seed

import secateur
from secateur.data.digits import digits


class PrunedResNet(ModelHubMixin):
    """A result of Secateur beside the configuration of the whole network; `push_to_hub` works too."""

    def __init__(self, model, result=None):
        self.model, self.result = model, result

    def _save_pretrained(self, save_directory):
        secateur.save(self.result, save_directory)
        self.model.config.save_pretrained(save_directory)

    @classmethod
    def _from_pretrained(cls, *, model_id, **options):
        folder = model_id if Path(model_id).is_dir() else snapshot_download(model_id)
        config = ResNetConfig.from_pretrained(folder)
        return cls(secateur.load(folder, build=lambda: ResNetForImageClassification(config)))


def named(data):
    """Batches as transformers has them, enlarged: its ResNet begins with two strides."""
    return [{"labels": labels, "pixel_values": F.interpolate(images, scale_factor=4)} for images, labels in data]


set_seed(0)
train, test = digits(batch_size=64)
config = ResNetConfig(
    num_channels=1, embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic", num_labels=10
)
model = ResNetForImageClassification(config)  # or from_pretrained
task = secateur.classification(named(train), named(test), output="logits", batch=("pixel_values", "labels"))
example = {"pixel_values": torch.randn(1, 1, 32, 32)}
model = secateur.train(model, example, task, epochs=6, lr=0.05).model
result = secateur.prune(model, example, task, keep_macs=0.5, tick_removes=0.1, tock_every=3, finetune_epochs=4)

PrunedResNet(result.model, result).save_pretrained("pruned")
loaded = PrunedResNet.from_pretrained("pruned").model
images = named(test)[0]["pixel_values"]
assert torch.equal(loaded(images).logits, result.model(images).logits)
share, accuracy = result.after.macs / result.before.macs, task.metrics(loaded)["accuracy"]
print(f"{share:.0%} of the MACs, {accuracy:.1f}% of the test images correct, by {type(loaded).__name__}")
