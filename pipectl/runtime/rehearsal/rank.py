"""One rank of a rehearsal: executes its program with waits for computations.

The rank has a time of its own: that at which its last row ended. A computation that should have
ended is over at once, though the process may wake up later; a message that was not there at the
last look has arrived right behind it. So what pauses, and cores with many ranks, add to waits does
not add up, as long as it is less than ``late_s``; what is later than that counts in full.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from pipectl.rehearsal import Rehearsal
from pipectl.runtime.clock import CommonClock
from pipectl.runtime.failure import Doing
from pipectl.runtime.rehearsal.transfers import Pending, Transfers
from pipectl.schedule import Action, Actions, Kind
from pipectl.timeline import Event

Key = tuple[str, int, int]


class Rank:
    """Runs the program of one rank.

    Args:
        communicator: of its own.
        share_of: samples of every row relative to a full micro-batch.
    """

    def __init__(
        self,
        communicator: MPI.Intracomm,
        rehearsal: Rehearsal,
        transfers: Transfers,
        clock: CommonClock,
        share_of: Callable[[Actions], list[float]],
        doing: Doing,
    ) -> None:
        self._communicator = communicator
        self._rank = communicator.rank
        self._rehearsal = rehearsal
        self._transfers = transfers
        self._clock = clock
        self._share_of = share_of
        self._doing = doing
        self._pending: dict[Key, Pending] = {}
        self._at = self._late_s = 0.0

    def run(self, actions: Actions, begin_at: float, *, stretch: float) -> list[Event]:
        """Execute one body from a common moment on.

        Args:
            stretch: 0 passes messages only.

        Returns:
            What took time, in seconds of the rehearsal's common clock.
        """
        self._stretch = self._transfers.stretch = stretch
        self._transfers.rest()
        self._sleep_until(begin_at)
        self._at, self._late_s = begin_at, 0.0
        events = []
        for row, share in zip(actions.rows.tolist(), self._share_of(actions), strict=True):
            action, begin = Action(*row), self._at
            kind = Kind(action.kind)
            self._doing.board.row(kind.name, action.stage, action.micro_batch)
            self._execute(kind, action, share)
            if kind.is_compute or self._at > begin:
                if kind is Kind.UPDATE:
                    begin = max(begin, self._at - self._work_s(kind, action, share))
                name = kind.name.lower()
                events.append(Event(self._rank, begin, self._at, name, *action[1:4]))
        return events

    def ended_at(self) -> float:
        """When the last rank ended the last run. Collective."""
        return self._latest(self._at)

    def latest_over_all(self) -> float:
        """The most by which any rank came too late in the last run, in seconds. Collective."""
        return self._latest(self._late_s)

    def _execute(self, kind: Kind, action: Action, share: float) -> None:
        if kind is Kind.UPDATE:
            self._advance(self._latest(self._at))
        if kind.is_compute:
            self._advance(self._at + self._work_s(kind, action, share))
        elif kind.name.endswith("_START"):
            self._pending[_key(kind, action)] = self._transfers.start(action, share, self._at)
        else:
            self._finish(self._pending.pop(_key(kind, action)))

    def _work_s(self, kind: Kind, action: Action, share: float) -> float:
        """Of a row, in time of the rehearsal."""
        speed = self._rehearsal.speed[self._rank]
        if kind is Kind.UPDATE:
            return self._stretch * self._rehearsal.update_s[self._rank] / speed
        return self._stretch * share * self._rehearsal.work_s[kind.name][action.stage] / speed

    def _finish(self, pending: Pending) -> None:
        """Wait for a transfer."""
        absent_at = 0.0
        while pending.request is not None and not pending.request.Test():
            absent_at = self._clock()
            time.sleep(self._rehearsal.pause_s)
        self._advance(max(self._at, absent_at, self._transfers.over_at(pending)))

    def _latest(self, value: float) -> float:
        """The largest value of all ranks, without spinning. Collective."""
        word, found = np.array([value]), np.empty(1)
        request = self._communicator.Iallreduce(word, found, MPI.MAX)
        while not request.Test():
            time.sleep(self._rehearsal.pause_s)
        return float(found[0])

    def _advance(self, until: float) -> None:
        """Wait until then; much lateness moves the time of the rank."""
        self._sleep_until(until)
        late_s = self._clock() - until
        self._late_s = max(self._late_s, late_s)
        self._at = until if late_s <= self._rehearsal.late_s else until + late_s

    def _sleep_until(self, until: float) -> None:
        """Sleep; while something is on its way, look after it now and then."""
        while (left_s := until - self._clock()) > 0:
            if self._pending:
                self._communicator.Iprobe()
                left_s = min(left_s, self._rehearsal.pause_s)
            time.sleep(left_s)


def _key(kind: Kind, action: Action) -> Key:
    what = kind.name.rpartition("_")[0]
    return what, action.channel if action.channel >= 0 else action.stage, action.micro_batch
