"""Every stage that can start at one downset and end at another, with what it costs.

A *state* is a downset, a *span* a pair of states, the first inside the second: the stage of the
blocks between them. What a span costs is additive (compute), or follows from how many blocks of
each *item* (a value and its readers, a shared parameter, a saved value and its users) the two
states hold. With n(X) the number of the item's blocks in X, of N in all, the span I, J

- touches the item when n(J) > n(I);
- is crossed by the item when it touches it and has not all of it.

An item with n(J) = N or n(J) = 0 contributes a difference or sum of figures of single states, so
only the few items that J holds in part (its boundary) are looked at span by span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from pipectl.arrays import Flags, Integers, Words
from pipectl.planner.graphs.bitsets import bits, membership, words_of
from pipectl.planner.graphs.condense import Condensed
from pipectl.planner.graphs.span_kernels import (
    CROSSING,
    ENTERING,
    TOUCHED,
    count_held,
    fill_spans,
    weigh_spans,
)

Partition = tuple[int, ...]
"""Bitset of blocks of every stage, in pipeline order."""


@dataclass(frozen=True)
class Items:
    """Things of some blocks each, with what they weigh.

    Args:
        blocks: bitset of the blocks of every item.
        weights: of every item, shape [items].
    """

    blocks: Sequence[int]
    weights: Integers


class States:
    """Downsets in an order in which smaller comes before larger, by rising compute.

    Args:
        graph: whose downsets they are.
        downsets: among them the empty and the full one.
        compute: of every block, in any integer unit.
    """

    def __init__(self, graph: Condensed, downsets: Sequence[int], compute: Sequence[int]) -> None:
        rows = membership(downsets, len(graph))
        amounts = _sums(rows, compute)
        order = sorted(
            range(len(downsets)),
            key=lambda index: (amounts[index], downsets[index].bit_count(), downsets[index]),
        )
        self.downsets = [downsets[index] for index in order]
        self.rows = rows[order]
        self.compute: Integers = amounts[order]

    def __len__(self) -> int:
        return len(self.downsets)

    @cached_property
    def words(self) -> Words:
        """The states as packed bits; shape [states, words]."""
        return words_of(self.rows)

    def sums(self, amounts: Sequence[float], unit: int = 1) -> Integers:
        """The sum of figures of the blocks that each state holds, in parts of a unit."""
        return _sums(self.rows, [round(amount * unit) for amount in amounts])

    def cut(self, path: Sequence[int]) -> Partition:
        """The stages between consecutive states."""
        ends = [self.downsets[state] for state in path]
        return tuple(after & ~before for before, after in pairwise(ends))


@dataclass(frozen=True)
class Spans:
    """Spans, grouped by the state they end at.

    Args:
        states: whose spans they are.
        first: spans that end at state e are first[e] to first[e + 1]; shape [states + 1].
        starts: states they start at, ascending for each end.
    """

    states: States
    first: Integers
    starts: Integers

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def ends(self) -> Integers:
        """States they end at."""
        return np.repeat(np.arange(len(self.states)), np.diff(self.first))

    @property
    def compute(self) -> Integers:
        """Between start and end."""
        return self.between(self.states.compute)

    def between(self, sums: Integers) -> Integers:
        """The difference of a figure of states between end and start of every span."""
        found: Integers = sums[self.ends] - sums[self.starts]
        return found

    def only(self, kept: Flags) -> Spans:
        """Those that are kept; shape [spans]."""
        before = np.concatenate([[0], np.cumsum(kept)])
        return Spans(self.states, before[self.first].astype(np.int64), self.starts[kept])

    def find(self, start: int, end: int) -> int:
        """The position of one of them."""
        low, high = int(self.first[end]), int(self.first[end + 1])
        return low + int(np.searchsorted(self.starts[low:high], start))


def find_spans(states: States, longest: int) -> Spans:
    """All spans of at most ``longest`` compute."""
    first = np.zeros(len(states) + 1, dtype=np.int64)
    starts = np.zeros(16 * len(states), dtype=np.int64)
    count = fill_spans(states.words, states.compute, longest, first, starts)
    if count > len(starts):
        starts = np.zeros(count, dtype=np.int64)
        fill_spans(states.words, states.compute, longest, first, starts)
    return Spans(states, first, starts[:count])


class Boundary:
    """How items lie to the states: for sums over the items that a span touches or that cross it."""

    def __init__(self, states: States, items: Items) -> None:
        count = np.array([members.bit_count() for members in items.blocks], dtype=np.int64)
        self.weights = items.weights
        self.held = np.zeros((len(states), len(count)), dtype=np.int16)
        blocks = [block for members in items.blocks for block in bits(members)]
        count_held(states.rows, _starts_of(count), np.array(blocks, dtype=np.int64), self.held)
        whole = self.held == count
        partial = (self.held > 0) & ~whole
        self.whole_sum: Integers = whole @ self.weights
        self.partial_sum: Integers = partial @ self.weights
        self._items: Integers = np.nonzero(partial)[1]
        self._first = _starts_of(partial.sum(axis=1))

    def touched(self, spans: Spans) -> Integers:
        """Summed weight of the items that each span touches; shape [spans]."""
        return self._weigh(spans, spans.between(self.whole_sum), TOUCHED)

    def crossing(self, spans: Spans) -> Integers:
        """Summed weight of the items that cross the border of each span; shape [spans].

        An item that started before and is whole at the end counts in ``partial_sum`` of the
        start; of those still partial at the end, the untouched are taken out again.
        """
        return self._weigh(spans, self.partial_sum[spans.starts], CROSSING)

    def entering(self, spans: Spans) -> Integers:
        """Summed weight of the items that each span has some of, but not the first."""
        return self._weigh(spans, self.partial_sum[spans.starts], ENTERING)

    def _weigh(self, spans: Spans, sums: Integers, what: int) -> Integers:
        weigh_spans(
            spans.first,
            spans.starts,
            self.held,
            self.weights,
            self._first,
            self._items,
            what,
            sums,
        )
        return sums


def _starts_of(counts: Integers) -> Integers:
    """Where each group begins, and the end of the last, if groups of these sizes are joined."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _sums(rows: Flags, amounts: Sequence[int]) -> Integers:
    found: Integers = rows.astype(np.int64) @ np.asarray(amounts, dtype=np.int64)
    return found
