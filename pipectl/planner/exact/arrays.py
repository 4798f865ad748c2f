"""The arrays that kernels take, in named groups."""

from __future__ import annotations

from typing import NamedTuple

from pipectl.arrays import Floats, Integers, Words


class Moves(NamedTuple):
    """Values that several blocks use.

    Args:
        transfer_s: of every value.
        users_at, users: the blocks of value v are ``users[users_at[v]:users_at[v + 1]]``.
        values_at, values: the values of every block, in the same way.
    """

    transfer_s: Floats
    users_at: Integers
    users: Integers
    values_at: Integers
    values: Integers


class Arcs(NamedTuple):
    """Neighbours in a graph.

    Args:
        before_at, before: the predecessors of every block.
        after_at, after: the successors.
    """

    before_at: Integers
    before: Integers
    after_at: Integers
    after: Integers


class Steps(NamedTuple):
    """Downsets, and the way from each to those with one block more.

    Args:
        sets: [downsets, words]; bit b of a row is block b.
        larger_at, larger: for every downset the ones with one block more, by rising block.
        added: that block, beside ``larger``.
    """

    sets: Words
    larger_at: Integers
    larger: Integers
    added: Integers


class Growth(NamedTuple):
    """Downsets while they are enumerated.

    Args:
        sets, addable: [capacity, words] blocks in a downset, and blocks that can be added to it.
        table: hash table of rows, -1 where free; its length is a power of two.
        arcs: [capacity of arcs, 3] (smaller downset, block, larger downset).
        counts: downsets that were extended, downsets found, arcs found.
    """

    sets: Words
    addable: Words
    table: Integers
    arcs: Integers
    counts: Integers
