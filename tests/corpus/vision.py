"""Models of torchvision, unchanged, with few classes."""

from __future__ import annotations

from typing import Any

import packages
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


def build(name: str, **kwargs: Any) -> nn.Module:
    """A model by its name in torchvision."""
    packages.declare_torchvision()
    from torchvision.models import get_model

    return get_model(name, weights=None, num_classes=CLASSES, **kwargs)


def with_auxiliary(outputs: Any, targets: Tensor) -> Tensor:
    """Inception's loss: its auxiliary classifier counts 0.4, and is absent in evaluation."""
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs, targets)
    return F.cross_entropy(outputs.logits, targets) + 0.4 * F.cross_entropy(
        outputs.aux_logits, targets
    )
