"""The workload in integers, as the kernels take it.

A stage with d replicas of t devices takes per micro-batch

    (compute + moved / bandwidth) / d  +  (d - 1) / d * 4 * parameters / (bandwidth * micro-batches)

seconds: a micro-batch goes to one of the replicas, and their gradients are summed once a step. With
q the bracket and r the fraction behind ``(d - 1) / d``, both counted in ticks, the stage takes at
most T ticks if and only if ``q + r * (d - 1) <= T * d``. So all comparisons are exact. A tick is a
power of two so small that rounding q and r does not matter (below 1e-13 of the slowest plan).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log2
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.planner.throughput.model import Crossing, Workload
from pipectl.planner.throughput.request import ThroughputRequest

Seconds = Floats

TIME, SYNC, KEPT, FIXED = range(4)
"""Columns of a way: ticks of q, ticks of r, bytes per micro-batch in flight, bytes besides."""
NO_LIMIT = 2**61
SYNC_FACTOR = 4
"""Bytes that summing the gradients of n replicas moves, per parameter byte and (n - 1) / n."""
_BITS = 60


class Tables(NamedTuple):
    """Figures of the blocks at every tensor-parallel degree t.

    Args:
        tick_s: duration of a tick.
        slowest: no stage takes more ticks.
        tensor: the degrees t, ascending; shape [t].
        degrees: the numbers of replicas, ascending; shape [d].
        ways: shape [t, 2, 4, blocks]: the columns without and with recomputation; twice the same
            where there is one way only.
        quick: which of the two takes less time; shape [t, blocks].
        least: the smaller figure of each column; shape [t, 4, blocks].
        missing: 1 where a block cannot run at t; shape [t, blocks].
        most_devices, most_replicas: of all stages together.
        limit_bytes: memory of a device.
    """

    tick_s: float
    slowest: int
    tensor: Integers
    degrees: Integers
    ways: Integers
    quick: Integers
    least: Integers
    missing: Integers
    most_devices: int
    most_replicas: int
    limit_bytes: int


@dataclass(frozen=True)
class Borders:
    """What crosses cuts, in ticks.

    Args:
        members: blocks of every crossing, the producer first.
        leaving, entering: of a stage that holds the producer, and of one that does not; shape
            [t, crossings].
    """

    members: tuple[tuple[int, ...], ...]
    leaving: Integers
    entering: Integers


def tables_of(work: Workload, request: ThroughputRequest) -> tuple[Tables, Borders]:
    """Everything in ticks and bytes."""
    tensor = [t for t in work.tensor_degrees if t <= request.devices]
    seconds, sizes, missing = _columns(work, request, tensor)
    leaving_s, entering_s = (
        _moved(work.crossings, request, tensor, leaving=side) for side in (True, False)
    )
    slowest_s = float(seconds.max(axis=(0, 1)).sum() + (leaving_s + entering_s).max(axis=0).sum())
    scale = _scale(slowest_s * request.degrees[-1])
    ways = np.concatenate([_ticks(seconds, scale), sizes], axis=2)
    leaving, entering = _ticks(leaving_s, scale), _ticks(entering_s, scale)
    limit = request.memory_limit_bytes
    tables = Tables(
        tick_s=1 / scale,
        slowest=int(ways[:, :, :KEPT].max(axis=(0, 1)).sum() + (leaving + entering).max(0).sum()),
        tensor=np.array(tensor, dtype=np.int64),
        degrees=np.array(request.degrees, dtype=np.int64),
        ways=np.ascontiguousarray(ways),
        quick=ways[:, :, TIME].argmin(axis=1).astype(np.int64),
        least=ways.min(axis=1),
        missing=missing,
        most_devices=request.devices,
        most_replicas=min(request.devices, request.micro_batches),
        limit_bytes=NO_LIMIT if limit is None else limit,
    )
    members = tuple((item.producer, *item.readers) for item in work.crossings)
    return tables, Borders(members, leaving, entering)


def _columns(
    work: Workload, request: ThroughputRequest, tensor: Sequence[int]
) -> tuple[Seconds, Integers, Integers]:
    """Times and sizes of shape [t, 2, 2, blocks], and which are missing, of shape [t, blocks]."""
    shape = (len(tensor), 2, 2, len(work.ways))
    seconds = np.zeros(shape)
    sizes = np.zeros(shape, dtype=np.int64)
    missing = np.ones((len(tensor), len(work.ways)), dtype=np.int64)
    for block, table in enumerate(work.ways):
        for row, degree in enumerate(tensor):
            ways = table.get(degree, ())
            missing[row, block] = not ways
            for column, way in enumerate((*ways, *ways)[:2]):
                synced = SYNC_FACTOR * way.parameter_bytes / request.micro_batches
                seconds[row, column, :, block] = way.time_s, request.seconds(synced)
                sizes[row, column, :, block] = way.kept_bytes, way.fixed_bytes
    return seconds, sizes, missing


def _moved(
    crossings: Sequence[Crossing],
    request: ThroughputRequest,
    tensor: Sequence[int],
    *,
    leaving: bool,
) -> Seconds:
    """Seconds that every crossing costs one side; shape [t, crossings]."""
    sides = [item.leaving_bytes if leaving else item.entering_bytes for item in crossings]
    rows = [[request.seconds(side.get(degree, 0)) for side in sides] for degree in tensor]
    return np.array(rows, dtype=np.float64).reshape(len(tensor), len(sides))


def _scale(largest_s: float) -> float:
    """Ticks per second, so that ``largest_s`` seconds stay below 2 ** 60 ticks."""
    return 2.0 ** floor(_BITS - log2(largest_s)) if largest_s else 1.0


def _ticks(seconds: Seconds, scale: float) -> Integers:
    return np.rint(seconds * scale).astype(np.int64)
