"""ResNet-50 as He et al. published it, for weights in Caffe's or Keras' form."""

from typing import Any

from torch import nn

from secateur.extras import import_extra


def resnet50_v1(**options: Any) -> nn.Module:
    """torchvision's ResNet-50 with the stride of a stage in its first 1x1 convolution, where theirs is in the 3x3.

    Its images are red, green and blue from 0 to 255, less their means over ImageNet.
    """
    model = import_extra("torchvision.models", "vision").resnet50(**options)
    for block in (model.layer2[0], model.layer3[0], model.layer4[0]):
        block.conv1.stride, block.conv2.stride = (2, 2), (1, 1)
    means = (123.68 / 255, 116.779 / 255, 103.939 / 255)
    model.default_cfg = {"input_size": (3, 224, 224), "mean": means, "std": (1 / 255,) * 3}
    return model
