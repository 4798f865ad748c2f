"""The kinds of devices a cluster has, and orders in which stages can use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipectl.cluster import Cluster
from pipectl.planner.machines.mix import Mix, free_tallies

MOST_STEPS = 5 * 10**8
"""Of the dynamic programme with free choice of kinds; above, a few orders are tried."""


@dataclass(frozen=True)
class Pool:
    """Devices of equal speed and memory.

    Args:
        ranks: that have one, ascending.
    """

    speed: float
    memory_bytes: int | None
    ranks: tuple[int, ...]


def pools(cluster: Cluster) -> tuple[Pool, ...]:
    """The devices of a cluster by kind, the fastest first."""
    ranks: dict[tuple[float, int | None], list[int]] = {}
    for rank in range(cluster.ranks):
        device = cluster.device(rank)
        ranks.setdefault((device.speed, device.memory_bytes), []).append(rank)
    found = [Pool(*kind, tuple(members)) for kind, members in ranks.items()]
    return tuple(sorted(found, key=lambda pool: (-pool.speed, pool.ranks)))


def mixes(devices: Sequence[Pool], states: int, fewest: int, most: int) -> list[Mix]:
    """Ways for ``fewest`` to ``most`` stages to use the devices.

    Every combination if the programme over so many states can afford it, or else the kinds in
    the order of the ranks, the fastest first, and the fastest last.
    """
    available = [len(pool.ranks) for pool in devices]
    if len(devices) == 1:
        return [Mix.ordered([0] * most, 1)]
    steps = states**2 // fewest * free_tallies(available, most) * len(devices)
    if steps <= MOST_STEPS:
        return [Mix.free(available, most)]
    return [Mix.ordered(order, len(devices)) for order in dict.fromkeys(_orders(devices, most))]


def _orders(devices: Sequence[Pool], most: int) -> list[tuple[int, ...]]:
    """Kinds by position; the fastest devices are used first."""
    fastest = [(kind, rank) for kind, pool in enumerate(devices) for rank in pool.ranks][:most]
    by_rank = sorted(fastest, key=lambda pair: pair[1])
    return [tuple(kind for kind, _ in order) for order in (by_rank, fastest, fastest[::-1])]
