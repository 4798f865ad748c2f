"""A vision transformer of torchvision on a folder of images, one subfolder per class."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.models import VisionTransformer
from torchvision.transforms import v2

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


def build(
    classes: int, image_size: int = 224, patch_size: int = 16, layers: int = 12, width: int = 768,
    heads: int = 12, dropout: float = 0.0,
) -> VisionTransformer:  # fmt: skip
    """ViT-B/16 by default."""
    return VisionTransformer(
        image_size, patch_size, layers, heads, width, 4 * width, dropout, num_classes=classes
    )


def training(root: str, image_size: int = 224) -> ImageFolder:
    """Random crops and flips, drawn anew in every epoch."""
    return ImageFolder(
        root,
        v2.Compose([v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip(), *to_tensor()]),
    )


def held_out(root: str, image_size: int = 224) -> ImageFolder:
    """The centre of each image."""
    crop = [v2.Resize(image_size * 8 // 7), v2.CenterCrop(image_size)]
    return ImageFolder(root, v2.Compose([*crop, *to_tensor()]))


def to_tensor() -> list[v2.Transform]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, DEVIATION)]


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the images whose most likely class is theirs."""
    return (outputs.argmax(1) == targets).float().mean()
