"""Whether the script's loss of a batch is the mean of those of its halves, or their sum.

A first answer for ``init``; `profiler/halved_loss.py` makes sure of it, by gradients.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch.utils.data import IterableDataset

from pipectl.faults import is_user_code
from pipectl.script.order import SharedGenerators
from pipectl.script.parts import Parts
from pipectl.script.program import Place

_SAMPLES = 16
_SMALLEST = 4
"""Samples of a batch whose half is no single sample: code may refuse that one for itself."""
_ROUNDING, _OF_HALF, _OF_DRAWS = 1e-5, 1e-3, 0.25
"""Relative differences of losses: in float32, in 16 bits, and with random numbers."""


class Kind(Enum):
    """What the loss of a batch is to those of its halves."""

    MEAN = "mean"
    SUM = "sum"
    OTHER = "other"
    UNKNOWN = "unknown"


def kind_of_loss(parts: Parts) -> Kind:
    """Compare the loss of some samples with those of their halves, in evaluation mode."""
    size = min(_SAMPLES, parts.batch_size) // 2 * 2
    if size < 2 or isinstance(parts.loader.dataset, IterableDataset):
        return Kind.UNKNOWN
    generators, modes = SharedGenerators(), {m: m.training for m in parts.model.modules()}
    try:
        found = {_kind(parts, *losses) for losses in _losses(parts, size)}
    except Exception:  # of the script's code: a norm refuses a half of one sample, for example
        return Kind.UNKNOWN
    finally:
        generators.restore()
        for module, mode in modes.items():
            module.training = mode
    if len(found) > 1:  # halves may be alike by chance, with as many samples of each class
        return Kind.UNKNOWN if Kind.UNKNOWN in found else Kind.OTHER
    return found.pop()


def _kind(parts: Parts, whole: float, first: float, second: float, draws: bool) -> Kind:
    mean = (first + second) / 2
    if not all(map(math.isfinite, (whole, mean))) or not mean:
        return Kind.UNKNOWN
    rounding = _ROUNDING if parts.seen.recorder.recordings[0].autocast is None else _OF_HALF
    for kind, ratio in ((Kind.MEAN, 1.0), (Kind.SUM, 2.0)):
        if math.isclose(whole / mean, ratio, rel_tol=_OF_DRAWS if draws else rounding):
            return kind
    return Kind.UNKNOWN if draws else Kind.OTHER


def _losses(parts: Parts, size: int) -> Iterator[tuple[float, float, float, bool]]:
    """Yield the losses of some samples and of each half, and whether these draw random numbers, at
    several places of an epoch.
    """
    data = parts.dataset()
    order = data.order(0)
    if len(order) < size:
        raise ValueError("there are too few samples")
    for module in parts.model.modules():
        module.training = False
    last = len(order) - size
    for start in sorted({0, last // 2, last}):
        before, found = SharedGenerators(), list[float]()
        for batch in _whole_and_halves(data, start, size):
            before.restore()
            found.append(_loss(parts, batch))
        yield found[0], found[1], found[2], before.have_drawn()


def _whole_and_halves(data: Any, start: int, size: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield batches of some samples of the first epoch, and of each half of them.

    Args:
        data: of the job.
        start: of the first sample in the epoch.
        size: samples of the first batch.
    """
    samples, half = [data[i] for i in data.order(0)[start : start + size]], size // 2
    yield from map(data.collate_fn, (samples, samples[:half], samples[half:]))


def _loss(parts: Parts, batch: dict[str, dict[str, Any]]) -> float:
    leaves = {**batch["inputs"], **batch["targets"]}
    with torch.no_grad():
        outputs = parts.program.forward(parts.model, leaves)
        return float(parts.program.loss(parts.model, 1, outputs, leaves))


def refusal_of_half(parts: Parts) -> tuple[str, Place] | None:
    """Return what is raised if the loss is computed of a half of a batch, and by which line.

    None if nothing is raised, or for the whole batch, too: a number of samples may be typed in.
    """
    size, generators = parts.batch_size, SharedGenerators()
    if size < _SMALLEST or isinstance(parts.loader.dataset, IterableDataset):
        return None
    try:
        batches = _whole_and_halves(parts.dataset(), 0, size)
        _loss(parts, next(batches))
    except Exception:  # of the script's code
        return None
    finally:
        generators.restore()
    try:
        _loss(parts, next(batches))
    except Exception as error:
        lines = traceback.extract_tb(error.__traceback__)
        places = [(x.filename, x.lineno or 0) for x in lines if is_user_code(x.filename)]
        return f"{type(error).__name__}: {error}", places[-1] if places else parts.program.place
    finally:
        generators.restore()
    return None
