"""V-shaped placement: two stages a rank, the first and the last, the second and the last but one.

Of 2p stages, rank r holds stages r and 2p - 1 - r: its first and its second *chunk*. Activations
go down the ranks and come back up, so the rank that computes the loss also begins the model.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipectl.schedule.actions import Integers, Kind
from pipectl.schedule.order import Order
from pipectl.schedule.sequences import order_of_sequences

Step = tuple[Kind, int]
"""What is done, and to which chunk."""

F0, F1 = (Kind.FORWARD, 0), (Kind.FORWARD, 1)
I0, I1 = (Kind.BACKWARD_INPUT, 0), (Kind.BACKWARD_INPUT, 1)
W0, W1 = (Kind.BACKWARD_WEIGHT, 0), (Kind.BACKWARD_WEIGHT, 1)


class Listing:
    """The actions of one rank while they are listed; each step takes the next micro-batch."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._stages = rank, 2 * ranks - 1 - rank
        self._next: dict[Step, int] = {}
        self._parts: list[Integers] = []

    def repeat(self, times: int, *steps: Step) -> None:
        """So many times, one behind the other, some different steps."""
        rows = np.empty((times, len(steps), 3), dtype=np.int64)
        for place, (kind, chunk) in enumerate(steps):
            first = self._next.get((kind, chunk), 0)
            rows[:, place, 0], rows[:, place, 1] = kind, self._stages[chunk]
            rows[:, place, 2] = np.arange(first, first + times)
            self._next[kind, chunk] = first + times
        self._parts.append(rows.reshape(-1, 3))

    def up_to(self, micro_batches: int) -> Integers:
        """What was listed, without further micro-batches; shape [actions, 3]."""
        rows = np.concatenate(self._parts)
        found: Integers = rows[rows[:, 2] < micro_batches]
        return found


def order_of_listings(
    listed: Callable[[int, int, int], Integers], ranks: int, micro_batches: int
) -> Order:
    """The order of what every rank of so many lists, called with (rank, ranks, micro_batches)."""
    lists = [listed(rank, ranks, micro_batches) for rank in range(ranks)]
    return order_of_sequences(lists, 2 * ranks, micro_batches)
