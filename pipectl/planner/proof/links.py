"""What the ways between ranks take at least."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from pipectl.arrays import Floats
from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.simulate.network import Way, way_between, way_latency_s
from pipectl.simulate.reduction import reduction_s

_REFERENCE_BYTES = 2.0**20


class Ways:
    """The ways between the ranks of a cluster, looked up once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.between = cache(self._between)
        self._reduction = cache(self._reduction_s)

    def rates(self, ranks: Sequence[int]) -> tuple[Floats, Floats]:
        """Seconds per byte, at least, and latencies between some ranks; shapes [ranks, ranks]."""
        rates, late_s = np.zeros((2, len(ranks), len(ranks)))
        for row, source in enumerate(ranks):
            for column, target in enumerate(ranks):
                if source != target:
                    way = self.between(source, target)
                    rates[row, column] = max((_s_per_byte(link) for _, link in way), default=0.0)
                    late_s[row, column] = way_latency_s(way)
        return rates, late_s

    def late_s(self, source: int, target: int) -> float:
        """Latency between two ranks."""
        return way_latency_s(self.between(source, target))

    def reduction(self, ranks: Sequence[int]) -> tuple[float, float]:
        """Constant and seconds per byte of a sum of gradients, at least."""
        return self._reduction(tuple(sorted(ranks)))

    def _between(self, source: int, target: int) -> Way:
        return way_between(self._cluster, self._cluster.node_of_rank, source, target)

    def _reduction_s(self, ranks: tuple[int, ...]) -> tuple[float, float]:
        cluster = self._cluster
        links = (cluster.within_node, cluster.between_nodes, cluster.between_switches)
        if cluster.allreduce or any(link is not None and link.timings for link in links):
            return 0.0, 0.0
        none_s, some_s = (
            reduction_s(cluster, cluster.node_of_rank, ranks, size)
            for size in (0.0, _REFERENCE_BYTES)
        )
        return none_s, (some_s - none_s) / _REFERENCE_BYTES


@cache
def _s_per_byte(link: Link) -> float:
    """The largest rate that is never above what a message takes."""
    rates = [link.hold_s(size) / size for size, _ in link.timings if size > 0]
    return min([1.0 / link.bandwidth_bytes_per_s, *rates])
