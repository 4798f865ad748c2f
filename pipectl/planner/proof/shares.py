"""Which part of a micro-batch every unit works on, and what two units exchange."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from pipectl.arrays import Floats
from pipectl.plan import Replication
from pipectl.planner.proof.units import Shape


def shape_of(replicas: Sequence[int], replication: Replication, micro_batches: int) -> Shape:
    """The units of stages with so many replicas."""
    whole = replication is Replication.WHOLE
    pairs = [(count, index) for count in replicas for index in range(count)]
    return Shape(
        first=np.array([0, *accumulate(replicas)], np.int64),
        stage=np.repeat(np.arange(len(replicas)), replicas),
        period=np.array([count if whole else 1 for count, _ in pairs], np.int64),
        phase=np.array([index if whole else 0 for _, index in pairs], np.int64),
        micro_batches=micro_batches,
    )


def shares_of(replicas: Sequence[int], replication: Replication, size: int, last: int) -> Floats:
    """Of a full micro-batch; of a full one and of the last; shape [2, units].

    Args:
        size, last: samples of a micro-batch, and of the last one.
    """
    first, end = _samples(replicas, replication, size, last)
    found: Floats = (end - first) / size
    return found


def portions_of(replicas: Sequence[int], replication: Replication, size: int, last: int) -> Floats:
    """The part of a message between two units, shape [2, units, units]; in turn or by samples."""
    first, end = _samples(replicas, replication, size, last)
    start = np.maximum(first[:, :, None], first[:, None, :])
    stop = np.minimum(end[:, :, None], end[:, None, :])
    found: Floats = np.maximum(stop - start, 0) / size
    return found


def _samples(
    replicas: Sequence[int], replication: Replication, size: int, last: int
) -> tuple[Floats, Floats]:
    """First sample and end of every unit's part of a full and of the last micro-batch."""
    of_sizes = []
    for samples in (size, last):
        edges = [
            (0, samples)
            if replication is Replication.WHOLE
            else (index * samples // count, (index + 1) * samples // count)
            for count in replicas
            for index in range(count)
        ]
        of_sizes.append(edges)
    both = np.array(of_sizes, np.float64)
    return both[:, :, 0], both[:, :, 1]
