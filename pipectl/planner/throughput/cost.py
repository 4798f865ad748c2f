"""What one stage costs, in seconds and bytes: the objective, as it is defined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import fsum

from pipectl.planner.throughput.model import Way, Workload
from pipectl.planner.throughput.request import ThroughputRequest
from pipectl.planner.throughput.tables import SYNC_FACTOR


def stage_time_s(
    work: Workload,
    request: ThroughputRequest,
    ways: Mapping[int, Way],
    tensor_parallel: int,
    data_parallel: int,
) -> float:
    """Time per micro-batch of a stage.

    Compute, and what crosses its borders, are divided by its replicas, which take turns. What
    summing their gradients moves once a step is divided by the step's micro-batches.

    Args:
        ways: of its blocks.
    """
    moved = fsum(_crossing_bytes(work, ways, tensor_parallel))
    parameters = sum(way.parameter_bytes for way in ways.values())
    others = (data_parallel - 1) / data_parallel
    synced = SYNC_FACTOR * others * parameters / request.micro_batches
    compute_s = fsum(way.time_s for way in ways.values())
    return compute_s / data_parallel + request.seconds(moved / data_parallel + synced)


def stage_memory_bytes(ways: Iterable[Way], in_flight: int) -> int:
    """Memory of each of a stage's devices."""
    return sum(way.kept_bytes * in_flight + way.fixed_bytes for way in ways)


def _crossing_bytes(
    work: Workload, inside: Mapping[int, Way], tensor_parallel: int
) -> Iterable[int]:
    """Of everything that the stage holds some members of, but not all."""
    for item in work.crossings:
        readers = sum(block in inside for block in item.readers)
        if item.producer in inside and readers < len(item.readers):
            yield item.leaving_bytes.get(tensor_parallel, 0)
        elif item.producer not in inside and readers:
            yield item.entering_bytes.get(tensor_parallel, 0)
