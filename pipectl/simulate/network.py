"""The ways between ranks, and who shares them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.simulate.tables import Network

Part = tuple[Hashable, Link]
"""A part of a way: what shares it with others, and its link."""
Way = tuple[Part, ...]


@dataclass(frozen=True)
class Stream:
    """Transfers that follow the same way: one of no micro-batch (-1), then one for every one.

    Args:
        size_bytes: of a full micro-batch.
        way: what carries them; nothing if they take only their latency.
        starters: rows that must have started a transfer before it moves.
        transfers: how many there are.
    """

    size_bytes: float
    latency_s: float
    way: Way
    starters: int
    transfers: int


def way_between(
    cluster: Cluster, node_of_rank: Sequence[int], source_rank: int, target_rank: int
) -> Way:
    """The parts a message passes.

    Two ranks of one node have a link of their own. Between nodes, and on top of it between
    switches, a link says who shares it: all ranks of the two nodes, every two ranks for
    themselves, or all that leaves and all that enters a node.
    """
    ranks = source_rank, target_rank
    nodes = node_of_rank[source_rank], node_of_rank[target_rank]
    if nodes[0] == nodes[1]:
        return _parts("within", cluster.within_node, ranks, ranks)
    way = _parts("nodes", cluster.between_nodes, ranks, nodes)
    switches = cluster.nodes[nodes[0]].switch, cluster.nodes[nodes[1]].switch
    if switches[0] == switches[1] or cluster.between_switches is None:
        return way
    return way[:1] + _parts("switches", cluster.between_switches, ranks, switches) + way[1:]


def way_latency_s(way: Way) -> float:
    """Latency of a way: of every link on it once."""
    return sum({id(link): link.latency_s for _, link in way}.values())


def host_way(link: Link, rank: int, *, to_host: bool) -> Way:
    """The way between a rank's device and the memory of its host."""
    return ((("host", rank, to_host if link.duplex else True), link),)


def _parts(
    where: str, link: Link, ranks: tuple[int, int], places: tuple[Hashable, Hashable]
) -> Way:
    """One part, or, with interfaces, one where the message leaves and one where it enters."""
    if link.interface and where != "within":
        sides = ("out", "in") if link.duplex else ("", "")
        return tuple(
            ((where, place, side), link) for place, side in zip(places, sides, strict=True)
        )
    ends: tuple[Hashable, Hashable] = places if link.shared else ranks
    return (((where, ends if link.duplex else frozenset(ends)), link),)


def tables(streams: Sequence[Stream]) -> Network:
    """The arrays of the event loop."""
    queues: dict[Hashable, int] = {}
    links: dict[int, tuple[int, Link]] = {}
    queue, link_of = [], []
    for stream in streams:
        for key, link in stream.way:
            queue.append(queues.setdefault(key, len(queues)))
            link_of.append(links.setdefault(id(link), (len(links), link))[0])
    known = [link for _, link in links.values()]
    timings = [row for link in known for row in link.timings]
    return Network(
        first_transfer=_starts(stream.transfers for stream in streams),
        starters=np.array([stream.starters for stream in streams], dtype=np.int64),
        size_bytes=np.array([stream.size_bytes for stream in streams], dtype=np.float64),
        latency_s=np.array([stream.latency_s for stream in streams], dtype=np.float64),
        way=_starts(len(stream.way) for stream in streams),
        queue=np.array(queue, dtype=np.int64),
        link=np.array(link_of, dtype=np.int64),
        link_bandwidth=np.array([link.bandwidth_bytes_per_s for link in known], dtype=np.float64),
        link_latency_s=np.array([link.latency_s for link in known], dtype=np.float64),
        timing=_starts(len(link.timings) for link in known),
        timing_bytes=np.array([size for size, _ in timings], dtype=np.float64),
        timing_s=np.array([time_s for _, time_s in timings], dtype=np.float64),
    )


def _starts(counts: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([0, *accumulate(counts)], dtype=np.int64)
