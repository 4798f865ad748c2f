"""The order of reproducible sums over the micro-batches of a step: one fixed binary tree.

All replicas together add what one rank adds, in the same order, so the bits of a sum do not depend
on who computes which micro-batch. Eight micro-batches::

            .-------0..7-------.
        .-0..3-.            .-4..7-.
      0..1    2..3        4..5    6..7
      0  1    2  3        4  5    6  7

A node adds its two children. What is missing (micro-batches past the end of the step, or without a
gradient) is left out: a node with one child has the sum of that child.

A rank adds two nodes as soon as it has both. If it computes the micro-batches in order, it holds at
most as many sums as the tree has levels below the root, as the digits of a binary counter. At the
end of the step, replicas exchange the sums of the largest nodes that each has, its *roots*.

With replicas in turn (0, 2, 4, 6 and 1, 3, 5, 7), no replica would have both children of any node.
So each takes neighbouring micro-batches instead (0 to 3 and 4 to 7); where the schedule says that
replica ``i mod r`` computes what comes i-th, :func:`micro_batches_in_turn` says which micro-batch
comes i-th.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import lru_cache
from math import lcm
from typing import TypeVar

import numpy as np

from pipectl.schedule.actions import Integers

T = TypeVar("T")
Node = tuple[int, int]
"""(level, index): the micro-batches from ``index * 2**level`` to before the next index."""
Add = Callable[[T, T], T]


@lru_cache(maxsize=256)
def micro_batches_in_turn(replicas: tuple[int, ...], number: int) -> Integers:
    """Return the micro-batch that comes i-th in a step, for all i; shape [number].

    Each replica gets neighbouring micro-batches; if stages differ in their replicas, several ranges
    of them. Twelve micro-batches of three replicas::

        i            0  1  2  3  4  5  6  7  8  9 10 11
        replica      0  1  2  0  1  2  0  1  2  0  1  2
        micro-batch  0  4  8  1  5  9  2  6 10  3  7 11

    The last micro-batch, which may be smaller, comes last.

    Args:
        replicas: of each stage.
        number: of micro-batches in the step.
    """
    groups = lcm(*replicas)
    size, more = divmod(number, groups)
    order = (np.arange(groups) + more) % groups  # the group of the last place has the last range
    sizes = size + (order < more)
    firsts = np.empty(groups, dtype=np.int64)
    firsts[order] = np.cumsum(sizes) - sizes
    place = np.arange(number)
    found: Integers = firsts[place % groups] + place // groups
    return found


def insert(parts: MutableMapping[Node, T], micro_batch: int, value: T, add: Add[T]) -> None:
    """Add what a micro-batch contributes, and join it with all neighbours that are there.

    Args:
        parts: sums of nodes, none of which contains another.
        add: may change its first argument, a sum among ``parts``; the order of two does not matter.
    """
    level, index = 0, micro_batch
    while (other := parts.pop((level, index ^ 1), None)) is not None:
        value = add(other, value)
        level, index = level + 1, index >> 1
    parts[level, index] = value


def total(parts: Mapping[Node, T], add: Add[T]) -> T:
    """Return the sum of nodes, at least one, in the order of the tree.

    Args:
        add: must change none of its arguments.
    """
    left = dict(parts)
    while len(left) > 1:
        lowest, joined = min(left)[0], dict[Node, T]()
        for level, index in sorted(left):
            node = (level + 1, index >> 1) if level == lowest else (level, index)
            value = left[level, index]
            joined[node] = add(joined[node], value) if node in joined else value
        left = joined
    (value,) = left.values()
    return value


def roots(micro_batches: Iterable[int]) -> tuple[Node, ...]:
    """Return the largest nodes of which all micro-batches are among these, by level."""
    found, level, here = list[Node](), 0, set(micro_batches)
    while here:
        found += [(level, index) for index in sorted(here) if index ^ 1 not in here]
        here = {index >> 1 for index in here if index ^ 1 in here}
        level += 1
    return tuple(found)


def is_within(node: Node, root: Node) -> bool:
    """Return whether a node is another one or below it."""
    return node[0] <= root[0] and node[1] >> (root[0] - node[0]) == root[1]


def max_held(micro_batches: Sequence[int]) -> int:
    """Return how many sums a rank holds at most that computes these, in this order."""
    parts, most = dict[Node, int](), 0
    for micro_batch in micro_batches:
        insert(parts, micro_batch, 0, int.__add__)
        most = max(most, len(parts))
    return most
