"""Times of operators at a micro-batch size.

Times are interpolated between measured sizes, and extrapolated from the outermost two: a fixed
cost and a cost per sample. If only one size was measured, times are proportional to the size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipectl.arrays import Floats
from pipectl.profile import Profile

Pairs = list[tuple[float, float]]
"""(forward_s, backward_s) of every operator."""


@dataclass(frozen=True)
class Times:
    """Times of every operator, in a stage with much data and in one that stays in the cache.

    Cached times are never longer than uncached times: bounds need this, and noise may violate it.
    """

    uncached: Pairs
    cached: Pairs

    def of(self, index: int, share: float) -> tuple[float, float]:
        """(forward, backward) of one operator; ``share`` is 0 for cached, 1 for uncached."""
        (slow_f, slow_b), (fast_f, fast_b) = self.uncached[index], self.cached[index]
        return fast_f + (slow_f - fast_f) * share, fast_b + (slow_b - fast_b) * share

    def total(self, members: Iterable[int], share: float) -> tuple[float, float]:
        """Forward and backward of several operators together."""
        pairs = [self.of(index, share) for index in members]
        return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


def operator_times(profile: Profile, size: int) -> Times:
    """Forward and backward time of every operator for ``size`` samples."""
    return OperatorTimes(profile).at(size)


class OperatorTimes:
    """Times of one profile's operators at any micro-batch size."""

    def __init__(self, profile: Profile) -> None:
        own, operators = profile.micro_batch_size, profile.operators
        uncached = [{**o.timings, own: (o.forward_s, o.backward_s)} for o in operators]
        cached = [o.cached or points for o, points in zip(operators, uncached, strict=True)]
        self._uncached, self._cached = _Points(uncached), _Points(cached)
        self._known: dict[int, tuple[Floats, Floats]] = {}

    def at(self, size: int) -> Times:
        """Forward and backward time of every operator for ``size`` samples."""
        cached, uncached = self.arrays_at(size)
        return Times(_pairs(uncached), _pairs(cached))

    def arrays_at(self, size: int) -> tuple[Floats, Floats]:
        """The same as arrays, cached and uncached; shapes [2, operators]."""
        if size not in self._known:
            uncached = self._uncached.at(size)
            self._known[size] = np.minimum(self._cached.at(size), uncached), uncached
        return self._known[size]


def _pairs(times: Floats) -> Pairs:
    return [(forward_s, backward_s) for forward_s, backward_s in times.T.tolist()]


class _Points:
    """Measured times of operators, grouped by the sizes that were measured."""

    def __init__(self, points: Sequence[Mapping[int, tuple[float, float]]]) -> None:
        self._count = len(points)
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, known in enumerate(points):
            groups.setdefault(tuple(sorted(known)), []).append(index)
        self._groups = [
            (
                members,
                sizes,
                np.array([[points[i][at] for i in members] for at in sizes]).transpose(0, 2, 1),
            )
            for sizes, members in groups.items()
        ]

    def at(self, size: int) -> Floats:
        times_s = np.zeros((2, self._count))
        for members, sizes, times in self._groups:
            times_s[:, members] = _interpolate(sizes, times, size)
        return times_s


def _interpolate(sizes: Sequence[int], times: Floats, size: int) -> Floats:
    """Times at ``size`` from times at other sizes.

    Noise can tilt the line through two points. So below the smallest size, times are kept between
    proportional and constant; above the largest, they do not fall.

    Args:
        sizes: ascending.
        times: shape [sizes, ...].
    """
    first: Floats = times[0]
    last: Floats = times[-1]
    times_s: Floats = first * size / sizes[0]
    if len(sizes) == 1:
        return times_s
    low = next((at for at in range(len(sizes) - 1) if size <= sizes[at + 1]), len(sizes) - 2)
    slope = (times[low + 1] - times[low]) / (sizes[low + 1] - sizes[low])
    times_s = times[low] + slope * (size - sizes[low])
    if size < sizes[0]:
        return np.minimum(np.maximum(times_s, first * size / sizes[0]), first)
    return np.maximum(times_s, last) if size > sizes[-1] else times_s
