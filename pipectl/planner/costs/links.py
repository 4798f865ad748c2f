"""Times of messages between stages, and of gradient sums over replicas, on a cluster.

The links are the simulator's (:mod:`pipectl.simulate.network`), without the traffic of other
borders. Sender i of n holds samples [i/n, (i+1)/n) of a micro-batch, and so do receivers; the
samples that a sender and a receiver share are one message. Messages on one link are sequential;
messages on different links overlap. Pairs of groups of ranks with the same message times are of one
*class*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers, Records, record, unique
from pipectl.cluster import Cluster
from pipectl.link import Link
from pipectl.simulate.network import (
    Place,
    exchange_of,
    held_by,
    reduction_s,
    way_between,
    way_latency_s,
)

REFERENCE_BYTES = 2**20
"""Size of the message that gives a link's time per byte."""
MAX_PARTS = 16
"""Maximum number of shared links of a sum, the busiest, on which it waits for others. Sums that go
between the same nodes have the same ones."""
HELD = record("part", "s_per_byte")
"""A shared link that a sum holds, and for how long; -1 if there are fewer."""
Replicas = tuple[int, ...]
"""The ranks of the replicas of a stage."""


class Message(NamedTuple):
    """Time of one micro-batch over one border.

    Args:
        hold_s: time until the next micro-batch can follow.
        late_s: time from then to the arrival.
    """

    hold_s: float
    late_s: float


class _Class(NamedTuple):
    """The links of a border, each with the shares of a micro-batch that pass it in sequence."""

    loads: frozenset[tuple[int, tuple[float, ...]]]
    late_s: float


class Links:
    """The links of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._links: list[Link] = []
        self._classes: dict[_Class, int] = {}
        self._class_of: dict[tuple[Replicas, Replicas], int] = {}

    @property
    def node_of_rank(self) -> Sequence[int]:
        """The node of every rank."""
        return self.cluster.node_of_rank

    def class_of(self, senders: Replicas, receivers: Replicas) -> int:
        """The number of the class of a border."""
        key = senders, receivers
        if key not in self._class_of:
            border = self._describe(*key)
            self._class_of[key] = self._classes.setdefault(border, len(self._classes))
        return self._class_of[key]

    def late_s(self) -> Floats:
        """Latency of every class."""
        return np.array([each.late_s for each in self._classes])

    def hold_s(self, sizes: Floats, last_share: float = 1.0) -> Floats:
        """Time per full message in which the busiest link takes no other; shape [classes, sizes].

        Args:
            last_share: size of the last micro-batch relative to the others. Its time is taken as
                this share of a full message's, which is lowered if the last one needs less.
        """
        busy_s = np.zeros((len(self._classes), len(sizes)))
        for row, each in enumerate(self._classes):
            for number, parts in each.loads:
                link = self._links[number]
                part_s = sum(hold_s(link, sizes * part) for part in parts)
                if last_share < 1 and link.timings:
                    last = sum(hold_s(link, sizes * part * last_share) for part in parts)
                    part_s = np.minimum(part_s, last / last_share)
                busy_s[row] = np.maximum(busy_s[row], part_s)
        return busy_s

    def transfer_s(
        self, size_bytes: float, senders: Sequence[int], receivers: Sequence[int]
    ) -> Message:
        """The message of one value of a micro-batch, which the senders hold in parts."""
        number = self.class_of(tuple(senders), tuple(receivers))
        busy_s = self.hold_s(np.array([float(size_bytes)]))[number, 0]
        return Message(float(busy_s), float(self.late_s()[number]))

    def reduce_s(self, size_bytes: float, ranks: Sequence[int]) -> float:
        """Simulated time of a sum of gradients, ``size_bytes`` on each rank."""
        return reduction_s(self.cluster, self.node_of_rank, ranks, size_bytes)

    def reduction_rate(self, ranks: Sequence[int]) -> tuple[float, float]:
        """(seconds of an empty sum, seconds per byte)."""
        none_s = self.reduce_s(0.0, ranks)
        return none_s, (self.reduce_s(REFERENCE_BYTES, ranks) - none_s) / REFERENCE_BYTES

    def held(self, ranks: Sequence[int]) -> dict[Place, float]:
        """Seconds per byte in which a sum holds shared links."""
        alone = exchange_of(self.cluster, self.node_of_rank, ranks, REFERENCE_BYTES)
        parts = held_by(alone, {})
        return {part: busy_s / REFERENCE_BYTES for part, busy_s in parts.items()}

    def _describe(self, senders: Replicas, receivers: Replicas) -> _Class:
        loads: dict[object, tuple[int, list[float]]] = {}
        late_s = 0.0
        for sender, receiver, part in shares(senders, receivers):
            if sender != receiver:
                way = way_between(self.cluster, self.node_of_rank, sender, receiver)
                late_s = max(late_s, way_latency_s(way))
                for key, link in way:
                    loads.setdefault(key, (self._number(link), []))[1].append(part)
        return _Class(frozenset((link, tuple(parts)) for link, parts in loads.values()), late_s)

    def _number(self, link: Link) -> int:
        for number, known in enumerate(self._links):
            if known is link:
                return number
        self._links.append(link)
        return len(self._links) - 1


def shares(senders: Sequence[int], receivers: Sequence[int]) -> Iterator[tuple[int, int, float]]:
    """(sender, receiver, share of the micro-batch) of every message."""
    left, right = len(senders), len(receivers)
    sent = received = 0
    done = 0
    while sent < left and received < right:
        until = min((sent + 1) * right, (received + 1) * left)
        yield senders[sent], receivers[received], (until - done) / (left * right)
        done = until
        sent += until == (sent + 1) * right
        received += until == (received + 1) * left


def hold_s(link: Link, sizes: Floats) -> Floats:
    """:meth:`pipectl.link.Link.hold_s` of many sizes."""
    if not link.timings:
        return sizes / link.bandwidth_bytes_per_s
    known, times = np.array(link.timings, dtype=float).T
    beyond = np.maximum(sizes - known[-1], 0.0) / link.bandwidth_bytes_per_s
    busy_s: Floats = np.maximum(np.interp(sizes, known, times) + beyond - link.latency_s, 0.0)
    return busy_s


class RankGroups:
    """Groups of ranks that share a stage, numbered, as arrays.

    Args:
        limit_bytes: memory limit of every rank, in addition to that of its device.

    Attributes:
        sizes: ranks of every group.
        slowness: of the slowest rank of every group, relative to the profile's device.
        limits_bytes: least limit of a rank of every group.
        after_s: time of the quickest rank of every group after each forward and backward.
        on_nodes: ranks on every node; shape [groups, nodes].
    """

    def __init__(self, links: Links, limit_bytes: float | None = None) -> None:
        self._links = links
        self._limit_bytes = limit_bytes
        self._numbers: dict[Replicas, int] = {}
        self._classes = np.full((8, 8), -1, dtype=np.int64)
        self._reductions: dict[int, tuple[float, float]] = {}
        self._parts: dict[Place, int] = {}
        self._slowness_at: dict[int, Floats] = {}
        self._held = np.zeros((0, MAX_PARTS), dtype=HELD)
        self.sizes = self.slowness = self.limits_bytes = self.after_s = np.zeros(0)
        self.on_nodes: Floats = np.zeros((0, 0))

    def number(self, layouts: Sequence[Sequence[Replicas]]) -> Integers:
        """Group numbers of layouts with equally many stages; shape [layouts, stages]."""
        numbers, before = self._numbers, len(self._numbers)
        rows = {  # layouts that differ only in their cuts share this object
            key: [numbers.setdefault(ranks, len(numbers)) for ranks in each]
            for key, each in {id(each): each for each in layouts}.items()
        }
        if len(numbers) > before:
            self._describe()
        if len(numbers) > len(self._classes):
            larger = np.full((2 * len(numbers),) * 2, -1, dtype=np.int64)
            larger[: len(self._classes), : len(self._classes)] = self._classes
            self._classes = larger
        return np.array([rows[id(each)] for each in layouts], dtype=np.int64)

    def slowness_at(self, size: int) -> Floats:
        """Of every group: how much longer its last replica to finish takes for its share of a
        micro-batch of ``size`` samples than the profile's device for the largest share."""
        if size not in self._slowness_at or len(self._slowness_at[size]) < len(self.sizes):
            slowness = self.slowness.copy()
            for number, ranks in enumerate(self._numbers):
                replicas = len(ranks)
                if (
                    size % replicas
                    and len({self._links.cluster.device(r).speed for r in ranks}) > 1
                ):
                    parts = np.diff(np.arange(replicas + 1) * size // replicas)
                    speeds = np.array([self._links.cluster.device(rank).speed for rank in ranks])
                    slowness[number] = float((parts / speeds).max() / parts.max())
            self._slowness_at[size] = slowness
        return self._slowness_at[size]

    def classes(self, senders: Integers, receivers: Integers) -> Integers:
        """Classes of pairs of groups, valid for at least these pairs; shape [groups, groups]."""
        missing = self._classes[senders, receivers] < 0
        pairs = set(zip(senders[missing].tolist(), receivers[missing].tolist(), strict=True))
        groups = list(self._numbers)
        for sender, receiver in sorted(pairs):
            number = self._links.class_of(groups[sender], groups[receiver])
            self._classes[sender, receiver] = number
        return self._classes

    def reduce_s(self, groups: Integers, size_bytes: Floats) -> Floats:
        """Seconds of sums of gradients; linear through no bytes and the reference size."""
        if (self.sizes[groups] == 1).all():
            return np.zeros(groups.shape)
        known = list(self._numbers)
        for number in unique(groups).tolist():
            if number not in self._reductions:
                self._reductions[number] = self._links.reduction_rate(known[number])
        rates = np.array([self._reductions.get(n, (0.0, 0.0)) for n in range(len(known))])
        sum_s: Floats = rates[groups, 0] + size_bytes * rates[groups, 1]
        return np.where(size_bytes > 0, sum_s, 0.0)

    def held(self) -> Records:
        """The shared links that the sums of groups hold; shape [groups, MAX_PARTS]."""
        groups, known = list(self._numbers), len(self._held)
        if known < len(groups):
            rows = np.zeros((len(groups) - known, MAX_PARTS), dtype=HELD)
            rows["part"] = -1
            for row, ranks in zip(rows, groups[known:], strict=True):
                parts = self._links.held(ranks) if len(ranks) > 1 else {}
                numbered = [
                    (self._parts.setdefault(part, len(self._parts)), rate)
                    for part, rate in parts.items()
                ]
                busiest = sorted(numbered, key=lambda each: (-each[1], each[0]))[:MAX_PARTS]
                row[: len(busiest)] = busiest
            self._held = np.concatenate([self._held, rows])
        return self._held

    @property
    def parts(self) -> int:
        """Number of shared links that :meth:`held` has numbered."""
        return len(self._parts)

    def _describe(self) -> None:
        cluster, groups, limit = self._links.cluster, list(self._numbers), self._limit_bytes
        nodes, count = np.array(cluster.node_of_rank), len(cluster.nodes)
        rows = [[cluster.device(rank).rows for rank in group] for group in groups]
        self.sizes = np.array([float(len(group)) for group in groups])
        self.slowness = np.array(
            [1.0 / min(cluster.device(rank).speed for rank in group) for group in groups]
        )
        self.limits_bytes = np.array(
            [min(cluster.memory_of(rank, limit) for rank in group) for group in groups]
        )
        self.after_s = np.array(
            [min(0.0 if row is None else row.compute for row in each) for each in rows]
        )
        self.on_nodes = np.array(
            [np.bincount(nodes[list(group)], minlength=count) for group in groups], dtype=np.float64
        )
