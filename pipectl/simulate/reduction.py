"""How long a sum of gradients over the replicas of a stage takes.

A ring in the order of the ranks, which are numbered node by node, so that it enters and leaves
every node once: 2 (n - 1) rounds in which every rank sends an n-th of the bytes to the next, each
as long as its slowest part takes for all that passes it. With latency l and one bandwidth b this is
2 (n - 1) l + 2 (n - 1) / n * bytes / b (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms", JPDC 2009). Where the cluster has measured sums over as many ranks, on as many nodes,
these count instead.

A sum neither waits for messages and other sums on the same links nor slows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.simulate.network import way_between, way_latency_s


def reduction_s(
    cluster: Cluster, node_of_rank: Sequence[int], ranks: Sequence[int], size_bytes: float
) -> float:
    """Seconds from the start of the last rank to the end on all."""
    if len(ranks) < 2:
        return 0.0
    measured = _measured(cluster, node_of_rank, ranks)
    if measured is not None:
        return measured.transfer_s(size_bytes)
    return ring_s(cluster, node_of_rank, sorted(ranks), size_bytes)


def ring_s(
    cluster: Cluster, node_of_rank: Sequence[int], ranks: Sequence[int], size_bytes: float
) -> float:
    """Seconds of the ring through these ranks in this order."""
    busy_s: dict[Hashable, float] = {}
    latency_s = 0.0
    for source, target in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
        way = way_between(cluster, node_of_rank, source, target)
        latency_s = max(latency_s, way_latency_s(way))
        for shared_by, link in way:
            time_s = link.hold_s(size_bytes / len(ranks))
            busy_s[shared_by] = busy_s.get(shared_by, 0.0) + time_s
    return 2 * (len(ranks) - 1) * (latency_s + max(busy_s.values()))


def _measured(cluster: Cluster, node_of_rank: Sequence[int], ranks: Sequence[int]) -> Link | None:
    """Measured sums over the first ranks, if these are spread over nodes in the same way.

    As a link: its timings are read for any size as those of messages are.
    """
    rows = sorted((size, time_s) for n, size, time_s in cluster.allreduce if n == len(ranks))
    here = sorted(Counter(node_of_rank[rank] for rank in ranks).values())
    there = sorted(Counter(cluster.node_of_rank[: len(ranks)]).values())
    if not rows or here != there:
        return None
    large, large_s = rows[-1]
    return Link(0.0, max(1.0, large) / max(large_s, 1e-12), timings=tuple(rows))
