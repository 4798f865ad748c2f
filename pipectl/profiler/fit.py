"""What a stage takes besides its operators, fitted to stages that were timed whole.

Forward and backward of a stage are taken to be

    factor x operators + overhead + a time for each value that enters + one for each that leaves

with coefficients that are not negative and make the sum of relative errors smallest (iteratively
reweighted least squares); errors of stages far shorter than any plan has count less. The factor is
for what the operators' own times miss. Where operators have a second time, for stages that stay in
the cache, the cache's size is chosen by the same sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipectl.planner.costs.footprint import Footprint
from pipectl.planner.costs.operator_times import Times
from pipectl.planner.costs.stage_costs import stage_times
from pipectl.profile import StageOverhead

Floats = npt.NDArray[np.float64]
CACHE_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5)
"""Parts of the last level cache that stages of a rank may have for themselves."""
_LEAST_FACTOR, _MOST_FACTOR = 0.5, 2.0
_REWEIGHTINGS = 30
_SMALL_ERROR = 1e-3
_SHORT = 0.1
"""Of the longest stage: the weight of a stage so short is half that of a long one."""


@dataclass(frozen=True)
class Sample:
    """A stage that was timed whole; medians, in seconds.

    Args:
        parts: the partition, and which of its stages it is.
    """

    parts: Footprint
    stage: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Fit:
    """What was found.

    Args:
        factors: for forward and backward of every operator.
        error: mean share by which forward and backward differ from their prediction, weighted.
    """

    stage: StageOverhead
    factors: tuple[float, float]
    error: float


def fit_stages(samples: Sequence[Sample], times: Times, cache_bytes: int | None) -> Fit:
    """The best fit.

    Args:
        times: of the operators at the micro-batch size of the samples and the footprints.
        cache_bytes: the last level cache; None where operators have one time only.
    """
    if cache_bytes is None:
        return _fit(samples, times, None)
    caches = [round(share * cache_bytes) for share in CACHE_SHARES]
    return min((_fit(samples, times, cache) for cache in caches), key=lambda fit: fit.error)


def _fit(samples: Sequence[Sample], times: Times, cache_bytes: int | None) -> Fit:
    bare = StageOverhead(cache_bytes=cache_bytes)
    operators = [stage_times(s.parts, s.stage, times, 1.0, bare) for s in samples]
    values = [s.parts.values[s.stage] for s in samples]
    forward = _least_relative_errors(
        [(operators[i][0], 1, values[i].received, values[i].sent) for i in range(len(samples))],
        [sample.forward_s for sample in samples],
    )
    trained = [i for i in range(len(samples)) if operators[i][1]]
    backward = _least_relative_errors(
        [
            (operators[i][1], 1, values[i].gradients_received, values[i].gradients_sent)
            for i in trained
        ],
        [samples[i].backward_s for i in trained],
    )
    overhead = StageOverhead(*forward.overhead, *backward.overhead, cache_bytes=cache_bytes)
    error = (forward.error + backward.error) / 2
    return Fit(overhead, (forward.factor, backward.factor), error)


@dataclass(frozen=True)
class _Line:
    """Coefficients and the mean relative error they leave."""

    factor: float
    overhead: tuple[float, float, float]
    error: float


def _least_relative_errors(
    rows: Sequence[tuple[float, float, float, float]], target: Sequence[float]
) -> _Line:
    if not target:
        return _Line(1.0, (0.0, 0.0, 0.0), 0.0)
    measured = np.array(target)
    size = measured + _SHORT * measured.max()
    matrix = np.array(rows, dtype=float) / size[:, None]
    scale = np.maximum(matrix.max(axis=0), 1e-30)
    found = _reweighted(matrix / scale, measured / size) / scale
    if not _LEAST_FACTOR <= found[0] <= _MOST_FACTOR:  # too few or too odd stages to tell
        found[0] = min(_MOST_FACTOR, max(_LEAST_FACTOR, float(found[0])))
        rest = measured / size - matrix[:, 0] * found[0]
        found[1:] = _reweighted(matrix[:, 1:] / scale[1:], rest) / scale[1:]
    factor, fixed, entering, leaving = map(float, found)
    error = float(np.abs(matrix @ found - measured / size).mean())
    return _Line(factor, (fixed, entering, leaving), error)


def _reweighted(matrix: Floats, target: Floats) -> Floats:
    """Coefficients of at least 0 with the smallest sum of errors, which are not squared."""
    weights = np.ones(len(matrix))
    found = _non_negative(matrix, target, weights)
    for _ in range(_REWEIGHTINGS):
        weights = 1 / np.sqrt(np.maximum(np.abs(matrix @ found - target), _SMALL_ERROR))
        found = _non_negative(matrix, target, weights)
    return found


def _non_negative(matrix: Floats, target: Floats, weights: Floats) -> Floats:
    """Weighted least squares; a column whose coefficient would be negative is left out."""
    columns = list(range(matrix.shape[1]))
    found = np.zeros(matrix.shape[1])
    while columns:
        weighted = matrix[:, columns] * weights[:, None]
        solution = np.linalg.lstsq(weighted, target * weights, rcond=None)[0]
        if solution.min() >= 0:
            found[columns] = solution
            break
        del columns[int(solution.argmin())]
    return found
