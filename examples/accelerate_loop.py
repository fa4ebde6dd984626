"""Prune in a loop that Accelerate drives, with gradients accumulated over two batches."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import secateur
from secateur.data.digits import digits
from secateur.models.resnet_cifar import CifarResNet

set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
train, test = digits()
loader = DataLoader(TensorDataset(train.images, train.labels), batch_size=32, shuffle=True)
model = CifarResNet(8, in_channels=1).to(accelerator.device)

pruner = secateur.Pruner(model, torch.randn(1, 1, 8, 8, device=accelerator.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(4):
    wrapped.train()
    for images, labels in loader:
        with accelerator.accumulate(wrapped):
            loss = F.cross_entropy(wrapped(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.unscale_gradients(optimizer)
                pruner.observe()
                accelerator.clip_grad_norm_(wrapped.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
    if epoch > 0:
        removal = pruner.prune(fraction=0.2, budget=secateur.Budget(macs=0.5), optimizer=optimizer.optimizer)
        accelerator.print(f"epoch {epoch + 1}: {removal.filters} filters removed, {removal.cost.macs:,} MACs left")

model = pruner.finish().eval()
accuracy = (model(test.images.to(accelerator.device)).argmax(1).cpu() == test.labels).float().mean()
share = pruner.cost.macs / pruner.graph.macs
accelerator.print(f"{share:.0%} of the MACs, {100 * accuracy:.1f}% of the test images correct")
