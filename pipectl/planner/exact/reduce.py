"""Blocks whose place costs nothing: they make the lattice large and decide nothing.

Two rules, each of which keeps the optimum. Of a block that takes no time on any device and no
memory that could matter,

- if all that it feeds or reads from is one block ``m``, and ``m`` shares each of its values, some
  best partition has it in the stage of ``m``: moving it there adds nothing and may end a transfer;
- if it has no predecessors (or no successors), and moving its values takes no time, it may as well
  stand in the first (last) stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipectl.planner.graphs.bitsets import bits


def joined(
    free: Sequence[bool],
    predecessors: Sequence[int],
    successors: Sequence[int],
    values: Sequence[Sequence[int]],
) -> list[int]:
    """For every block the one whose stage it shares by the first rule; itself if it has none.

    Args:
        free: whether a block costs nothing anywhere.
        predecessors, successors: bitsets.
        values: the blocks of every value that takes time to move.
    """
    neighbours = [set(bits(b | a)) for b, a in zip(predecessors, successors, strict=True)]
    owned: list[list[set[int]]] = [[] for _ in free]
    for users in map(set, values):
        for block in users:
            owned[block].append(users)
    home = list(range(len(free)))
    pending = [block for block, costs_nothing in enumerate(free) if costs_nothing]
    while pending:
        block = pending.pop()
        if home[block] != block or len(neighbours[block]) != 1:
            continue
        (other,) = neighbours[block]
        if all(other in shared for shared in owned[block]):
            home[block] = other
            neighbours[other].discard(block)
            for shared in owned[block]:
                shared.discard(block)
            if free[other]:
                pending.append(other)
    return [_root(home, block) for block in range(len(home))]


def _root(home: Sequence[int], block: int) -> int:
    while home[block] != block:
        block = home[block]
    return block


def loose(
    free: Sequence[bool],
    predecessors: Sequence[int],
    successors: Sequence[int],
    values: Sequence[Sequence[int]],
) -> tuple[list[int], list[int]]:
    """The blocks that may stand in the first stage, and in the last, by the second rule."""
    moving = {block for users in values for block in users}
    still = [block for block, ok in enumerate(free) if ok and block not in moving]
    first = [block for block in still if not predecessors[block]]
    last = [block for block in still if predecessors[block] and not successors[block]]
    return first, last
