"""What a training left, and how it differs from what another one left."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pipectl.runtime import checkpoint


def weights(run: Path) -> dict[str, Tensor]:
    """Of the last checkpoint."""
    return checkpoint.load(sorted((run / "checkpoints").glob("step-*"))[-1])


def different(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Names of what is missing, too much, or has other bits."""
    common = expected.keys() & found.keys()
    unequal = {name for name in common if not torch.equal(expected[name], found[name])}
    return sorted(unequal | (expected.keys() ^ found.keys()))
