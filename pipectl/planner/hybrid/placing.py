"""DAPPLE's placement policies: which devices a stage takes, given what earlier stages took.

Two machines of four devices, stages of 2, 2, 3 and 1 replicas (digits are stages)::

    fresh first     0 0 2 2 | 1 1 2 3    whole unused machines while there are any
    append first    0 0 1 1 | 2 2 2 3    the machine in use until it is full
    scatter first   0 1 2 2 | 0 1 2 3    one device of every machine in turn

Source: Fan et al., "DAPPLE", PPoPP 2021, section on device placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

Ranks = tuple[tuple[int, ...], ...]
"""The ranks of every stage."""
Take = Callable[[Sequence[list[int]], Sequence[int], int], list[int]]
"""(free ranks of every machine, sizes of the machines, replicas) to ranks, which are taken out."""


def fresh_first(free: Sequence[list[int]], sizes: Sequence[int], count: int) -> list[int]:
    """Ranks of unused machines, then of the others, machine by machine."""
    unused = [row for row, size in zip(free, sizes, strict=True) if len(row) == size]
    others = [row for row, size in zip(free, sizes, strict=True) if len(row) < size]
    return _taken([*unused, *others], count)


def append_first(free: Sequence[list[int]], sizes: Sequence[int], count: int) -> list[int]:
    """Ranks of machines in use, then of unused ones, machine by machine."""
    unused = [row for row, size in zip(free, sizes, strict=True) if len(row) == size]
    others = [row for row, size in zip(free, sizes, strict=True) if len(row) < size]
    return _taken([*others, *unused], count)


def scatter_first(free: Sequence[list[int]], sizes: Sequence[int], count: int) -> list[int]:
    """One rank of the machine with the fewest ranks taken, in turn."""
    found: list[int] = []
    while len(found) < count:
        taken = [size - len(row) for row, size in zip(free, sizes, strict=True)]
        open_rows = [index for index, row in enumerate(free) if row]
        found.append(free[min(open_rows, key=lambda index: (taken[index], index))].pop(0))
    return sorted(found)


def _taken(rows: Sequence[list[int]], count: int) -> list[int]:
    found: list[int] = []
    for row in rows:
        while row and len(found) < count:
            found.append(row.pop(0))
    return found


POLICIES: dict[str, Take] = {
    "append": append_first,
    "fresh": fresh_first,
    "scatter": scatter_first,
}


def consecutive(replicas: Sequence[int], order: Sequence[int] | None = None) -> Ranks:
    """The next ranks of an order for every stage; by default of rising ranks."""
    ranks = range(sum(replicas)) if order is None else order
    return tuple(tuple(ranks[a:b]) for a, b in pairwise([0, *accumulate(replicas)]))


def placed(machine_of: Sequence[int], replicas: Sequence[int], take: Take) -> Ranks:
    """The ranks of every stage, stages one after another."""
    free: list[list[int]] = [[] for _ in range(1 + max(machine_of))]
    for rank, machine in enumerate(machine_of):
        free[machine].append(rank)
    sizes = [len(row) for row in free]
    return tuple(tuple(take(free, sizes, count)) for count in replicas)


def device_orders(machine_of: Sequence[int]) -> list[tuple[int, ...]]:
    """Orders whose consecutive runs are stages: machine by machine, and round the machines."""
    by_machine = tuple(range(len(machine_of)))
    place: dict[int, int] = {}
    turn = []
    for machine in machine_of:
        turn.append(place.get(machine, 0))
        place[machine] = turn[-1] + 1
    around = tuple(sorted(by_machine, key=lambda rank: (turn[rank], machine_of[rank])))
    return list(dict.fromkeys([by_machine, around]))
