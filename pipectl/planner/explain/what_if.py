"""Clusters with one thing changed: the number of nodes, memory, or the speed of links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipectl.cluster import Cluster, Node
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.simulate import simulate

_UNLIMITED_BYTES_PER_S = 1e18

MAX_SLOWER = 4.0, 10.0
"""Factors by which assumed links within and between nodes may be slower: 1 Gbit/s, not 10."""
_MIN_RANGE = 0.05
"""Share of a step; a narrower range is shown as a point."""


def with_nodes(cluster: Cluster, nodes: int) -> Cluster:
    """The first ``nodes`` nodes of a cluster; if it has fewer, its last node is repeated."""
    last = cluster.nodes[-1]
    more = (replace(last, name=f"{last.name}+{index}") for index in range(1, nodes + 1))
    return replace(cluster, nodes=(*cluster.nodes, *more)[:nodes])


def with_ranks(cluster: Cluster, ranks: int) -> Cluster:
    """The first ranks of a cluster, which has at least as many."""
    kept: list[Node] = []
    for node in cluster.nodes:
        if ranks > 0:
            kept.append(replace(node, ranks=min(ranks, node.ranks), shares=node.shares[:ranks]))
        ranks -= node.ranks
    return replace(cluster, nodes=tuple(kept))


def with_memory(cluster: Cluster, more_bytes: int) -> Cluster:
    """The cluster with ``more_bytes`` more memory per device, if the memory is known."""

    def larger(node: Node) -> Node:
        memory = node.device.memory_bytes
        if memory is None:
            return node
        return replace(node, device=replace(node.device, memory_bytes=memory + more_bytes))

    return replace(cluster, nodes=tuple(map(larger, cluster.nodes)))


def with_unlimited_memory(cluster: Cluster) -> Cluster:
    """The cluster with unlimited memory per device."""
    nodes = (
        replace(node, device=replace(node.device, memory_bytes=None)) for node in cluster.nodes
    )
    return replace(cluster, nodes=tuple(nodes))


def with_bandwidth(cluster: Cluster, bytes_per_s: float) -> Cluster:
    """The cluster with this bandwidth on every link; latencies stay, sums follow from the links."""

    def changed(link: Link) -> Link:
        return replace(
            link, bandwidth_bytes_per_s=bytes_per_s, timings=(), assumed=False, observed=None
        )

    return replace(_with_links(cluster, changed), allreduce=())


def with_slower_links(cluster: Cluster, factor: float) -> Cluster:
    """Every message and sum takes ``factor`` times as long; 0 makes them free."""
    sums = tuple((ranks, size, time_s * factor) for ranks, size, time_s in cluster.allreduce)
    changed = _with_links(cluster, lambda link: _slower(link, factor))
    return replace(changed, allreduce=sums if factor else ())


def with_slower_assumed_links(cluster: Cluster, within: float, between: float) -> Cluster:
    """Messages on links without measurements take longer by these factors; 0 makes them free.

    Args:
        within, between: factors within a node, and between nodes and switches.
    """

    def changed(link: Link, factor: float) -> Link:
        return _slower(link, factor) if cluster.assumed or link.assumed else link

    switches = cluster.between_switches
    return replace(
        cluster,
        within_node=changed(cluster.within_node, within),
        between_nodes=changed(cluster.between_nodes, between),
        between_switches=switches and changed(switches, between),
    )


def with_faster_links(cluster: Cluster, factor: float) -> Cluster:
    """Links of ``factor`` times the bandwidth and the same latency.

    The latency of measured sums is the time of the smallest.
    """
    least: dict[int, float] = {}
    for ranks, _, time_s in cluster.allreduce:
        least[ranks] = min(time_s, least.get(ranks, time_s))
    sums = tuple(
        (ranks, size, least[ranks] + (time_s - least[ranks]) / factor)
        for ranks, size, time_s in cluster.allreduce
    )
    changed = _with_links(cluster, lambda link: _faster(link, factor))
    return replace(changed, allreduce=sums)


def _with_links(cluster: Cluster, changed: Callable[[Link], Link]) -> Cluster:
    switches = cluster.between_switches
    return replace(
        cluster,
        within_node=changed(cluster.within_node),
        between_nodes=changed(cluster.between_nodes),
        between_switches=None if switches is None else changed(switches),
    )


def _slower(link: Link, factor: float) -> Link:
    bandwidth = link.bandwidth_bytes_per_s / factor if factor else _UNLIMITED_BYTES_PER_S
    return replace(
        link,
        latency_s=link.latency_s * factor,
        bandwidth_bytes_per_s=bandwidth,
        timings=tuple((size, time_s * factor) for size, time_s in link.timings) if factor else (),
    )


def _faster(link: Link, factor: float) -> Link:
    latency_s = link.latency_s
    return replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor,
        timings=tuple(
            (size, latency_s + max(0.0, time_s - latency_s) / factor)
            for size, time_s in link.timings
        ),
    )


def step_range(plan: Plan, cluster: Cluster) -> tuple[float, float] | None:
    """Seconds of a step if messages on assumed links are free, and if they take far longer.

    Returns:
        None if no link is assumed, or if that makes little difference.
    """
    fast_s, slow_s = (
        simulate(plan, with_slower_assumed_links(cluster, *factors)).step_time_s
        for factors in ((0.0, 0.0), MAX_SLOWER)
    )
    return (fast_s, slow_s) if slow_s > (1 + _MIN_RANGE) * fast_s else None
