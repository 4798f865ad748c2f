"""What a rank of a rehearsal has started in the background.

A message is real, and begins with the time at which it was sent: it is over when it has arrived and
the link of the plan would have carried it, too. Sums over replicas are real sums, of the times at
which they were started. Copies to the host's memory are only waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from pipectl.rehearsal import Passage, Rehearsal
from pipectl.schedule import Action, Channel, Kind

Words = npt.NDArray[np.float64]
_WORD = 8
_TAGS = 2**15
"""Fewer than any MPI allows; channels of one pair of ranks that share a tag share their order."""


class Pending(NamedTuple):
    """A transfer on its way.

    Args:
        request: of MPI; none for copies.
        buffer: what is sent or received; its first word is, or will be, the time of the start.
        started_at: on this rank; of sends, the time from which it counts.
        way: what it shares with others that this rank waits for.
    """

    request: MPI.Request | None
    buffer: Words
    started_at: float
    passage: Passage
    share: float
    way: tuple[str, int]


class Transfers:
    """Starts transfers, and says when they are over.

    Args:
        communicator: of its own.
        stretch: see :class:`~pipectl.rehearsal.Rehearsal`.
    """

    def __init__(
        self,
        communicator: MPI.Intracomm,
        channels: tuple[Channel, ...],
        rehearsal: Rehearsal,
    ) -> None:
        self._communicator = communicator
        self._channels = channels
        self._rehearsal = rehearsal
        self._meetings = {
            (item.kind, item.stage): item
            for item in rehearsal.meetings
            if item.rank == communicator.rank
        }
        self._groups = self._make_groups()
        self._free_at: dict[tuple[str, int], float] = {}
        self.stretch = rehearsal.stretch

    def start(self, action: Action, share: float, now: float) -> Pending:
        """Begin what a START row begins."""
        if action.kind in (Kind.SEND_START, Kind.RECEIVE_START):
            return self._start_message(action, share, now)
        name = Kind(action.kind).name.removesuffix("_START")
        meeting = self._meetings[name, action.stage]
        word = np.array([now])
        request = None
        if len(meeting.ranks) > 1:
            request = self._groups[meeting.ranks].Iallreduce(MPI.IN_PLACE, word, MPI.MAX)
        return Pending(request, word, now, meeting.passage, share, (name, 0))

    def over_at(self, pending: Pending) -> float:
        """When a transfer that MPI has finished is over, by the plan's links."""
        begun = max(pending.started_at, float(pending.buffer[0]), self._free(pending.way))
        held = begun + pending.passage.hold_s * pending.share * self.stretch
        self._free_at[pending.way] = held
        return held + pending.passage.latency_s * self.stretch

    def rest(self) -> None:
        """Forget what was on its way; between passes."""
        self._free_at.clear()

    def _free(self, way: tuple[str, int]) -> float:
        return self._free_at.get(way, 0.0)

    def _start_message(self, action: Action, share: float, now: float) -> Pending:
        channel = self._channels[action.channel]
        passage = self._rehearsal.messages[action.channel]
        size = passage.size_bytes * share * self._rehearsal.message_share
        words = np.empty(max(1, round(size / _WORD)))
        tag = action.channel % _TAGS
        if action.kind == Kind.SEND_START:
            words[0] = now
            request = self._communicator.Issend(words, channel.target_rank, tag)
            return Pending(request, words, now, passage, share, ("send", channel.target_rank))
        request = self._communicator.Irecv(words, channel.source_rank, tag)
        return Pending(request, words, now, passage, share, ("receive", channel.source_rank))

    def _make_groups(self) -> Mapping[tuple[int, ...], Any]:
        """A communicator for every set of ranks that sums something together."""
        world = self._communicator.group
        found = {}
        for ranks in sorted({item.ranks for item in self._meetings.values()}):
            if len(ranks) > 1:
                found[ranks] = self._communicator.Create_group(world.Incl(ranks))
        return found
