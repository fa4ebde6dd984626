"""Prune in your own training loop: four lines of it are Secateur's.

Here with mixed precision and gradients accumulated over two batches, to show where `observe` belongs: once per
optimizer step, after `unscale_`, before clipping.
"""

import torch
import torch.nn.functional as F

import secateur
from secateur.data.digits import digits
from secateur.models.resnet_cifar import CifarResNet

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
train, test = digits(batch_size=32)
model = CifarResNet(8, in_channels=1).to(device)
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")

pruner = secateur.Pruner(model, torch.randn(1, 1, 8, 8, device=device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # after the pruner: it must have the gates

for epoch in range(6):
    model.train()
    for number, (images, labels) in enumerate(train):
        with torch.autocast(device, enabled=device == "cuda"):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device)) / 2
        scaler.scale(loss).backward()
        if number % 2 == 1:
            scaler.unscale_(optimizer)
            pruner.observe()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    if epoch in (2, 3, 4):
        removal = pruner.prune(fraction=0.2, budget=secateur.Budget(macs=0.5), optimizer=optimizer)
        print(f"epoch {epoch + 1}: removed {removal.filters} filters, {removal.cost.macs:,} MACs left")

model = pruner.finish().eval()  # gates merged, and removed
with torch.no_grad():
    right = sum(int((model(images.to(device)).argmax(1).cpu() == labels).sum()) for images, labels in test)
share = pruner.cost.macs / pruner.graph.macs
print(f"{share:.0%} of the MACs, {100 * right / len(test.labels):.1f}% of the test images correct")
