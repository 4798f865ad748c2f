"""The devices of a cluster by kind, the orders in which stages may use them, and placements.

Along a chain of stages, the dynamic programme must know how many devices of each kind are in use.
A *tally* is the number of such a combination. With two devices A and one B::

    tally   0   1   2   3   4   5        next with A   0→1→3   2→4→5
    A used  0   1   0   2   1   2        next with B   0→2   1→4   3→5
    B used  0   0   1   0   1   1

The number of tallies is the product of the numbers of devices, each plus one. For many devices of
several kinds, the order of the kinds is fixed instead, and a tally is a position in it. Among equal
devices, stages go to ranks node by node, from the first node on or from the last, so that
neighbours stay close, or are spread over nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import combinations, groupby, islice, pairwise, product
from math import inf, prod

import numpy as np

from pipectl.arrays import Integers
from pipectl.cluster import Cluster, Device, Node


@dataclass(frozen=True)
class Mix:
    """Tallies by ascending number of stages.

    Args:
        following: the tally after one more stage on each kind, -1 if there is none; shape
            [tallies, kinds].
        used: stages so far; shape [tallies].
    """

    following: Integers
    used: Integers

    def __len__(self) -> int:
        return len(self.used)

    @property
    def kinds(self) -> int:
        """Number of kinds."""
        return int(self.following.shape[1])

    def tallies(self, stages: int) -> Integers:
        """The tallies with ``stages`` stages."""
        return np.flatnonzero(self.used == stages)

    def up_to(self, stages: int) -> Mix:
        """The same mix for at most ``stages`` stages."""
        count = int((self.used <= stages).sum())
        kept = self.following[:count]
        return replace(self, following=np.where(kept < count, kept, -1), used=self.used[:count])

    @classmethod
    def free(cls, available: Sequence[int], most: int) -> Mix:
        """Any order of the available devices of each kind, for at most ``most`` stages."""
        ranges = [range(min(count, most) + 1) for count in available]
        counts = [used for used in product(*ranges) if sum(used) <= most]
        counts.sort(key=lambda used: (sum(used), [-count for count in used]))
        place = {used: tally for tally, used in enumerate(counts)}
        following = [
            [
                place.get((*used[:kind], used[kind] + 1, *used[kind + 1 :]), -1)
                for kind in range(len(available))
            ]
            for used in counts
        ]
        return cls(
            np.array(following, dtype=np.int64),
            np.array([sum(used) for used in counts], dtype=np.int64),
        )

    @classmethod
    def ordered(cls, sequence: Sequence[int], kinds: int) -> Mix:
        """A fixed sequence of kinds; tallies count from the end of the pipeline."""
        sequence = sequence[::-1]
        following = np.full((len(sequence) + 1, kinds), -1, dtype=np.int64)
        following[np.arange(len(sequence)), list(sequence)] = np.arange(1, len(sequence) + 1)
        return cls(following, np.arange(len(sequence) + 1, dtype=np.int64))


def free_tallies(available: Sequence[int], most: int) -> int:
    """An upper bound on the tallies of :meth:`Mix.free`."""
    count = 1
    for devices in available:
        count *= min(devices, most) + 1
    return count


MAX_STEPS = 5 * 10**8
"""Steps of the dynamic programme with a free choice of kinds; above, a few orders are tried."""


@dataclass(frozen=True)
class Pool:
    """Devices of equal speed and memory.

    Args:
        ranks: of these devices, ascending.
    """

    speed: float
    memory_bytes: int | None
    ranks: tuple[int, ...]


def pools(cluster: Cluster) -> tuple[Pool, ...]:
    """The devices of a cluster by kind, the fastest first, of equal ones those with most memory."""
    ranks: dict[tuple[float, int | None], list[int]] = {}
    for rank in range(cluster.ranks):
        device = cluster.device(rank)
        ranks.setdefault((device.speed, device.memory_bytes), []).append(rank)
    kinds = [Pool(*kind, tuple(members)) for kind, members in ranks.items()]
    return tuple(sorted(kinds, key=lambda pool: (-pool.speed, -(pool.memory_bytes or inf))))


def mixes(devices: Sequence[Pool], states: int, stages: int) -> list[Mix]:
    """Ways in which stages can use the devices.

    Every combination if that takes at most ``MAX_STEPS``; otherwise the kinds in the order of the
    ranks, fastest first, and fastest last.

    Args:
        states: downsets of the dynamic programme.
    """
    available = [len(pool.ranks) for pool in devices]
    if len(devices) == 1:
        return [Mix.ordered([0] * stages, 1)]
    steps = states**2 // stages * free_tallies(available, stages) * len(devices)
    if steps <= MAX_STEPS:
        return [Mix.free(available, stages)]
    # Kinds by position; the fastest devices are used first.
    fastest = [(kind, rank) for kind, pool in enumerate(devices) for rank in pool.ranks][:stages]
    by_rank = sorted(fastest, key=lambda pair: pair[1])
    orders = [tuple(kind for kind, _ in pairs) for pairs in (by_rank, fastest, fastest[::-1])]
    return [Mix.ordered(order, len(devices)) for order in dict.fromkeys(orders)]


def merged_pools(devices: Sequence[Pool], unit: int, most: int) -> list[Pool]:
    """Classes of devices, the fastest first, of which units of ranks can be in use in at most
    ``most`` combinations. The classes nearest in speed are merged; a class has the speed of its
    slowest device. Of a class of less than a unit, no device is used.
    """
    classes = [pool for pool in devices if len(pool.ranks) >= unit] or [
        Pool(devices[-1].speed, None, tuple(rank for pool in devices for rank in pool.ranks))
    ]
    while len(classes) > 1 and prod(len(pool.ranks) // unit + 1 for pool in classes) > most:
        near = min(
            range(len(classes) - 1), key=lambda at: classes[at].speed / classes[at + 1].speed
        )
        first, second = classes[near : near + 2]
        both = replace(second, ranks=tuple(sorted((*first.ranks, *second.ranks))))
        classes[near : near + 2] = [both]
    return classes


def ranks_of_uses(uses: Sequence[Use], orders: Sequence[Sequence[int]]) -> tuple[Use, ...]:
    """The ranks of stages that use so many devices of each class; each class in its order.

    Within a stage, the slowest come first: if samples do not divide by replicas, the last ones get
    the larger shares (:mod:`pipectl.schedule.channel`).
    """
    left = [iter(order) for order in orders]
    return tuple(
        tuple(
            rank for kind in reversed(range(len(orders))) for rank in islice(left[kind], use[kind])
        )
        for use in uses
    )


Places = tuple[int, ...]
"""Rank of every stage."""
Use = tuple[int, ...]
"""How many devices of each class a stage uses."""
_MAX_EXCHANGES = 16
"""Up to this many stages, any two exchange their ranks; above, only neighbours do: the exchanges of
a thousand stages take minutes to list."""


def one_each(placement: Places) -> tuple[tuple[int, ...], ...]:
    """The ranks of stages with one replica each."""
    return tuple((rank,) for rank in placement)


def placements(cluster: Cluster, devices: Sequence[Pool], kinds: Sequence[int]) -> list[Places]:
    """Ways to put stages on ranks: node by node, and spread so that nodes share no core.

    Two nodes of two ranks and one core each, two stages::

        node by node   (0, 1)   fewest messages between nodes
        spread         (0, 2)   each stage has a core

    Node by node also from the last node on, if nodes with the same device differ.

    Args:
        kinds: of the device of every stage.
    """
    counts = [list(kinds).count(kind) for kind in range(len(devices))]
    node_of, ways = cluster.node_of_rank, list[Places]()
    for way in ways_through_nodes(cluster):
        members = (sorted(pool.ranks, key=lambda rank: way * node_of[rank]) for pool in devices)
        ways.append(_in_turn(kinds, [own[:n] for own, n in zip(members, counts, strict=True)]))
    spread = [_spread(cluster, pool, n) for pool, n in zip(devices, counts, strict=True)]
    return list(dict.fromkeys([*ways, _in_turn(kinds, spread)]))


def ways_through_nodes(cluster: Cluster) -> tuple[int, ...]:
    """1 for nodes in order, and -1 from the last one on if nodes with the same device differ."""
    devices = {frozenset(node.devices) for node in cluster.nodes}
    return (1, -1) if len(set(equal_nodes(cluster))) > len(devices) else (1,)


def _in_turn(kinds: Sequence[int], ranks: Sequence[Sequence[int]]) -> Places:
    left = [iter(members) for members in ranks]
    return tuple(next(left[kind]) for kind in kinds)


def _spread(cluster: Cluster, pool: Pool, stages: int) -> Places:
    """Assign each stage in turn to the node with the fewest stages per core."""
    members = groupby(pool.ranks, key=cluster.node_of_rank.__getitem__)
    ranks = {node: list(group) for node, group in members}
    chosen = dict.fromkeys(ranks, 0)
    queue = [(1 / cluster.nodes[node].cores, node) for node in ranks]
    heapify(queue)
    for _ in range(stages):
        _, node = heappop(queue)
        chosen[node] += 1
        if chosen[node] < len(ranks[node]):
            heappush(queue, ((chosen[node] + 1) / cluster.nodes[node].cores, node))
    return tuple(rank for node in ranks for rank in ranks[node][: chosen[node]])


def every_placement(cluster: Cluster, stages: int, most: int) -> list[Places]:
    """All distinct placements; none if there are more than ``most``.

    Ranks of a node with the same device are interchangeable, and so are equal nodes.
    """
    alike = equal_nodes(cluster)
    members: dict[tuple[int, Device], list[int]] = {}
    for rank, home in enumerate(cluster.node_of_rank):
        members.setdefault((home, cluster.device(rank)), []).append(rank)
    groups = [(node, ranks) for (node, _), ranks in members.items()]
    twins = [  # per node, the earlier nodes equal to it
        {other for other in range(node) if alike[other] == alike[node]}
        for node in range(len(alike))
    ]

    def extend(chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(chosen) == stages:
            yield chosen
            return
        nodes = {groups[group][0] for group in chosen}
        for group, (node, ranks) in enumerate(groups):
            if chosen.count(group) < len(ranks) and twins[node] <= nodes:
                yield from extend((*chosen, group))

    groups_of_stages = list(islice(extend(()), most + 1))
    if len(groups_of_stages) > most:
        return []
    return [_in_turn(chosen, [ranks for _, ranks in groups]) for chosen in groups_of_stages]


def equal_nodes(cluster: Cluster) -> list[int]:
    """Per node, the number of the first node that is equal to it but for the name."""
    first: dict[Node, int] = {}
    return [
        first.setdefault(replace(node, name=""), place) for place, node in enumerate(cluster.nodes)
    ]


def exchanges(placement: Places, cluster: Cluster) -> list[Places]:
    """Placements in which two stages have exchanged their ranks, if that makes a difference: ranks
    of a node with the same device are interchangeable, and so are equal nodes.

    With more than 16 stages, only neighbours exchange their ranks.
    """
    alike = equal_nodes(cluster)

    def shape(placement: Places) -> tuple[tuple[int, int, Device], ...]:
        """Per stage, the kind of its node, how many others of this kind are used before it, and its
        device."""
        used: dict[int, dict[int, int]] = {}
        named = []
        for rank in placement:
            node = cluster.node_of_rank[rank]
            known = used.setdefault(alike[node], {})
            place = known.setdefault(node, len(known))
            named.append((alike[node], place, cluster.device(rank)))
        return tuple(named)

    stages = range(len(placement))
    far = len(placement) <= _MAX_EXCHANGES
    distinct = {shape(placement): placement}
    for one, other in combinations(stages, 2) if far else pairwise(stages):
        changed = list(placement)
        changed[one], changed[other] = placement[other], placement[one]
        distinct.setdefault(shape(tuple(changed)), tuple(changed))
    return list(distinct.values())[1:]
