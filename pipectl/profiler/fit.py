"""What a stage takes besides its operators, fitted to stages that were timed whole.

Three things are found, by the very function with which the planner predicts stages:

1. The overhead of a stage and of every value that enters or leaves it: least squares over the
   time that passed outside of operators, none of it negative.
2. Up to how many bytes a stage finds its data in the cache.
3. A factor on all operators for what is still missing: the weighted median over the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pipectl.planner.costs import Footprint, Times, stage_times
from pipectl.profile import StageOverhead

Floats = npt.NDArray[np.float64]
CACHE_SHARES = (0.25, 0.5, 0.75, 1.0, 1.5)
"""Parts of the last level cache that stages of a rank may have for themselves."""
_SMALLEST_FACTOR, _LARGEST_FACTOR = 0.5, 2.0


@dataclass(frozen=True)
class Sample:
    """A stage that was timed whole; medians, in seconds.

    Args:
        parts: the partition, and which of its stages it is.
        outside_forward_s, outside_backward_s: the part of the times outside of operators.
    """

    parts: Footprint
    stage: int
    forward_s: float
    backward_s: float
    outside_forward_s: float
    outside_backward_s: float


@dataclass(frozen=True)
class Fit:
    """What was found.

    Args:
        factors: for forward and backward of every operator.
        error: mean share by which the stages differ from their prediction.
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
    overhead = _overhead(samples)
    if cache_bytes is None:
        return _fit(samples, times, overhead)
    caches = [round(share * cache_bytes) for share in CACHE_SHARES]
    fits = [_fit(samples, times, replace(overhead, cache_bytes=cache)) for cache in caches]
    return min(fits, key=lambda fit: fit.error)


def _overhead(samples: Sequence[Sample]) -> StageOverhead:
    counts = [sample.parts.values[sample.stage] for sample in samples]
    forward = _least_squares(
        [[1, count.received, count.sent] for count in counts],
        [sample.outside_forward_s for sample in samples],
    )
    backward = _least_squares(
        [
            [1, count.gradients_received, count.gradients_sent]
            for count, sample in zip(counts, samples, strict=True)
            if sample.outside_backward_s
        ],
        [sample.outside_backward_s for sample in samples if sample.outside_backward_s],
    )
    return StageOverhead(*forward, *backward)


def _least_squares(rows: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """Coefficients of at least 0 with the least relative errors."""
    if not target:
        return [0.0] * 3
    weights = 1 / np.maximum(np.array(target), 1e-9)
    matrix = np.array(rows, dtype=float) * weights[:, None]
    open_columns = list(range(matrix.shape[1]))
    found = np.zeros(matrix.shape[1])
    while open_columns:
        solution = np.linalg.lstsq(matrix[:, open_columns], np.ones(len(target)), rcond=None)[0]
        if solution.min() >= 0:
            found[open_columns] = solution
            break
        del open_columns[int(solution.argmin())]
    return [float(value) for value in found]


def _fit(samples: Sequence[Sample], times: Times, overhead: StageOverhead) -> Fit:
    bare = StageOverhead(cache_bytes=overhead.cache_bytes)
    operators = [stage_times(s.parts, s.stage, times, 1.0, bare) for s in samples]
    more = [s.parts.values[s.stage].overhead_s(overhead) for s in samples]
    measured = [(sample.forward_s, sample.backward_s) for sample in samples]
    factors = tuple(
        _factor(
            [measured[i][way] - more[i][way] for i in range(len(samples))],
            [operators[i][way] for i in range(len(samples))],
        )
        for way in (0, 1)
    )
    predicted = [
        sum(factors[way] * operators[i][way] + more[i][way] for way in (0, 1) if operators[i][way])
        for i in range(len(samples))
    ]
    errors = [abs(p / sum(m) - 1) for p, m in zip(predicted, measured, strict=True)]
    return Fit(overhead, (factors[0], factors[1]), float(np.mean(errors)))


def _factor(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """The weighted median of measured over predicted, longer stages counting more."""
    pairs = sorted((m / p, p) for m, p in zip(measured, predicted, strict=True) if p > 0)
    if not pairs:
        return 1.0
    weights = np.cumsum([weight for _, weight in pairs])
    middle = int(np.searchsorted(weights, weights[-1] / 2))
    return float(min(_LARGEST_FACTOR, max(_SMALLEST_FACTOR, pairs[middle][0])))
