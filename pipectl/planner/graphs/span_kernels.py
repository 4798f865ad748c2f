"""Inner loops over spans, compiled; :mod:`pipectl.planner.graphs.spans` says what they compute.

Spans are grouped by the state they end at: those of state e are ``first[e]`` to ``first[e + 1]``.
Items of a state, and blocks of an item, are stored in the same way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipectl.arrays import Flags, Integers, Words
from pipectl.compiled import compiled

TOUCHED, CROSSING, ENTERING = range(3)


@compiled
def fill_spans(
    words: Words, compute: Integers, longest: int, first: Integers, starts: Integers
) -> int:
    """Find every span of at most ``longest`` compute; returns their number.

    Args:
        words: states as packed bits; shape [states, words].
        compute: of every state, ascending.
        first: filled in; shape [states + 1].
        starts: filled in as far as it is long enough.
    """
    states, width = words.shape
    found = 0
    lowest = 0
    first[0] = 0
    for end in range(states):
        while compute[end] - compute[lowest] > longest:
            lowest += 1
        for start in range(lowest, end):
            inside = True
            for word in range(width):
                if words[start, word] & ~words[end, word]:
                    inside = False
                    break
            if inside:
                if found < len(starts):
                    starts[found] = start
                found += 1
        first[end + 1] = found
    return found


@compiled
def count_held(rows: Flags, first: Integers, blocks: Integers, held: npt.NDArray[np.int16]) -> None:
    """How many blocks of every item each state holds; ``held`` is [states, items]."""
    for state in range(held.shape[0]):
        for item in range(held.shape[1]):
            count = 0
            for place in range(first[item], first[item + 1]):
                if rows[state, blocks[place]]:
                    count += 1
            held[state, item] = count


@compiled
def weigh_spans(
    first: Integers,
    starts: Integers,
    held: npt.NDArray[np.int16],
    weights: Integers,
    item_first: Integers,
    items: Integers,
    what: int,
    sums: Integers,
) -> None:
    """Add to ``sums`` what the items do that the end of each span holds in part.

    Args:
        items: those that each state holds in part.
        what: counts: items that the span touches, that cross its border, or that enter it.
    """
    for end in range(len(first) - 1):
        begin, stop = item_first[end], item_first[end + 1]
        for span in range(first[end], first[end + 1]):
            start = starts[span]
            total = 0
            for place in range(begin, stop):
                item = items[place]
                before = held[start, item]
                if what == ENTERING:
                    if before == held[end, item]:
                        total -= weights[item]
                    continue
                if before != held[end, item]:
                    total += weights[item]
                if what == CROSSING and before > 0:
                    total -= weights[item]
            sums[span] += total
