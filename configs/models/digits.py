"""scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels, part of the package."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

# Every fifth image is kept from training, always the same ones.
HELD_OUT_EVERY = 5


def training() -> TensorDataset:
    """The 1,437 images to learn from."""
    return _digits(held_out=False)


def held_out() -> TensorDataset:
    """The 360 images to measure on."""
    return _digits(held_out=True)


def _digits(*, held_out: bool) -> TensorDataset:
    """(image ``[1, 8, 8]`` with pixels from 0 to 1, digit) pairs."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    digits = torch.tensor(bunch.target)
    chosen = (torch.arange(len(digits)) % HELD_OUT_EVERY == 0) == held_out
    return TensorDataset(images[chosen], digits[chosen])
