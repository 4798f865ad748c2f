"""Comparing two trainings of one job, step by step and tensor by tensor.

Of each pipeline, at most one tensor is in memory at a time.
"""

from __future__ import annotations

import json
import math
from collections import ChainMap
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipectl.runs import RunDirectory, read_metrics
from pipectl.runtime import checkpoint, plain

LOSS = "loss"
_UNITS_IN_LAST_PLACE = 4
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Trained:
    """The losses and weights of a training after every step.

    Args:
        losses: by step, computed with the weights before it; null if not finite.
        weights: returns weights and buffers of model and loss after a step, by their names in the
            user's model, and those of :func:`~pipectl.runtime.plain.name_of_loss`.
    """

    losses: Mapping[int, float | None]
    weights: Callable[[int], Weights]

    @classmethod
    def of_run(cls, run: RunDirectory) -> Trained:
        """A run that saved a checkpoint after every step."""
        losses = {line.step: line.loss for line in read_metrics(run) if line.is_step}

        def weights(step: int) -> Weights:
            stored = checkpoint.load(run.checkpoints / f"step-{step:06d}")
            loss = {plain.name_of_loss(name): tensor for name, tensor in stored.loss.items()}
            return ChainMap(loss, cast(dict[str, Tensor], stored))

        return cls(losses, weights)

    @classmethod
    def of_process(cls, directory: Path) -> Trained:
        """The results of :mod:`pipectl.runtime.plain`."""
        losses = json.loads((directory / plain.LOSSES).read_text("utf-8"))["losses"]
        weights = partial(plain.weights_file, directory)
        return cls(dict(enumerate(losses, 1)), lambda step: load_file(weights(step)))

    def loss(self, step: int) -> float:
        """The loss of a step; NaN if it was not finite."""
        loss = self.losses[step]
        return loss if loss is not None and math.isfinite(loss) else math.nan


class Difference(NamedTuple):
    """A difference between two trainings.

    Args:
        tensor: a name as in :class:`Trained`, or ``loss``.
        largest: the largest absolute difference in it.
    """

    step: int
    tensor: str
    largest: float


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison of two trainings.

    Args:
        first: the first difference beyond the tolerance; a step's loss comes before its weights.
        largest: the largest absolute difference of all steps and tensors, losses included.
        losses: of every step: of the compared training, then of the reference.
    """

    first: Difference | None
    largest: float
    losses: tuple[tuple[float, float], ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs beyond the tolerance."""
        return self.first is None


def compare(
    trained: Trained,
    reference: Trained,
    steps: int,
    tolerance: float,
    start: Weights,
    left_out: Container[str] = (),
) -> Comparison:
    """Compare every loss and every weight of ``steps`` steps.

    Args:
        tolerance: by how much a weight may differ, relative to the largest change of any weight
            by training since ``start`` (a loss: relative to the loss itself); 0 requires equal
            bits.
        start: the weights before the first step; not needed without tolerance.
        left_out: names that are not compared.
    """
    first: Difference | None = None
    largest = 0.0
    for difference, allowed in _differences(trained, reference, steps, tolerance, start):
        if difference.tensor in left_out:
            continue
        largest = max(largest, difference.largest)
        if first is None and difference.largest > allowed:
            first = difference
    every = range(1, steps + 1)
    return Comparison(first, largest, tuple((trained.loss(s), reference.loss(s)) for s in every))


def compare_losses(
    trained: Trained, losses: Sequence[float], steps: int, tolerance: float
) -> Comparison:
    """Compare the losses of ``steps`` steps alone.

    Args:
        losses: of the reference.
        tolerance: by how much a loss may differ, relative to it.
    """
    pairs = [(trained.loss(step), losses[step - 1]) for step in range(1, steps + 1)]
    first, largest = None, 0.0
    for step, (one, other) in enumerate(pairs, 1):
        by = distance(torch.tensor([one]).double(), torch.tensor([other]).double())
        largest = max(largest, by)
        if first is None and by > tolerance * abs(other):
            first = Difference(step, LOSS, by)
    return Comparison(first, largest, tuple(pairs))


def _differences(
    trained: Trained, reference: Trained, steps: int, tolerance: float, start: Weights
) -> Iterator[tuple[Difference, float]]:
    for step in range(1, steps + 1):
        one, other = torch.tensor([[trained.loss(step)], [reference.loss(step)]]).double()
        yield Difference(step, LOSS, distance(one, other)), tolerance * abs(float(other))
        ours, theirs = trained.weights(step), reference.weights(step)
        moved = max((distance(theirs[n], start[n]) for n in start if n in theirs), default=0.0)
        for name in [*theirs, *(name for name in ours if name not in theirs)]:
            if name not in ours or name not in theirs:
                yield Difference(step, name, math.inf), 0.0
            else:
                slack = _rounding(theirs[name]) if tolerance else 0.0
                yield (
                    Difference(step, name, distance(ours[name], theirs[name])),
                    tolerance * moved + slack,
                )


def distance(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference of two tensors; infinite if only one is a number."""
    if one.shape != other.shape:
        return math.inf
    kind = torch.promote_types(one.dtype, torch.float64)
    one, other = one.to(kind), other.to(kind)
    same = (one == other) | (one.isnan() & other.isnan())
    distances = torch.where(same, 0.0, (one - other).abs())
    return (
        float(distances.nan_to_num(nan=math.inf, posinf=math.inf).max())
        if distances.numel()
        else 0.0
    )


def _rounding(tensor: Tensor) -> float:
    """The largest difference that rounding alone may cause."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    finite = tensor.double().abs().nan_to_num(nan=0.0, posinf=0.0)
    return _UNITS_IN_LAST_PLACE * torch.finfo(tensor.dtype).eps * float(finite.max())
