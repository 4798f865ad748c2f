"""Rows of a program while they are being put together, each with its place."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from pipectl.schedule.actions import Action, Actions, Integers, Kind
from pipectl.schedule.placement import Column, Portion


class Phase(IntEnum):
    """The order of what stands around the computation of a slot."""

    RECEIVE_START = 0
    FETCH_START = 1
    RECEIVE_SAVED = 2
    FETCH_WAIT = 3
    RECOMPUTE = 4
    RECEIVE_WAIT = 5
    RECEIVE_NEXT = 6
    RELEASE = 7
    COMPUTE = 8
    SEND_WAIT = 9
    OFFLOAD_WAIT = 10
    SEND_START = 11
    OFFLOAD_START = 12
    REDUCE_START = 13
    REDUCE_WAIT = 14
    UPDATE = 15
    RENEW = 16


class Rows:
    """Rows in any order; :meth:`sorted` puts them by slot and phase."""

    def __init__(self) -> None:
        self._parts: list[tuple[Integers, int, tuple[Column, ...]]] = []

    def add(
        self,
        phase: Phase,
        slots: Integers,
        kind: Kind,
        stage: int,
        portion: Portion,
        *,
        channel: int = -1,
    ) -> None:
        """A row at each of some slots, of one kind, stage and channel."""
        index, start, stop = portion
        self._parts.append((slots, phase, (kind, stage, index, channel, start, stop, 0)))

    def add_one(
        self, phase: Phase, slot: int, kind: Kind, stage: int, *, channel: int = -1
    ) -> None:
        """A row that belongs to no micro-batch."""
        values = (kind, stage, -1, channel, -1, -1, 0)
        self._parts.append((np.array([slot]), phase, values))

    def sorted(self) -> Actions:
        """All rows; those of one slot and phase as they were added."""
        total = sum(len(slots) for slots, _, _ in self._parts)
        rows = np.empty((total, len(Action._fields)), dtype=np.int32)
        places = np.empty(total, dtype=np.int64)
        first = 0
        for slots, phase, values in self._parts:
            part = slice(first, first := first + len(slots))
            places[part] = slots * len(Phase) + phase
            for position, value in enumerate(values):
                rows[part, position] = value
        return Actions(rows[places.argsort(kind="stable")])
