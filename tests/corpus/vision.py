"""Models of torchvision, unchanged, with few classes; the data gives small images."""

from __future__ import annotations

from typing import Any

import packages
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

CLASSES = 10


def build(name: str, **kwargs: Any) -> nn.Module:
    """A model by its name in torchvision."""
    packages.declare_torchvision()
    from torchvision.models import get_model

    return get_model(name, weights=None, num_classes=CLASSES, **kwargs)


class Images(Dataset):
    """Random images and classes."""

    def __init__(self, pixels: int = 32) -> None:
        self.pixels = pixels

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        image = torch.randn(3, self.pixels, self.pixels, generator=draw)
        return image, torch.randint(0, CLASSES, (), generator=draw)


def with_auxiliary(outputs: Any, targets: Tensor) -> Tensor:
    """Inception's loss: its auxiliary classifier counts 0.4, and is absent in evaluation."""
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs, targets)
    return F.cross_entropy(outputs.logits, targets) + 0.4 * F.cross_entropy(
        outputs.aux_logits, targets
    )
