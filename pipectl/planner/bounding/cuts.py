"""What many partitions need, as arrays: the figures of :mod:`pipectl.planner.costs` that time
depends on, without the objects.

A partition takes a few microseconds an operator here, a thousand times less than its footprint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.planner.bounding.cut_arrays import Graph, Sums
from pipectl.planner.bounding.cut_kernels import sum_cuts, sum_times
from pipectl.planner.graphs.bitsets import membership
from pipectl.planner.graphs.condense import Condensed
from pipectl.planner.memory.liveness import memory_of
from pipectl.planner.partition.cut_space import Partition
from pipectl.profile import Profile

Timings = tuple[Floats, Floats]
"""Cached and uncached forward and backward of every operator; shapes [2, operators]."""


@dataclass(frozen=True)
class Cuts:
    """Partitions into equally many stages.

    Args:
        stage_of: of every operator; shape [partitions, operators].
        sums: what does not depend on the micro-batch size, or is proportional to it.
    """

    stage_of: Integers
    sums: Sums
    profile: Profile

    def times_s(self, timings: Timings, scale: float) -> Floats:
        """Forward and backward of one micro-batch; shape [2, partitions, stages].

        Args:
            scale: micro-batch size over the profile's.
        """
        overhead, sums = self.profile.stage, self.sums
        shape = sums.saved_bytes.shape
        share: Floats = np.ones(shape)
        if overhead.cache_bytes:
            working_set = 2 * sums.parameter_bytes + sums.saved_bytes * scale
            share = uncached_shares(working_set, overhead.cache_bytes)
        times: Floats = np.zeros((2, *shape))
        sum_times(self.stage_of, share, *timings, times)
        received_s = (overhead.received_s, overhead.sent_s)
        returned_s = (overhead.gradient_received_s, overhead.gradient_sent_s)
        times[0] += overhead.forward_s + sums.values[:, :, :2] @ np.array(received_s)
        more = overhead.backward_s + sums.values[:, :, 2:] @ np.array(returned_s)
        times[1] = np.where(times[1] > 0, times[1] + more, 0.0)
        return times

    def update_s(self) -> Floats:
        """Optimizer step; shape [partitions, stages]."""
        step_s_per_byte = self.profile.optimizer_cost.step_s_per_byte
        return np.asarray(step_s_per_byte * self.sums.parameter_bytes, dtype=np.float64)


class PartitionSums:
    """Cuts one profile's operators into stages.

    Args:
        graph: condensed; partitions are of its blocks.
    """

    def __init__(self, profile: Profile, graph: Condensed) -> None:
        self._profile = profile
        self._graph = _arrays(profile)
        self._block_of = np.array(graph.block_of, dtype=np.int64)
        self._blocks = len(graph)

    def cut(self, partitions: Sequence[Partition]) -> Cuts:
        """What partitions into equally many stages need; at least one."""
        stages, edges = len(partitions[0]), len(self._graph.reader)
        flat = [stage for partition in partitions for stage in partition]
        rows = membership(flat, self._blocks).reshape(len(partitions), stages, self._blocks)
        stage_of = np.ascontiguousarray(rows.argmax(axis=1)[:, self._block_of])
        room = len(partitions) * 2 * min(edges, stages * (stages - 1) // 2)
        shape = len(partitions), stages
        sums = Sums(
            parameter_bytes=np.zeros(shape, dtype=np.int64),
            saved_bytes=np.zeros(shape, dtype=np.int64),
            values=np.zeros((*shape, 4), dtype=np.int64),
            source=np.zeros(room, dtype=np.int64),
            target=np.zeros(room, dtype=np.int64),
            size_bytes=np.zeros(room, dtype=np.int64),
            first=np.zeros(2 * len(partitions) + 1, dtype=np.int64),
        )
        sum_cuts(self._graph, stage_of, sums)
        return Cuts(stage_of, sums, self._profile)


def _arrays(profile: Profile) -> Graph:
    operators = profile.operators
    memory = [memory_of(operator) for operator in operators]
    made = {o.id: m.made_bytes for o, m in zip(operators, memory, strict=True)}
    kept = [
        made.get(m.storage) or operator.output_bytes
        for operator, m in zip(operators, memory, strict=True)
    ]
    parameters: dict[str, int] = {}
    names: dict[str, int] = {}
    return Graph(
        *_joined(profile.readers),
        _integers(operator.output_bytes for operator in operators),
        _integers(operator.gradient_bytes for operator in operators),
        _integers(names.setdefault(m.storage, len(names)) for m in memory),
        _integers(kept),
        *_named([dict(operator.parameters) for operator in operators], parameters),
        *_named([dict(operator.saved) for operator in operators], names),
        max(len(parameters), len(names)),
    )


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, dtype=np.int64)


def _joined(groups: Iterable[Sequence[int]]) -> tuple[Integers, Integers]:
    """All groups in one array, and where each begins."""
    found = list(groups)
    first = np.cumsum([0, *map(len, found)], dtype=np.int64)
    return _integers(chain.from_iterable(found)), first


def _named(
    held: Sequence[Mapping[str, int]], names: dict[str, int]
) -> tuple[Integers, Integers, Integers]:
    """Names as numbers, sizes, and where each operator's begin."""
    numbers = [[names.setdefault(name, len(names)) for name in one] for one in held]
    joined, first = _joined(numbers)
    return joined, _integers(chain.from_iterable(one.values() for one in held)), first


def uncached_shares(working_set_bytes: Floats, cache_bytes: int) -> Floats:
    """:meth:`pipectl.profile.StageOverhead.uncached` of many stages."""
    shares: Floats = np.clip(2 * (working_set_bytes / cache_bytes - 1), 0.0, 1.0)
    return shares
