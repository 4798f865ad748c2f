"""Overhead of stages beyond their operators, fitted to stages that were timed as a whole.

Forward and backward of a stage are modelled as

    factor x operators + overhead + a time for each value received + one for each value sent

with coefficients that are not negative and minimise the sum of relative errors (iteratively
reweighted least squares); errors of stages that are far shorter than in any plan have less weight.
The factor covers what the operators' own times miss. If operators have a second time, for stages
that stay in the cache, the size of the cache is chosen by the same sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipectl.planner.costs.footprint import Sums
from pipectl.planner.costs.stage_costs import Times, stage_times
from pipectl.profile import StageOverhead

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


@dataclass(frozen=True)
class Sample:
    """The stages of a partition, each timed as a whole; medians, in seconds.

    Args:
        sums: of the partition alone.
        times_s: (forward, backward) of every stage.
    """

    sums: Sums
    times_s: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Fit:
    """Coefficients of stages.

    Args:
        factors: for forward and backward of every operator.
        error: mean relative difference of forward and backward from their prediction, weighted.
    """

    stage: StageOverhead
    factors: tuple[float, float]
    error: float


def fit_stages(samples: Sequence[Sample], times: Times, cache_bytes: int | None) -> Fit:
    """Return the best fit.

    If even the best one is bad, other processes disturbed the measurement. The difference between
    the two times of an operator is then noise rather than an effect of the cache, so only the first
    time is used.

    Args:
        times: of the operators at the micro-batch size of the samples and the footprints.
        cache_bytes: the last level cache; None if operators have only one time.
    """
    shares = [None] if cache_bytes is None else [round(s * cache_bytes) for s in CACHE_SHARES]
    fit = min((_fit(samples, times, cache) for cache in shares), key=lambda fit: fit.error)
    disturbed = cache_bytes is not None and fit.error > DISTURBED
    return _fit(samples, times, None) if disturbed else fit


def _fit(samples: Sequence[Sample], times: Times, cache_bytes: int | None) -> Fit:
    bare = StageOverhead(cache_bytes=cache_bytes)
    forward_rows, backward_rows = [], []
    forward_s, backward_s = [], []
    for sample in samples:
        of_operators = stage_times(sample.sums, times, 1.0, bare)[:, 0].T.tolist()
        values = sample.sums.values[:, 0].T.tolist()
        for own_s, each_s, (received, sent, got, gave) in zip(
            of_operators, sample.times_s, values, strict=True
        ):
            forward_rows.append((own_s[0], 1, received, sent))
            forward_s.append(each_s[0])
            if own_s[1]:
                backward_rows.append((own_s[1], 1, got, gave))
                backward_s.append(each_s[1])
    (f_factor, f_fixed, received, sent), f_error = _least_relative_errors(forward_rows, forward_s)
    (b_factor, b_fixed, got, gave), b_error = _least_relative_errors(backward_rows, backward_s)
    overhead = StageOverhead(f_fixed, received, sent, b_fixed, got, gave, cache_bytes)
    return Fit(overhead, (f_factor, b_factor), (f_error + b_error) / 2)


def _least_relative_errors(
    rows: Sequence[tuple[float, float, float, float]], target: Sequence[float]
) -> tuple[list[float], float]:
    """Return the coefficients, the factor first, and the mean relative error."""
    if not target:
        return [1.0, 0.0, 0.0, 0.0], 0.0
    measured = np.array(target)
    size = measured + _SHORT * measured.max()
    matrix = np.array(rows, dtype=float) / size[:, None]
    scale = np.maximum(matrix.max(axis=0), 1e-30)
    coefficients = _reweighted(matrix / scale, measured / size) / scale
    if not _MIN_FACTOR <= coefficients[0] <= _MAX_FACTOR:  # too few or too odd stages to tell
        coefficients[0] = min(_MAX_FACTOR, max(_MIN_FACTOR, float(coefficients[0])))
        residual = measured / size - matrix[:, 0] * coefficients[0]
        coefficients[1:] = _reweighted(matrix[:, 1:] / scale[1:], residual) / scale[1:]
    return coefficients.tolist(), float(np.abs(matrix @ coefficients - measured / size).mean())


def _reweighted(matrix: Floats, target: Floats) -> Floats:
    """Return non-negative coefficients with the smallest sum of absolute errors."""
    weights = np.ones(len(matrix))
    coefficients = _non_negative(matrix, target, weights)
    for _ in range(_REWEIGHTINGS):
        weights = 1 / np.sqrt(np.maximum(np.abs(matrix @ coefficients - target), _SMALL_ERROR))
        coefficients = _non_negative(matrix, target, weights)
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
