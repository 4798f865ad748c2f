"""Where a stage can be cut into blocks that recompute one after the other.

Between two forwards and backwards a block holds its inputs; while it recomputes, all that its
operators save. So cuts are wanted where little crosses, and so that no block saves much. Between
the operators of a stage, in graph order, for the most that a block may save::

    least crossing(end) = min over starts of
        least crossing(start) + bytes that cross the end    if the operators between save that most

Falling limits give more and more blocks: those between the layers of a model with equal layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pipectl.arrays import Floats
from pipectl.planner.memory.liveness import memory_of
from pipectl.profile import Operator, Profile

LIMITS = tuple(0.7**power for power in range(1, 13))
"""Of what a block saves, relative to the whole stage."""


class BlockCuts:
    """Cuts of the stages of one profile."""

    def __init__(self, profile: Profile) -> None:
        self._operators = profile.operators
        self._storages = [memory_of(operator).storage for operator in profile.operators]
        self._readers = profile.readers

    def of(self, inside: Sequence[int]) -> list[tuple[int, ...]]:
        """Cuts of a stage of ascending operator indices, into more and more blocks.

        Returns:
            The places among its operators at which blocks but the first begin.
        """
        places = self._places(inside)
        saved = np.cumsum([0, *self._saved(inside)], dtype=np.float64)
        crossing = self._crossing(inside)
        found = (_cut(places, saved, crossing, share * saved[-1]) for share in LIMITS)
        return list(dict.fromkeys(cut for cut in found if cut))

    def _places(self, inside: Sequence[int]) -> list[int]:
        """Where no group of operators is cut, beginning and end included."""
        spans: dict[str, list[int]] = {}
        for place, index in enumerate(inside):
            group = self._operators[index].group
            if group is not None:
                spans.setdefault(group, []).append(place)
        within = np.zeros(len(inside) + 2, dtype=np.int64)
        for found in spans.values():
            within[found[0] + 1] += 1
            within[found[-1] + 1] -= 1
        free = np.cumsum(within)[: len(inside) + 1] == 0
        return [int(place) for place in np.flatnonzero(free)]

    def _saved(self, inside: Sequence[int]) -> Iterator[int]:
        """What each operator saves that none before it does."""
        seen: set[str] = set()
        for index in inside:
            fresh = {name: size for name, size in self._operators[index].saved if name not in seen}
            seen.update(fresh)
            yield sum(fresh.values())

    def _crossing(self, inside: Sequence[int]) -> Floats:
        """Bytes made before each place and read behind it."""
        place = {index: number for number, index in enumerate(inside)}
        lives = _lives(self._operators, self._storages, self._readers, place)
        change = np.zeros(len(inside) + 2)
        for first, last, size in lives.values():
            change[first + 1] += size
            change[last + 1] -= size
        return np.cumsum(change)[: len(inside) + 1]


def _lives(
    operators: Sequence[Operator],
    storages: Sequence[str],
    readers: Sequence[Sequence[int]],
    place: Mapping[int, int],
) -> dict[str, tuple[int, int, int]]:
    """First writer, last reader and bytes of the storages that are made and read in a stage."""
    found: dict[str, tuple[int, int, int]] = {}
    for index, made in place.items():
        read = [place[reader] for reader in readers[index] if reader in place]
        if read:
            first, last, size = found.get(storages[index], (made, made, 0))
            size = max(size, operators[index].output_bytes)
            found[storages[index]] = first, max(last, *read), size
    return found


def _cut(
    places: Sequence[int], saved: Floats, crossing: Floats, most_bytes: float
) -> tuple[int, ...]:
    """The cut with the least bytes at its borders; a block that cannot be cut may save more."""
    before = saved[list(places)]
    costs = 1.0 + crossing[list(places)]  # of equal bytes, fewer blocks
    costs[-1] = 0.0
    least, start = np.zeros(len(places)), np.zeros(len(places), dtype=np.int64)
    firsts = np.searchsorted(before, before - most_bytes)
    for end in range(1, len(places)):
        first = min(int(firsts[end]), end - 1)
        start[end] = first + int(np.argmin(least[first:end]))
        least[end] = least[start[end]] + costs[end]
    found, end = [], int(start[-1])
    while end > 0:
        found.append(places[end])
        end = int(start[end])
    return tuple(reversed(found))
