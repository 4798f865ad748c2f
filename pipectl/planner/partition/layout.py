"""What searches choose: stages and their ranks, and everything that makes a plan.

Also which ranks stages with replicas take: the next ones of an order, or by DAPPLE's policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from pipectl.plan import Replication
from pipectl.planner.graph.downsets import Partition

Members = tuple[tuple[int, ...], ...]
"""Indices of the operators of every stage, ascending."""
Ranks = tuple[tuple[int, ...], ...]
"""The ranks of every stage."""


class Layout(NamedTuple):
    """Stages and their ranks.

    Args:
        recompute: which stages compute their forward again for their backward; empty if none.
    """

    partition: Partition
    ranks: Ranks
    recompute: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Choice:
    """Everything a plan decides.

    Args:
        ranks: of every stage, one per replica.
        size: samples of a micro-batch.
        replication: how replicas share the work.
        recompute: whether each stage computes its forward again for its backward; empty if none.
        backward_ranks: where the backward of each stage runs, if elsewhere; empty if none does.
    """

    members: Members
    ranks: Ranks
    size: int
    schedule: str
    warm_up: tuple[int, ...]
    replication: Replication = Replication.WHOLE
    recompute: tuple[bool, ...] = ()
    backward_ranks: Ranks = ()


Take = Callable[[Sequence[list[int]], Sequence[int], int], list[int]]
"""(free ranks of every machine, sizes of the machines, replicas) to ranks, which are taken out."""


def fresh_first(free: Sequence[list[int]], sizes: Sequence[int], count: int) -> list[int]:
    """Ranks of unused machines, then of the others, machine by machine."""
    in_use = [len(row) < size for row, size in zip(free, sizes, strict=True)]
    return _take(free, sorted(range(len(free)), key=in_use.__getitem__), count)


def append_first(free: Sequence[list[int]], sizes: Sequence[int], count: int) -> list[int]:
    """Ranks of machines in use, then of unused ones, machine by machine."""
    unused = [len(row) == size for row, size in zip(free, sizes, strict=True)]
    return _take(free, sorted(range(len(free)), key=unused.__getitem__), count)


def scatter_first(free: Sequence[list[int]], sizes: Sequence[int], count: int) -> list[int]:
    """One rank of the machine with the fewest ranks taken, in turn."""
    taken: list[int] = []
    while len(taken) < count:
        used = [size - len(row) for row, size in zip(free, sizes, strict=True)]
        open_rows = [index for index, row in enumerate(free) if row]
        taken.append(free[min(open_rows, key=lambda index: (used[index], index))].pop(0))
    return sorted(taken)


def _take(free: Sequence[list[int]], machines: Sequence[int], count: int) -> list[int]:
    taken: list[int] = []
    for machine in machines:
        while free[machine] and len(taken) < count:
            taken.append(free[machine].pop(0))
    return taken


POLICIES: dict[str, Take] = {
    "append": append_first,
    "fresh": fresh_first,
    "scatter": scatter_first,
}
"""DAPPLE's placement policies: which devices a stage takes, given what earlier stages took.

Two machines of four devices, stages of 2, 2, 3 and 1 replicas (digits are stages)::

    fresh first     0 0 2 2 | 1 1 2 3    whole unused machines while there are any
    append first    0 0 1 1 | 2 2 2 3    the machine in use until it is full
    scatter first   0 1 2 2 | 0 1 2 3    one device of every machine in turn

Source: Fan et al., "DAPPLE", PPoPP 2021, section on device placement.
"""


def consecutive(replicas: Sequence[int], order: Sequence[int] | None = None) -> Ranks:
    """The next ranks of an order for every stage; by default of rising ranks."""
    ranks = range(sum(replicas)) if order is None else order
    return tuple(tuple(ranks[a:b]) for a, b in pairwise([0, *accumulate(replicas)]))


def placed(node_of_rank: Sequence[int], replicas: Sequence[int], take: Take) -> Ranks:
    """The ranks of every stage, stages one after another."""
    free: list[list[int]] = [[] for _ in range(1 + max(node_of_rank))]
    for rank, node in enumerate(node_of_rank):
        free[node].append(rank)
    sizes = [len(row) for row in free]
    return tuple(tuple(take(free, sizes, count)) for count in replicas)


def device_orders(node_of_rank: Sequence[int]) -> list[tuple[int, ...]]:
    """Orders whose consecutive runs are stages: machine by machine, and round the machines."""
    by_node = tuple(range(len(node_of_rank)))
    place: dict[int, int] = {}
    turn = []
    for node in node_of_rank:
        turn.append(place.get(node, 0))
        place[node] = turn[-1] + 1
    around = tuple(sorted(by_node, key=lambda rank: (turn[rank], node_of_rank[rank])))
    return list(dict.fromkeys([by_node, around]))
