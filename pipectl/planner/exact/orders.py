"""Topological orders of the blocks: each is a chain of downsets, and cutting chains is cheap.

The orders differ in which of the ready blocks comes next: the first in the graph, the one nearest
to an end, or the one that goes on where the last one stopped. Each is also built from behind.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from pipectl.planner.exact.load_model import Lists, LoadModel


def topological_orders(model: LoadModel) -> list[list[int]]:
    """Different orders, the blocks' own one first."""
    forward = _orders(model.predecessors, model.successors)
    mirrored = _orders(_mirrored(model.successors), _mirrored(model.predecessors))
    last = len(model) - 1
    backward = [[last - block for block in reversed(order)] for order in mirrored]
    return [list(order) for order in dict.fromkeys(map(tuple, forward + backward))]


def _mirrored(lists: Lists) -> Lists:
    """The same graph with blocks counted from behind."""
    last = len(lists.starts) - 2
    return Lists.of([[last - item for item in lists.of_row(last - row)] for row in range(last + 1)])


def _orders(predecessors: Lists, successors: Lists) -> list[list[int]]:
    count = len(predecessors.starts) - 1
    before = [predecessors.of_row(block) for block in range(count)]
    after = [successors.of_row(block) for block in range(count)]
    depth = [0] * count
    height = [0] * count
    for block in range(count):
        depth[block] = max((depth[b] + 1 for b in before[block]), default=0)
    for block in reversed(range(count)):
        height[block] = max((height[b] + 1 for b in after[block]), default=0)
    keys = [
        [(block, 0) for block in range(count)],
        [(depth[block], block) for block in range(count)],
        [(-height[block], block) for block in range(count)],
        [(-max(before[block], default=-1), block) for block in range(count)],
        [(-max(before[block], default=-1), -block) for block in range(count)],
        [(-depth[block], block) for block in range(count)],
    ]
    return [_order(before, after, key) for key in keys]


def _order(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], key: Sequence[tuple[int, int]]
) -> list[int]:
    """The order that always takes the ready block with the smallest key."""
    missing = [len(blocks) for blocks in before]
    ready = [(key[block], block) for block, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, block = heapq.heappop(ready)
        order.append(block)
        for following in after[block]:
            missing[following] -= 1
            if not missing[following]:
                heapq.heappush(ready, (key[following], following))
    return order
