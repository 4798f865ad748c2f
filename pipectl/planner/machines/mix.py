"""Which kinds of devices the stages of a pipeline may use: how many of each, and in which order.

Along a chain of stages the programme must know how many devices of each kind are in use. A *tally*
numbers these combinations. With two devices A and one B::

    tally   0   1   2   3   4   5        next with A   0→1→3   2→4→5
    A used  0   1   0   2   1   2        next with B   0→2   1→4   3→5
    B used  0   0   1   0   1   1

The number of tallies is the product of the numbers of devices, so for many devices of several
kinds the order of the kinds is given instead, and a tally is a position in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from pipectl.arrays import Integers


@dataclass(frozen=True)
class Mix:
    """Tallies by rising number of stages.

    Args:
        following: the tally after one more stage on each kind, -1 if there is none; shape
            [tallies, kinds].
        used: stages so far; shape [tallies].
        complete: whether every order of the kinds is among them.
    """

    following: Integers
    used: Integers
    complete: bool

    def __len__(self) -> int:
        return len(self.used)

    @property
    def kinds(self) -> int:
        """Number of kinds."""
        return int(self.following.shape[1])

    def tallies(self, stages: int) -> Integers:
        """Those with so many stages."""
        return np.flatnonzero(self.used == stages)

    def up_to(self, stages: int) -> Mix:
        """For at most so many stages."""
        count = int((self.used <= stages).sum())
        kept = self.following[:count]
        return replace(self, following=np.where(kept < count, kept, -1), used=self.used[:count])

    @classmethod
    def free(cls, available: Sequence[int], most: int) -> Mix:
        """Any order of so many devices of each kind, for at most ``most`` stages."""
        ranges = [range(min(count, most) + 1) for count in available]
        counts = [used for used in product(*ranges) if sum(used) <= most]
        counts.sort(key=lambda used: (sum(used), [-count for count in used]))
        place = {used: tally for tally, used in enumerate(counts)}
        following = [
            [place.get(_one_more(used, kind), -1) for kind in range(len(available))]
            for used in counts
        ]
        return cls(
            np.array(following, dtype=np.int64),
            np.array([sum(used) for used in counts], dtype=np.int64),
            complete=True,
        )

    @classmethod
    def ordered(cls, sequence: Sequence[int], kinds: int) -> Mix:
        """The kind of every position is given; tallies count from the end of the pipeline."""
        sequence = sequence[::-1]
        following = np.full((len(sequence) + 1, kinds), -1, dtype=np.int64)
        following[np.arange(len(sequence)), list(sequence)] = np.arange(1, len(sequence) + 1)
        used = np.arange(len(sequence) + 1, dtype=np.int64)
        return cls(following, used, complete=kinds == 1)


def free_tallies(available: Sequence[int], most: int) -> int:
    """An upper bound on the tallies of :meth:`Mix.free`."""
    count = 1
    for devices in available:
        count *= min(devices, most) + 1
    return count


def _one_more(used: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*used[:kind], used[kind] + 1, *used[kind + 1 :])
