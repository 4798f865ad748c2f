"""Every stage that starts at one downset and ends at another, with what crosses its borders.

States are downsets by rising size; a span (I, J) with I inside J is the stage of the blocks between
them. What the blocks cost is a difference of sums over the two states. A crossing (a producer and
its readers) costs a stage that holds some of them but not all. It is *open* at a state that holds
the producer but not all readers; no others are looked at, span by span:

    cost(I, J) = leaving, of those open at J with the producer not in I
               + entering, of those open at I of which J holds more
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Integers, Words
from pipectl.compiled import compiled
from pipectl.planner.graphs.bitsets import membership, words_of
from pipectl.planner.throughput.tables import Borders


class Spans(NamedTuple):
    """All spans, those of one start next to each other.

    Args:
        rows: whether each state holds each block; shape [states, blocks].
        first: of every start, its first span; shape [states + 1].
        ends: the other state of every span, ascending for one start.
        moved: ticks of what crosses the borders of a span; shape [spans, t].
    """

    rows: Integers
    first: Integers
    ends: Integers
    moved: Integers


def spans_of(downsets: Sequence[int], blocks: int, borders: Borders) -> Spans:
    """All spans.

    Args:
        downsets: bitsets by rising size, the empty one first and the full one last.
        blocks: how many there are.
    """
    inside = membership(downsets, blocks)
    rows, words = inside.astype(np.int64), words_of(inside)
    ends = [_supersets(words, start) for start in range(len(rows))]
    first = np.concatenate([[0], np.cumsum([len(found) for found in ends])]).astype(np.int64)
    flat = np.concatenate(ends)
    held, total = _held(rows, borders)
    is_open = (held > 0) & (held < total)
    open_first = np.concatenate([[0], np.cumsum(is_open.sum(axis=1))]).astype(np.int64)
    moved = crossing_ticks(
        first,
        flat,
        held,
        open_first,
        np.nonzero(is_open)[1],
        np.ascontiguousarray(borders.leaving.T),
        np.ascontiguousarray(borders.entering.T),
    )
    return Spans(rows, first, flat, moved)


def _supersets(words: Words, start: int) -> Integers:
    """Later states that hold everything the state holds."""
    outside = words[start] & ~words[start + 1 :]
    return np.flatnonzero(~outside.any(axis=1)) + start + 1


def _held(rows: Integers, borders: Borders) -> tuple[Integers, Integers]:
    """How many members of each crossing each state holds, [states, crossings]; and of how many."""
    incidence = np.zeros((len(borders.members), rows.shape[1]), dtype=np.float32)
    for index, members in enumerate(borders.members):
        incidence[index, list(members)] = 1
    held = (rows.astype(np.float32) @ incidence.T).astype(np.int64)
    return held, incidence.sum(axis=1).astype(np.int64)


@compiled
def crossing_ticks(
    first: Integers,
    ends: Integers,
    held: Integers,
    open_first: Integers,
    open_items: Integers,
    leaving: Integers,
    entering: Integers,
) -> Integers:
    """Ticks that cross the borders of every span; shape [spans, t].

    Args:
        open_first, open_items: the crossings open at every state.
        leaving, entering: shape [crossings, t].
    """
    found = np.zeros((len(ends), leaving.shape[1]), dtype=np.int64)
    for start in range(len(first) - 1):
        for span in range(first[start], first[start + 1]):
            end = ends[span]
            for place in range(open_first[start], open_first[start + 1]):
                item = open_items[place]
                if held[end, item] > held[start, item]:
                    for row in range(leaving.shape[1]):
                        found[span, row] += entering[item, row]
            for place in range(open_first[end], open_first[end + 1]):
                item = open_items[place]
                if held[start, item] == 0:
                    for row in range(leaving.shape[1]):
                        found[span, row] += leaving[item, row]
    return found
