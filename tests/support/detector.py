"""A small detector without anchor boxes, built as the usual ones are: split blocks, and distances as expectations."""

import torch
from torch import Tensor, nn

BINS = 4
"""How many distances each side of a box is distributed over."""


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    layers = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()
    return nn.Sequential(*layers)


class Split(nn.Module):
    """One half passes by, and what the other becomes is joined to it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.hidden = channels // 2
        self.first = conv(channels, 2 * self.hidden, 1)
        self.inner = nn.Sequential(conv(self.hidden, self.hidden), conv(self.hidden, self.hidden))
        self.last = conv(3 * self.hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept, passed = self.first(x).chunk(2, 1)
        return self.last(torch.cat([kept, passed, passed + self.inner(passed)], 1))


class Head(nn.Module):
    """Boxes and class scores of every place of every feature map; raw ones while it trains."""

    places: Tensor | None = None
    shape: torch.Size | None = None

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.boxes = nn.ModuleList(nn.Sequential(conv(w, 16), nn.Conv2d(16, 4 * BINS, 1)) for w in widths)
        self.scores = nn.ModuleList(nn.Sequential(conv(w, 16), nn.Conv2d(16, classes, 1)) for w in widths)
        self.expectation = nn.Conv2d(BINS, 1, 1, bias=False).requires_grad_(False)
        self.expectation.weight.data[:] = torch.arange(float(BINS)).view(1, BINS, 1, 1)

    def forward(self, maps: list[Tensor]) -> dict[str, Tensor] | Tensor:
        count = len(maps[0])
        boxes = torch.cat([f(x).view(count, 4 * BINS, -1) for f, x in zip(self.boxes, maps, strict=True)], 2)
        scores = torch.cat([f(x).view(count, self.classes, -1) for f, x in zip(self.scores, maps, strict=True)], 2)
        if self.training:
            return {"boxes": boxes, "scores": scores}
        if self.shape != maps[0].shape:  # kept from call to call
            self.places = torch.cat([torch.arange(x.shape[2] * x.shape[3], device=x.device) / x.shape[3] for x in maps])
            self.shape = maps[0].shape
        sides = self.expectation(boxes.view(count, 4, BINS, -1).transpose(1, 2).softmax(1)).view(count, 4, -1)
        assert self.places is not None
        return torch.cat([sides + self.places, scores.sigmoid()], 1)


class Detector(nn.Module):
    """Two feature maps, the coarse one joined to the fine one on its way back."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 16, stride=2), Split(16))
        self.down = nn.Sequential(conv(16, 32, stride=2), Split(32))
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), conv(32, 16))
        self.fine = Split(32)
        self.head = Head((32, 32), classes)

    def forward(self, x: Tensor) -> dict[str, Tensor] | Tensor:
        fine = self.stem(x)
        coarse = self.down(fine)
        return self.head([self.fine(torch.cat([fine, self.up(coarse)], 1)), coarse])
