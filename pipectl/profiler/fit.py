"""Overhead of stages beyond their operators, fitted to stages that were timed as a whole.

Forward and backward of a stage are modelled as

    factor x operators + overhead + a time for each value received + one for each value sent

with coefficients that are not negative and minimise the sum of relative errors (iteratively
reweighted least squares); errors of stages that are far shorter than in any plan have less weight.
The factor covers what the operators' own times miss. If operators have a second time, for stages
that stay in the cache, the size of the cache is chosen by the same sum.

The halves of a split backward are modelled as a share of the whole backward of the operators that
are split, and a time per operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipectl.planner.costs.footprint import Footprint
from pipectl.planner.costs.stage_costs import (
    Times,
    operator_times,
    split_operators,
    stage_times,
)
from pipectl.profile import Profile
from pipectl.profile_parts import SplitBackward, StageOverhead

Floats = npt.NDArray[np.float64]
CACHE_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5)
"""Parts of the last level cache that stages of a rank may have for themselves."""
DISTURBED = 0.1
"""A larger error of a fit shows that other processes disturbed the measurement."""
_MIN_FACTOR, _MAX_FACTOR = 0.5, 2.0
_REWEIGHTINGS = 30
_SMALL_ERROR = 1e-3
_SHORT = 0.1
"""Of the longest stage: the weight of a stage so short is half that of a long one."""


class StageTimes(NamedTuple):
    """Seconds of a stage.

    Args:
        backward_s: of the half for inputs if the backward is split.
        weight_s: of the half for weights.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0


@dataclass(frozen=True)
class Sample:
    """The stages of a partition, each timed as a whole.

    Args:
        times: medians of every stage.
        split: the same with split backwards; none if they were not measured.
    """

    parts: Footprint
    times: Sequence[StageTimes]
    split: Sequence[StageTimes] = ()


@dataclass(frozen=True)
class Fit:
    """Coefficients of stages.

    Args:
        factors: for forward and backward of every operator.
        error: mean relative difference of forward and backward from their prediction, weighted.
        split: of backwards; None if no operator is split.
    """

    stage: StageOverhead
    factors: tuple[float, float]
    error: float
    split: SplitBackward | None


def fit_stages(samples: Sequence[Sample], profile: Profile, cache_bytes: int | None) -> Fit:
    """Return the best fit.

    If even the best one is bad, other processes disturbed the measurement. The difference between
    the two times of an operator is then noise rather than an effect of the cache, so only the first
    time is used.

    Args:
        profile: for the micro-batch size of the samples.
        cache_bytes: the last level cache; None if operators have only one time.
    """
    times = operator_times(profile, profile.micro_batch_size)
    split = _fit_split(samples, profile)
    shares = [None] if cache_bytes is None else [round(s * cache_bytes) for s in CACHE_SHARES]
    fits = (_fit(samples, times, split, cache) for cache in shares)
    fit = min(fits, key=lambda fit: fit.error)
    disturbed = cache_bytes is not None and fit.error > DISTURBED
    return _fit(samples, times, split, None) if disturbed else fit


def _fit(
    samples: Sequence[Sample], times: Times, split: SplitBackward | None, cache_bytes: int | None
) -> Fit:
    bare = StageOverhead(cache_bytes=cache_bytes)
    forward_rows, backward_rows = [], []
    forward_s, backward_s = [], []
    for sample in samples:
        sums = sample.parts.sums
        of_operators = stage_times(sums, times, 1.0, bare)[:, 0].T.tolist()
        values = sums.values[:, 0].T.tolist()
        for own_s, each, (received, sent, got, gave) in zip(
            of_operators, sample.times, values, strict=True
        ):
            forward_rows.append((own_s[0], 1, received, sent))
            forward_s.append(each.forward_s)
            if own_s[1]:
                backward_rows.append((own_s[1], 1, got, gave))
                backward_s.append(each.backward_s)
    (f_factor, f_fixed, received, sent), f_error = _least_relative_errors(forward_rows, forward_s)
    (b_factor, b_fixed, got, gave), b_error = _least_relative_errors(backward_rows, backward_s)
    overhead = StageOverhead(f_fixed, received, sent, b_fixed, got, gave, cache_bytes)
    return Fit(overhead, (f_factor, b_factor), (f_error + b_error) / 2, split)


def _fit_split(samples: Sequence[Sample], profile: Profile) -> SplitBackward | None:
    """Return what splitting changes; both halves take at least as long as the whole."""
    rows: list[tuple[float, int]] = []
    changes: list[tuple[float, float, float]] = []
    sizes: list[float] = []
    for sample in samples:
        for members, whole, split in zip(
            sample.parts.members, sample.times, sample.split, strict=False
        ):
            indices, share = split_operators(members, profile)
            if indices:
                own_s = share * whole.backward_s
                input_s = split.backward_s - (whole.backward_s - own_s)
                rows.append((own_s, len(indices)))
                changes.append((split.forward_s - whole.forward_s, input_s, split.weight_s))
                sizes.append(whole.backward_s)
    if not rows:
        return None
    size = np.array(sizes) + _SHORT * max(sizes)
    matrix, targets = np.array(rows) / size[:, None], np.array(changes).T / size
    [forward_s] = _non_negative_fit(matrix[:, 1:], targets[0]).tolist()
    input_share, input_s = _non_negative_fit(matrix, targets[1]).tolist()
    weight_share, weight_s = _non_negative_fit(matrix, targets[2]).tolist()
    factor = 1 / min(1.0, max(_MIN_FACTOR, input_share + weight_share))
    return SplitBackward(forward_s, factor * input_share, input_s, factor * weight_share, weight_s)


def _least_relative_errors(
    rows: Sequence[tuple[float, float, float, float]], target: Sequence[float]
) -> tuple[list[float], float]:
    """Return the coefficients, the factor first, and the mean relative error."""
    if not target:
        return [1.0, 0.0, 0.0, 0.0], 0.0
    measured = np.array(target)
    size = measured + _SHORT * measured.max()
    matrix = np.array(rows, dtype=float) / size[:, None]
    coefficients = _non_negative_fit(matrix, measured / size)
    if not _MIN_FACTOR <= coefficients[0] <= _MAX_FACTOR:  # too few or too odd stages to tell
        coefficients[0] = min(_MAX_FACTOR, max(_MIN_FACTOR, float(coefficients[0])))
        residual = measured / size - matrix[:, 0] * coefficients[0]
        coefficients[1:] = _non_negative_fit(matrix[:, 1:], residual)
    return coefficients.tolist(), float(np.abs(matrix @ coefficients - measured / size).mean())


def _non_negative_fit(matrix: Floats, target: Floats) -> Floats:
    """Return non-negative coefficients with the smallest sum of absolute errors."""
    scale = np.maximum(matrix.max(axis=0), 1e-30)
    scaled, weights = matrix / scale, np.ones(len(matrix))
    coefficients: Floats = _non_negative(scaled, target, weights)
    for _ in range(_REWEIGHTINGS):
        weights = 1 / np.sqrt(np.maximum(np.abs(scaled @ coefficients - target), _SMALL_ERROR))
        coefficients = _non_negative(scaled, target, weights)
    coefficients /= scale
    return coefficients


def _non_negative(matrix: Floats, target: Floats, weights: Floats) -> Floats:
    """Solve weighted least squares, without columns whose coefficient would be negative."""
    columns = list(range(matrix.shape[1]))
    coefficients = np.zeros(matrix.shape[1])
    while columns:
        weighted = matrix[:, columns] * weights[:, None]
        solution = np.linalg.lstsq(weighted, target * weights, rcond=None)[0]
        if solution.min() >= 0:
            coefficients[columns] = solution
            break
        del columns[int(solution.argmin())]
    return coefficients
