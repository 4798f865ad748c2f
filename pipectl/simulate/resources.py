"""What ranks compete for: links, and the cores of a node."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.schedule.channel import Channel


class LinkQueue:
    """A link in one direction (in both if it is not duplex): one message at a time, in order.

    A message holds the link for a time that depends on its size, and arrives a latency later.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.free_at = 0.0

    def carry(self, size_bytes: float, now: float) -> float:
        """When a message that is ready now has arrived."""
        self.free_at = max(now, self.free_at) + self.link.hold_s(size_bytes)
        return self.free_at + self.link.latency_s


def link_queues(
    plan: Plan, cluster: Cluster, connections: Sequence[Channel]
) -> list[LinkQueue | None]:
    """The queue each channel uses, None for local channels.

    Two ranks of one node have a link of their own; all ranks of two nodes share one, unless the
    cluster says otherwise.
    """
    queues: dict[tuple[bool, int, int], LinkQueue] = {}
    found: list[LinkQueue | None] = []
    for channel in connections:
        ends = channel.source_rank, channel.target_rank
        nodes = plan.node_of_rank[ends[0]], plan.node_of_rank[ends[1]]
        within = nodes[0] == nodes[1]
        link = cluster.within_node if within else cluster.between_nodes
        first, second = ends if within or not link.shared else nodes
        if not link.duplex:
            first, second = sorted((first, second))
        queue = queues.setdefault((within, first, second), LinkQueue(link))
        found.append(None if channel.is_local else queue)
    return found


class SharedCores:
    """A node with fewer cores than ranks: n computing ranks each run at min(1, cores / n).

    Work is measured on a virtual clock that runs at this rate, so a change of n moves the clock
    and not the end of every rank's work.
    """

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.computing: list[tuple[float, int]] = []
        self.clock = 0.0
        self.time = 0.0

    def start(self, rank: int, work_s: float, now: float) -> None:
        """A rank begins to compute what would take ``work_s`` on a core of its own."""
        self.clock += (now - self.time) * self._rate()
        self.time = now
        heappush(self.computing, (self.clock + work_s, rank))

    def finish(self, now: float) -> int:
        """The rank whose work ends now."""
        self.clock, rank = heappop(self.computing)
        self.time = now
        return rank

    def next_end(self) -> float | None:
        """When the next work ends if none begins before; None if nobody computes."""
        if not self.computing:
            return None
        return self.time + max(0.0, self.computing[0][0] - self.clock) / self._rate()

    def _rate(self) -> float:
        return min(1.0, self.cores / max(1, len(self.computing)))


def shared_cores(plan: Plan, cluster: Cluster) -> list[SharedCores | None]:
    """The shared cores of each rank's node; None where every rank has a core."""
    nodes = [
        SharedCores(node.cores) if plan.node_of_rank.count(index) > node.cores else None
        for index, node in enumerate(cluster.nodes)
    ]
    return [nodes[index] for index in plan.node_of_rank]
