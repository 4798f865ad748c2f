"""What the kernels read: costs by downset that are never above those of the stages themselves.

A stage between two downsets takes at least the difference of their sums: every operator at the
faster of its times with and without the cache, values that pass its borders for nothing, and
parameters that several operators use in equal parts with each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from math import ceil

import numpy as np

from pipectl.arrays import Floats
from pipectl.cluster import Cluster
from pipectl.plan import Replication
from pipectl.planner.graphs.condense import Condensed
from pipectl.planner.memory.liveness import parameter_gradients
from pipectl.planner.operator_times import operator_times
from pipectl.planner.proof.chains import Graph, Layout
from pipectl.planner.proof.layouts import Arrangement
from pipectl.planner.proof.links import Ways
from pipectl.planner.proof.shares import portions_of, shape_of, shares_of
from pipectl.planner.proof.units import Shape
from pipectl.profile import Profile


class LeastCosts:
    """Makes the arrays; what layouts share is computed once.

    Args:
        downsets: all there are.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        graph: Condensed,
        downsets: Sequence[int],
        batch_size: int,
    ) -> None:
        self._profile, self._cluster, self._graph = profile, cluster, graph
        self._downsets = np.array(downsets, np.int64)
        self._inside = (self._downsets[:, None] >> np.arange(len(graph)) & 1).astype(np.float64)
        self._batch_size = batch_size
        self._ways = Ways(cluster)
        self._parameters, self._gradients = self._held_bytes()
        self._cores = np.array([node.cores for node in cluster.nodes], np.int64)
        self._block_s = cache(self._block_times)
        self._time_s = cache(self._times)
        self.graph_at = cache(self._graph_at)

    def micro_batches(self, size: int) -> int:
        """Of a step."""
        return ceil(self._batch_size / size)

    def _graph_at(self, size: int) -> Graph:
        """The values at a micro-batch size."""
        scale, values = size / self._profile.micro_batch_size, self._graph.values
        return Graph(
            self._downsets,
            np.array([value.producer for value in values], np.int64),
            np.array([value.blocks & ~(1 << value.producer) for value in values], np.int64),
            np.array([value.size_bytes * scale for value in values], np.float64),
            np.array([value.gradient_bytes * scale for value in values], np.float64),
        )

    def least_work_s(self, arrangement: Arrangement) -> float:
        """Of a step that is spread evenly over the ranks."""
        ranks = [rank for inside in arrangement.ranks for rank in inside]
        speed = sum(self._cluster.device(rank).speed for rank in ranks)
        return float(self._least_s(arrangement)[-1]) / speed

    def shape(self, arrangement: Arrangement) -> Shape:
        """Who works on what."""
        count = self.micro_batches(arrangement.size)
        return shape_of(arrangement.replicas, arrangement.replication, count)

    def layout(self, arrangement: Arrangement) -> Layout:
        """What it costs."""
        replicas, size = arrangement.replicas, arrangement.size
        ranks = [rank for inside in arrangement.ranks for rank in inside]
        speed = np.array([self._cluster.device(rank).speed for rank in ranks], np.float64)
        times = [self._time_s(size, count) for count in self._slices(arrangement)]
        overhead = self._profile.stage
        more_s = np.array([overhead.forward_s, overhead.backward_s])
        factors = [size / ceil(size / count) for count in self._slices(arrangement)]
        stages = np.repeat(np.arange(len(replicas)), replicas)
        behind = [speed[stages >= stage].sum() for stage in range(len(replicas) + 1)]
        rates, late_s = self._ways.rates(ranks)
        last = self._last(size)
        how = replicas, arrangement.replication, size, last
        optimizer = self._profile.optimizer_cost
        sums = [
            self._ways.reduction(inside) if len(inside) > 1 else (0.0, 0.0)
            for inside in arrangement.ranks
        ]
        return Layout(
            time_s=np.ascontiguousarray(np.array(times).transpose(1, 0, 2)),
            stage_s=np.ascontiguousarray(np.outer(more_s, factors)),
            least_s=self._least_s(arrangement),
            capacity=np.array(behind, np.float64),
            bytes_held=self._parameters,
            bytes_summed=self._gradients,
            update_s_per_byte=float(optimizer.step_s_per_byte),
            reduce_s=np.ascontiguousarray(np.array(sums, np.float64).T),
            speed=speed,
            share=shares_of(*how),
            portion=portions_of(*how),
            s_per_byte=rates,
            late_s=late_s,
            node=np.array([self._cluster.node_of_rank[rank] for rank in ranks], np.int64),
            cores=self._cores,
        )

    def _slices(self, arrangement: Arrangement) -> list[int]:
        """Into how many parts every stage splits a micro-batch."""
        whole = arrangement.replication is Replication.WHOLE
        return [1 if whole else count for count in arrangement.replicas]

    def _last(self, size: int) -> int:
        return self._batch_size - (self.micro_batches(size) - 1) * size

    def _least_s(self, arrangement: Arrangement) -> Floats:
        """Forward and backward of a step by downset, at the least of the stages' times."""
        parts = sorted(set(self._slices(arrangement)))
        each = [self._block_s(arrangement.size, count).sum(axis=0) for count in parts]
        blocks: Floats = np.minimum.reduce(each)
        found: Floats = self._inside @ blocks * (self._batch_size / arrangement.size)
        return found

    def _times(self, size: int, parts: int) -> Floats:
        """A forward and backward by downset; shape [2, downsets]."""
        found: Floats = self._block_s(size, parts) @ self._inside.T
        return found

    def _block_times(self, size: int, parts: int) -> Floats:
        """The same by block, of a micro-batch in so many parts."""
        samples = ceil(size / parts)
        least = np.array(operator_times(self._profile, samples).cached) * (size / samples)
        found: Floats = np.array(
            [least[list(block.operators)].sum(axis=0) for block in self._graph.blocks]
        ).T
        return found

    def _held_bytes(self) -> tuple[Floats, Floats]:
        """Parameters, and their gradients, by downset."""
        operators = self._profile.operators
        found = []
        for pairs in (
            [operator.parameters for operator in operators],
            [tuple(parameter_gradients(operator)) for operator in operators],
        ):
            uses = Counter(name for held in pairs for name, _ in dict(held).items())
            each = np.array([_part(dict(held).items(), uses) for held in pairs])
            blocks = [each[list(block.operators)].sum() for block in self._graph.blocks]
            found.append(self._inside @ np.array(blocks, np.float64))
        return found[0], found[1]


def _part(held: Iterable[tuple[str, int]], uses: Counter[str]) -> float:
    return sum(size / uses[name] for name, size in held)
