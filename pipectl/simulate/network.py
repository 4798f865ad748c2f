"""The transfers of a step, their routes, and the links that they share.

:mod:`pipectl.lanes` describes how replicas sum gradients: in each of two rounds, each of n replicas
sends 1/n of every bucket to every other replica. A round takes its latency plus the time of
whatever is busy longest with its messages: a rank, which sends and receives one message after
another, or a shared link. If the cluster has measured sums over as many ranks on as many nodes,
these are used instead; they include the copies and additions on every rank.

A sum holds what it is busy with, as a message holds its way: shared links, and ranks that also sum
the gradients of other stages. It moves in pieces, each after the one before, so that messages and
other sums on the same links get their turns in between: sums that meet on a link share it evenly,
and a message waits for a piece, not for a sum.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import ceil
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats
from pipectl.cluster import Cluster
from pipectl.lanes import BUCKET_BYTES, ROUNDS
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.schedule.actions import Actions, Kind
from pipectl.schedule.channel import channels, roots_sent
from pipectl.simulate.tables import STREAM_OF, TRANSFER, Network, Rows

Place = tuple[Hashable, ...]
"""What carries one transfer at a time: a link or a direction of it, or a side of a rank."""
Part = tuple[Place, Link]
"""A part of a way: what shares it with other ways, and its link."""
Way = tuple[Part, ...]
SIDES = "sends", "receives", "both"
"""What a rank is busy with in a sum; the last if a link is not duplex."""
MAX_PIECES = 64
"""Maximum number of pieces of a sum, which has a bucket or more in each."""


@dataclass(frozen=True)
class Stream:
    """Transfers along the same way: one without a micro-batch (-1), then one per micro-batch.

    Args:
        size_bytes: of a full micro-batch.
        way: parts that carry the transfers; empty if they take only their latency.
        starters: number of rows that must start a transfer before it moves.
        transfers: number of transfers.
        pieces: number of equal parts of a transfer that move one after another.
        busy_s: for how long a whole transfer holds each part, independently of the others; if
            empty, the parts carry it one after another, by the bytes and the link.
    """

    size_bytes: float
    latency_s: float
    way: Way
    starters: int
    transfers: int
    pieces: int = 1
    busy_s: tuple[float, ...] = ()

    def holds_s(self, share: float) -> tuple[float, ...]:
        """For how long a piece holds each part.

        Args:
            share: bytes relative to a full micro-batch.
        """
        if self.busy_s:
            return tuple(busy_s / self.pieces for busy_s in self.busy_s)
        return tuple(link.hold_s(self.size_bytes * share) for _, link in self.way)


class Exchange(NamedTuple):
    """A sum of gradients that is alone on its links.

    Args:
        latency_s: of both rounds.
        longest_s: for how long whatever is busy longest is busy; 0 if measured sums were used.
        busy_s: by part: (side, node) for every rank of the node, and shared links.
    """

    latency_s: float
    longest_s: float
    busy_s: Mapping[Place, float]


def way_between(
    cluster: Cluster, node_of_rank: Sequence[int], source_rank: int, target_rank: int
) -> Way:
    """Return the parts that a message passes.

    Two ranks of a node have a link of their own. A link between nodes, or between switches, defines
    what shares it: all ranks of both nodes, one pair of ranks, or all that leaves or enters a node.
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
    """Return the latency of a way: the sum over its links, each once."""
    return sum({id(link): link.latency_s for _, link in way}.values())


def _parts(
    where: str, link: Link, ranks: tuple[int, int], places: tuple[Hashable, Hashable]
) -> Way:
    """Return one part, or two with interfaces: where the message leaves and where it enters."""
    if link.interface and where != "within":
        sides = ("out", "in") if link.duplex else ("", "")
        return tuple(
            ((where, place, side), link) for place, side in zip(places, sides, strict=True)
        )
    ends: tuple[Hashable, Hashable] = places if link.shared else ranks
    return (((where, ends if link.duplex else frozenset(ends)), link),)


def reduction_s(
    cluster: Cluster, node_of_rank: Sequence[int], ranks: Sequence[int], size_bytes: float
) -> float:
    """Return the seconds of a gradient sum that is alone on its links, from the last rank's start
    to the end on all ranks."""
    if len(ranks) < 2:
        return 0.0
    alone = exchange_of(cluster, node_of_rank, ranks, size_bytes)
    return alone.latency_s + alone.longest_s


def exchange_of(
    cluster: Cluster, node_of_rank: Sequence[int], ranks: Sequence[int], size_bytes: float
) -> Exchange:
    """Return what a gradient sum over several ranks is busy with."""
    alone = _exchange(cluster, tuple(node_of_rank[rank] for rank in sorted(ranks)), size_bytes)
    measured = _measured_sums(cluster, node_of_rank, ranks)
    if measured is None:
        return alone
    # What it takes alone was measured; what of it other sums have to wait for is estimated.
    longest_s = measured.transfer_s(size_bytes)
    busy_s = {part: min(each, longest_s) for part, each in alone.busy_s.items()}
    return Exchange(0.0, longest_s, busy_s)


@lru_cache(maxsize=4096)
def _exchange(cluster: Cluster, nodes: tuple[int, ...], size_bytes: float) -> Exchange:
    """Return what both rounds are busy with, from the links.

    Args:
        nodes: node of each replica, by ascending rank.
    """
    buckets = max(1, ceil(size_bytes / BUCKET_BYTES))
    message_bytes = size_bytes / buckets / len(nodes)
    ranks_on = Counter(nodes)
    last = {node: rank for rank, node in enumerate(nodes)}
    busy_s: defaultdict[Place, float] = defaultdict(float)
    latency_s = 0.0
    for here, there in product(ranks_on, repeat=2):
        own = int(here == there)
        if own and ranks_on[here] == 1:
            continue
        way = way_between(cluster, nodes, nodes.index(here), last[there])
        latency_s = max(latency_s, way_latency_s(way))
        held_s = {key: buckets * link.hold_s(message_bytes) for key, link in way}
        sides = SIDES[:2] if all(link.duplex for _, link in way) else SIDES[2:] * 2
        busy_s[sides[0], here] += (ranks_on[there] - own) * max(held_s.values())
        busy_s[sides[1], there] += (ranks_on[here] - own) * max(held_s.values())
        for key, link in way:
            if not own and (link.shared or link.interface):
                busy_s[key] += ranks_on[here] * ranks_on[there] * held_s[key]
    busy = {part: ROUNDS * each for part, each in busy_s.items()}
    return Exchange(ROUNDS * latency_s, max(busy.values()), busy)


def _measured_sums(
    cluster: Cluster, node_of_rank: Sequence[int], ranks: Sequence[int]
) -> Link | None:
    """Return the measured sums over the first ranks, if these are spread over nodes like ``ranks``.

    The result is a link, so that its timings are interpolated like those of messages.
    """
    rows = sorted((size, time_s) for n, size, time_s in cluster.allreduce if n == len(ranks))
    here = sorted(Counter(node_of_rank[rank] for rank in ranks).values())
    there = sorted(Counter(cluster.node_of_rank[: len(ranks)]).values())
    if not rows or here != there:
        return None
    large, large_s = rows[-1]
    return Link(0.0, max(1.0, large) / max(large_s, 1e-12), timings=tuple(rows))


class Numbering:
    """Numbers of all streams: channels, then the sums of each stage, then its copies.

    Copies are numbered by stage and replica, to the host and back, even if there are none, so that
    numbers do not depend on which stages offload.
    """

    def __init__(self, plan: Plan) -> None:
        self.channels = channels(plan)
        self._plan = plan
        self._first_copy: list[int] = []
        self.streams = len(self.channels) + len(plan.stages)
        for stage in plan.stages:
            self._first_copy.append(self.streams)
            self.streams += 2 * stage.replicas

    def of_rows(self, rank: int, actions: Actions) -> Rows:
        """Return the stream of each row of a rank's program; -1 for computations."""
        kind, stage = actions.column("kind"), actions.column("stage")
        numbers = actions.column("channel").copy()
        reduces = (kind == Kind.REDUCE_START) | (kind == Kind.REDUCE_WAIT)
        numbers[reduces] = len(self.channels) + stage[reduces]
        for kinds, back in (
            ((Kind.OFFLOAD_START, Kind.OFFLOAD_WAIT), 0),
            ((Kind.FETCH_START, Kind.FETCH_WAIT), 1),
        ):
            rows = np.flatnonzero((kind == kinds[0]) | (kind == kinds[1]))
            if len(rows):
                copies = [self.copies_of(int(index), rank) + back for index in stage[rows]]
                numbers[rows] = copies
        return numbers

    def around(self, channels: Sequence[int], stages: Sequence[int], rank: int) -> list[int]:
        """Return the streams of a plan with only these channels and stages, in this numbering.

        In that plan, stages of other ranks also have copies, which have no meaning here.
        """
        numbers = [*channels, *(len(self.channels) + stage for stage in stages)]
        for stage in stages:
            mine = rank in self._plan.stages[stage].updating_ranks
            first = self.copies_of(stage, rank) if mine else -1
            numbers += [first, first + 1]
        return numbers

    def copies_of(self, stage: int, rank: int) -> int:
        """Return the stream of a rank's copies to the host; the next one is the stream back."""
        return self._first_copy[stage] + 2 * self._plan.stages[stage].updating_ranks.index(rank)


def streams_of(plan: Plan, cluster: Cluster, numbering: Numbering, steps: int = 1) -> list[Stream]:
    """Return all streams in the order of their numbers.

    Args:
        steps: number of steps that are executed as one.
    """
    streams, count = [], 1 + steps * plan.micro_batches
    for channel in numbering.channels:
        if channel.is_local:
            streams.append(Stream(0, 0.0, (), 2, 0))
        else:
            ends = channel.source_rank, channel.target_rank
            way = way_between(cluster, plan.node_of_rank, *ends)
            streams.append(Stream(channel.size_bytes, way_latency_s(way), way, 2, count))
    streams += _sums(plan, cluster)
    for stage in plan.stages:
        if not stage.offload:
            streams += [Stream(0, 0.0, (), 1, 0)] * (2 * stage.replicas)
            continue
        for rank in stage.updating_ranks:
            device = cluster.nodes[plan.node_of_rank[rank]].device
            link = device.offload_link(plan.offload_to)
            for to_host in (True, False):
                way = ((("host", rank, to_host if link.duplex else True), link),)
                streams.append(Stream(stage.kept_bytes, link.latency_s, way, 1, count))
    return streams


def _sums(plan: Plan, cluster: Cluster) -> Iterator[Stream]:
    """Yield the stream of each stage's sum, which starts with its last replica."""
    summing = [stage.updating_ranks for stage in plan.stages if len(stage.updating_ranks) > 1]
    sums_of = Counter(rank for ranks in summing for rank in ranks)
    for index, stage in enumerate(plan.stages):
        ranks, size_bytes = stage.updating_ranks, float(stage.cost.accumulated_bytes)
        if len(ranks) == 1:
            yield Stream(0, 0.0, (), 1, 0)
            continue
        size_bytes *= (max(roots_sent(plan, index)) + 1) / ROUNDS  # in the first round alone
        alone = exchange_of(cluster, plan.node_of_rank, ranks, size_bytes)
        parts = held_by(alone, {r: plan.node_of_rank[r] for r in ranks if sums_of[r] > 1})
        if not parts:
            yield Stream(0, alone.latency_s + alone.longest_s, (), len(ranks), 1)
            continue
        parts = {("sum", index): alone.longest_s, **parts}
        way = tuple((part, cluster.between_nodes) for part in parts)
        pieces = min(MAX_PIECES, max(1, ceil(size_bytes / BUCKET_BYTES)))
        busy_s = tuple(parts.values())
        yield Stream(0, alone.latency_s, way, len(ranks), 1, pieces, busy_s)


def held_by(alone: Exchange, several: Mapping[int, int]) -> dict[Place, float]:
    """Return for how long a sum holds what others may wait for, by part.

    Args:
        several: nodes of the ranks that also take part in other sums.
    """
    parts = {part: busy_s for part, busy_s in alone.busy_s.items() if part[0] not in SIDES}
    for rank, node in several.items():
        sides = (side for side in SIDES if (side, node) in alone.busy_s)
        parts.update({(side, rank): alone.busy_s[side, node] for side in sides})
    return parts


def tables(streams: Sequence[Stream], share: Floats) -> Network:
    """Return the tables of the event loop before any transfer has started.

    Args:
        share: bytes of a row of each size, relative to a full micro-batch.
    """
    numbers: dict[Place, int] = {}
    shares = share.tolist()
    parts = [key for stream in streams for key, _ in stream.way]
    holds = [
        times_s
        for stream in streams
        for times_s in zip(*(stream.holds_s(each) for each in shares), strict=True)
    ]
    firsts = list(accumulate((stream.transfers for stream in streams), initial=0))
    transfers = np.zeros(firsts[-1], dtype=TRANSFER)
    transfers["waiting"], transfers["over_at"] = -1, np.inf
    for first, stream in zip(firsts, streams, strict=False):
        transfers["left"][first : first + stream.transfers] = stream.pieces
    ways = pairwise(accumulate((len(stream.way) for stream in streams), initial=0))
    return Network(
        streams=np.array(
            [
                (first, each.starters, *way, bool(each.busy_s), each.latency_s)
                for first, way, each in zip(firsts, ways, streams, strict=False)
            ],
            dtype=STREAM_OF,
        ),
        queues=np.array([numbers.setdefault(key, len(numbers)) for key in parts], dtype=int),
        hold_s=np.array(holds, dtype=float).reshape(len(parts), len(shares)),
        transfers=transfers,
    )
