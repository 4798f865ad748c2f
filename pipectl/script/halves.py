"""Whether the script's loss of a batch is the mean of those of its halves, or their sum.

A first answer for ``init``; `profiler/halved_loss.py` makes sure of it, by gradients.
"""

from __future__ import annotations

import math
from enum import Enum

import torch
from torch.utils.data import IterableDataset

from pipectl.script.order import SharedGenerators
from pipectl.script.parts import Parts

_SAMPLES = 16
_ROUNDING, _OF_DRAWS = 1e-3, 0.25
"""Relative differences: that of losses that draw no random numbers, and of others."""


class Kind(Enum):
    """What the loss of a batch is to those of its halves."""

    MEAN = "mean"
    SUM = "sum"
    OTHER = "other"
    UNKNOWN = "unknown"


def kind_of_loss(parts: Parts) -> Kind:
    """Compare the loss of the first samples with those of their halves, in evaluation mode."""
    size = min(_SAMPLES, parts.batch_size) // 2 * 2
    if size < 2 or isinstance(parts.loader.dataset, IterableDataset):
        return Kind.UNKNOWN
    generators, modes = SharedGenerators(), {m: m.training for m in parts.model.modules()}
    try:
        whole, *halves, draws = _losses(parts, size)
    except Exception:  # of the script's code: a norm refuses a half of one sample, for example
        return Kind.UNKNOWN
    finally:
        generators.restore()
        for module, mode in modes.items():
            module.training = mode
    mean = sum(halves) / 2
    if not all(map(math.isfinite, (whole, mean))) or not mean:
        return Kind.UNKNOWN
    for kind, ratio in ((Kind.MEAN, 1.0), (Kind.SUM, 2.0)):
        if math.isclose(whole / mean, ratio, rel_tol=_OF_DRAWS if draws else _ROUNDING):
            return kind
    return Kind.UNKNOWN if draws else Kind.OTHER


def _losses(parts: Parts, size: int) -> tuple[float, float, float, bool]:
    """The losses of some samples and of each half, and whether these draw random numbers."""
    data = parts.dataset()
    samples = [data[index] for index in data.order(0)[:size]]
    if len(samples) < size:
        raise ValueError("there are too few samples")
    for module in parts.model.modules():
        module.training = False
    before, found, half = SharedGenerators(), list[float](), size // 2
    for part in (samples, samples[:half], samples[half:]):
        before.restore()
        batch = data.collate_fn(part)
        leaves = {**batch["inputs"], **batch["targets"]}
        with torch.no_grad():
            outputs = parts.program.forward(parts.model, leaves)
            found.append(float(parts.program.loss(parts.model, 1, outputs, leaves)))
    return found[0], found[1], found[2], before.have_drawn()
