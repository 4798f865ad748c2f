"""The loss of a step: its micro-batches have shares, by their samples or the weights of targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pipectl.capture.factories import call
from pipectl.errors import CaptureError


def sample_shares(sizes: Sequence[int], *, adds_up: bool = False) -> list[float]:
    """Return the share of every micro-batch in the loss, by its number of samples; or 1 if losses
    are added up.
    """
    if adds_up:
        return [1.0] * len(sizes)
    total = sum(sizes)
    return [size / total for size in sizes]


def target_shares(weigh: Callable[[Any], Any], name: str, targets: Sequence[Any]) -> list[float]:
    """Return the share of every micro-batch, by the weights of its targets.

    If all weights are 0 (nothing but padding), all shares are 0.

    Args:
        name: of ``weigh``, for errors.
    """
    weights = [target_weight(weigh, name, item) for item in targets]
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def target_weight(weigh: Callable[[Any], Any], name: str, targets: Any) -> float:
    """Return the weight of some targets.

    Args:
        name: of ``weigh``, for errors.

    Raises:
        CaptureError: it is not one finite number from 0 on.
    """
    value = call(weigh, f"loss.weight: {name}", targets)
    if isinstance(value, int | float) or getattr(value, "shape", None) == ():
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            weight = float(value)
            if 0 <= weight < math.inf:
                return weight
    shape = getattr(value, "shape", None)
    what = f"a {type(value).__name__}" + (f" of shape {list(shape)}" if shape else f" ({value})")
    raise CaptureError(
        f"loss.weight: {name} returned {what}, not one number from 0 on",
        hint="return the weight of all targets of a micro-batch together, such as (t >= 0).sum()",
    )


def weighted_loss(losses: Sequence[Tensor], shares: Sequence[float]) -> float:
    """Return the loss of a step; NaN if no loss is computed."""
    return sum_of_parts(loss_parts(losses, shares)) if losses else math.nan


def loss_parts(losses: Sequence[Tensor], shares: Sequence[float]) -> tuple[float, ...]:
    """Return what each micro-batch with a weight adds to the loss of a step."""
    # The loss of a micro-batch without weight (no valid token, say) may be undefined.
    pairs = zip(_numbers(losses), shares, strict=True)
    return tuple(loss * share for loss, share in pairs if share)


def sum_of_parts(parts: Collection[float]) -> float:
    """Return the loss of a step, the same for any order of its parts."""
    return math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)


def first_undefined(losses: Sequence[Tensor], shares: Sequence[float]) -> int | None:
    """Return the index of the first weighted loss that is not finite; None if there is none."""
    pairs = enumerate(zip(_numbers(losses), shares, strict=True))
    return next((i for i, (loss, share) in pairs if share and not math.isfinite(loss)), None)


def _numbers(losses: Sequence[Tensor]) -> list[float]:
    """Losses of one type as numbers; waits once for an accelerator."""
    return torch.stack([loss.detach().reshape(()) for loss in losses]).tolist() if losses else []
