"""How long a sum of gradients over the replicas of a stage takes.

What the runtime sends is in :mod:`pipectl.plan.sums`: in each of two rounds, every replica sends an
n-th of every bucket to every other one. A round takes its latency and the time of whatever is busy
longest with its messages: a rank, which sends one after another and receives one after another, or
a link that ranks share. If the cluster has measured such sums over as many ranks, on as many nodes,
these count instead; they hold the copies and the additions of every rank, too.

A sum neither waits for messages and other sums on the same links nor slows them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import product
from math import ceil

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.plan.sums import BUCKET_BYTES, ROUNDS
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
    return _exchange_s(cluster, tuple(node_of_rank[rank] for rank in sorted(ranks)), size_bytes)


@lru_cache(maxsize=4096)
def _exchange_s(cluster: Cluster, nodes: tuple[int, ...], size_bytes: float) -> float:
    """Seconds of both rounds, from the links.

    Args:
        nodes: of every replica, in the order of their ranks.
    """
    buckets = max(1, ceil(size_bytes / BUCKET_BYTES))
    message_bytes = size_bytes / buckets / len(nodes)
    ranks_on = Counter(nodes)
    last = {node: rank for rank, node in enumerate(nodes)}
    busy_s: defaultdict[Hashable, float] = defaultdict(float)
    latency_s = 0.0
    for here, there in product(ranks_on, repeat=2):
        own = int(here == there)
        if own and ranks_on[here] == 1:
            continue
        way = way_between(cluster, nodes, nodes.index(here), last[there])
        latency_s = max(latency_s, way_latency_s(way))
        held_s = {key: buckets * link.hold_s(message_bytes) for key, link in way}
        sides = ("sends", "receives") if all(link.duplex for _, link in way) else ("both", "both")
        busy_s[sides[0], here] += (ranks_on[there] - own) * max(held_s.values())
        busy_s[sides[1], there] += (ranks_on[here] - own) * max(held_s.values())
        for key, link in way:
            if not own and (link.shared or link.interface):
                busy_s[key] += ranks_on[here] * ranks_on[there] * held_s[key]
    return ROUNDS * (latency_s + max(busy_s.values()))


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
