"""The loss of a step: the weighted mean over its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from pipectl.capture.factories import call


def sample_shares(sizes: Sequence[int]) -> list[float]:
    """The share of every micro-batch in the loss, by its number of samples."""
    total = sum(sizes)
    return [size / total for size in sizes]


def target_shares(weigh: Callable[[Any], Any], name: str, targets: Sequence[Any]) -> list[float]:
    """The share of every micro-batch, by what ``weigh`` says of its targets.

    Where all weights are 0 (nothing but padding), all shares are.

    Args:
        name: of ``weigh``, for errors.
    """
    weights = [target_weight(weigh, name, item) for item in targets]
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def target_weight(weigh: Callable[[Any], Any], name: str, targets: Any) -> float:
    """What ``weigh`` says of some targets.

    Args:
        name: of ``weigh``, for errors.
    """
    return float(call(weigh, name, targets))


def weighted(losses: Sequence[Tensor], shares: Sequence[float]) -> float:
    """The loss of a step; NaN where none is computed."""
    if not losses:
        return math.nan
    # The loss of a micro-batch without weight (no valid token, say) may be undefined.
    pairs = [(float(loss), share) for loss, share in zip(losses, shares, strict=True) if share]
    parts = [loss * share for loss, share in pairs]
    return math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)


def first_undefined(losses: Iterable[Tensor], shares: Sequence[float]) -> int | None:
    """The first loss with a share that is infinite or NaN; None if all are finite."""
    pairs = enumerate(zip(losses, shares, strict=True))
    return next((i for i, (loss, share) in pairs if share and not math.isfinite(loss)), None)
