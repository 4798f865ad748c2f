"""Inner loop of the bounds, compiled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipectl.compiled import compiled

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@compiled
def longest_ways(
    sources: Integers, targets: Integers, seconds: Floats, lasts: Floats, ways: Floats
) -> None:
    """Longest ways to every stage along routes in an order in which none comes too early.

    Args:
        lasts: how long every stage takes.
        ways: zeros, filled in.
    """
    for route in range(len(sources)):
        source, target = sources[route], targets[route]
        through = ways[source] + lasts[source] + seconds[route]
        if through > ways[target]:
            ways[target] = through
