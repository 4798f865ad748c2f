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
import numpy.typing as npt

from pipectl.planner.condense import Condensed

Integers = npt.NDArray[np.int64]

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
        rows = _membership(downsets, len(graph))
        amounts = rows.astype(np.int64) @ np.asarray(compute, dtype=np.int64)
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
    def words(self) -> npt.NDArray[np.uint64]:
        """The states as packed bits; shape [states, words]."""
        packed = np.packbits(self.rows, axis=1)
        packed = np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8)))
        return np.ascontiguousarray(packed).view(np.uint64)

    def cut(self, path: Sequence[int]) -> Partition:
        """The stages between consecutive states."""
        ends = [self.downsets[state] for state in path]
        return tuple(after & ~before for before, after in pairwise(ends))

    def starts(self, end: int, longest: int) -> Integers:
        """States that are a proper subset of ``end``, with at most ``longest`` compute between."""
        first = int(np.searchsorted(self.compute, self.compute[end] - longest, side="left"))
        outside = self.words[first:end] & ~self.words[end]
        inside: Integers = np.flatnonzero(~outside.any(axis=1)) + first
        return inside


class Boundary:
    """How items lie to the states: for sums over the items that a span touches or that cross it."""

    def __init__(self, states: States, items: Items) -> None:
        incidence = _membership(items.blocks, states.rows.shape[1])
        held = states.rows.astype(np.float32) @ incidence.T.astype(np.float32)
        self.weights = items.weights
        self.held = held.astype(np.int16)
        whole = self.held == incidence.sum(axis=1)
        self.partial = (self.held > 0) & ~whole
        self.whole_sum: Integers = whole.astype(np.int64) @ self.weights
        self.partial_sum: Integers = self.partial.astype(np.int64) @ self.weights

    def touched(self, starts: Integers, end: int) -> Integers:
        """Summed weight of the items that each span (start, end) touches; shape [starts]."""
        items = np.flatnonzero(self.partial[end])
        more = self.held[np.ix_(starts, items)] != self.held[end, items]
        found: Integers = self.whole_sum[end] - self.whole_sum[starts] + more @ self.weights[items]
        return found

    def crossing(self, starts: Integers, end: int) -> Integers:
        """Summed weight of the items that cross the border of each span; shape [starts].

        An item that started before and is whole at the end counts in ``partial_sum`` of the
        start; of those still partial at the end, the untouched are taken out again.
        """
        items = np.flatnonzero(self.partial[end])
        held = self.held[np.ix_(starts, items)]
        change = (held != self.held[end, items]).astype(np.int64) - (held > 0)
        found: Integers = self.partial_sum[starts] + change @ self.weights[items]
        return found


@dataclass(frozen=True)
class Spans:
    """The spans that end at one state.

    Args:
        end: the state.
        starts: states they start at.
        compute: between start and end.
        crossing: summed weight of the items that cross their border; shape [starts].
    """

    end: int

    starts: Integers
    compute: Integers
    crossing: Integers


def spans_by_end(states: States, boundary: Boundary, longest: int) -> list[Spans]:
    """All spans of at most ``longest`` compute, for every state they can end at."""
    found = []
    for end in range(len(states)):
        starts = states.starts(end, longest)
        compute = states.compute[end] - states.compute[starts]
        found.append(Spans(end, starts, compute, boundary.crossing(starts, end)))
    return found


def _membership(bitsets: Sequence[int], width: int) -> npt.NDArray[np.bool_]:
    """Bitsets as rows of booleans; shape [bitsets, width]."""
    size = -(-width // 8)
    packed = b"".join(members.to_bytes(size, "little") for members in bitsets)
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(len(bitsets), size)
    return np.unpackbits(rows, axis=1, bitorder="little")[:, :width].astype(np.bool_)
