"""A rank of a rehearsal: ``python -m mpi4py -m pipectl.runtime.rehearsal --run DIRECTORY``.

Executes the rank's program from ``plan.json`` with the waits of ``rehearsal.json``, without torch:
one round of messages to make connections, then the steps. Rank 0 writes the timeline of the last
step into ``trace/`` and a line per step into ``metrics.jsonl``, all in the plan's time.

Messages are real. A message starts with the time at which it was sent; it is complete when it has
arrived and the plan's link would have carried it, too. Sums over replicas are real sums of their
starting times. Computations, and copies to host memory, are only waited for.

Each rank keeps its own time: the end of its last row. A computation that should have ended is
complete at once, even if the process wakes up later; a message that was not there at the last look
is taken to have arrived right after it. So delays by pauses, and by cores with many ranks, do not
accumulate if they are shorter than ``late_s``; longer ones count in full.
"""

from __future__ import annotations

import json
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from pipectl.plan import Plan
from pipectl.rehearsal import Passage, Rehearsal
from pipectl.runs import Heartbeat, RunDirectory, start_of_job
from pipectl.runtime import clock
from pipectl.runtime.nodes import check_world
from pipectl.runtime.rank_process import run_rank, warn
from pipectl.runtime.reports import Lines
from pipectl.runtime.waiting import barrier, wait
from pipectl.schedule import Action, Actions, Kind, channels, lower, shares
from pipectl.timeline import Event, Timeline
from pipectl.watch.board import Board

_WORD = 8
_TAGS = 2**15
"""Fewer than any MPI allows; channels of one pair of ranks with the same tag share their order."""
_HEAD_START_S = 0.05
"""Time from rank 0's last message to the start of a step, and number of pauses."""
_HEAD_START_PAUSES = 20


def rehearse(directory: RunDirectory, communicator: MPI.Intracomm, board: Board) -> None:
    """Execute the steps of a rehearsal on this rank.

    Raises:
        PipectlError: the files and the processes do not match.
    """
    board.phase("reading the plan")
    plan, rehearsal = Plan.load(directory.plan), Rehearsal.load(directory.rehearsal)
    check_world(communicator, plan)
    rank = Rank(communicator, plan, rehearsal, board)
    lines = Lines(directory.metrics, warn) if communicator.rank == 0 else None
    steps, start = rehearsal.steps, start_of_job(directory)

    def say(state: str, step: int) -> None:
        if communicator.rank == 0:
            Heartbeat(state, step, steps).save(start.heartbeat)

    say("connecting", 0)
    replicas = max(stage.replicas for stage in plan.stages)
    first = lower(plan, communicator.rank, min(replicas, plan.micro_batches))
    rank.run(first, stretch=0.0)
    program = lower(plan, communicator.rank)
    for step in range(1, steps + 1):
        board.step(step)
        say("rehearsing", step - 1)
        since = time.perf_counter()
        events = rank.run(program, stretch=rehearsal.stretch)
        board.pace(time.perf_counter() - since)
        step_s = rank.latest(rank.at - rank.begin_at) / rehearsal.stretch
        late_s = rank.latest(rank.late_s) / rehearsal.stretch
        if lines is not None:
            line = {
                "attempt": 1,
                "step": step,
                "steps": steps,
                "time": time.time(),
                "loss": None,
                "step_time_s": step_s,
                "samples_per_s": plan.batch_size / step_s if step_s else None,
                "late_s": late_s,
            }
            lines.add([json.dumps(line)])
        if step == steps:
            gathered = communicator.gather(events)
            if gathered is not None:
                everything = tuple(sorted(event for events in gathered for event in events))
                error_s = rank.clock.error_s / rehearsal.stretch
                timeline = Timeline(everything, communicator.size, step, error_s)
                timeline.save(directory.measured_of(step))
    say("done", steps)


class BackgroundTransfer(NamedTuple):
    """A background transfer of a rank.

    Args:
        request: of MPI; none for copies.
        words: sent or received; the first is, or will be, the time of the start.
        started_at: time on this rank.
        share: samples relative to a full micro-batch.
        route: (kind, peer) of the resource that it shares with other transfers of this rank.
    """

    request: MPI.Request | None
    words: npt.NDArray[np.float64]
    started_at: float
    passage: Passage
    share: float
    route: tuple[str, int]


class Rank:
    """Runs the program of one rank; collective.

    Attributes:
        begin_at, at: start and end of the last run here, in seconds of the common clock.
        late_s: the longest delay of this rank in the last run.
    """

    def __init__(
        self, communicator: MPI.Intracomm, plan: Plan, rehearsal: Rehearsal, board: Board
    ) -> None:
        self._world, self._messages = communicator.Dup(), communicator.Dup()
        self._rank = communicator.rank
        self._plan, self._rehearsal, self._board = plan, rehearsal, board
        self._channels = channels(plan)
        self._meetings = {
            (item.kind, item.stage): item for item in rehearsal.meetings if item.rank == self._rank
        }
        self._groups = {
            ranks: communicator.Create_group(communicator.group.Incl(ranks))
            for ranks in sorted({item.ranks for item in self._meetings.values()})
            if len(ranks) > 1
        }
        self.clock = clock.common_clock(self._world)
        self._under_way: dict[tuple[str, int, int], BackgroundTransfer] = {}
        self._free_at: dict[tuple[str, int], float] = {}
        self.begin_at = self.at = self.late_s = 0.0

    def run(self, actions: Actions, *, stretch: float) -> list[Event]:
        """Execute one program, which all ranks start at the same time.

        Args:
            stretch: rehearsal time over plan time; 0 only passes messages.

        Returns:
            Events that took time, in seconds of the plan since the start; none for a stretch of 0.
        """
        self._stretch = stretch
        self._free_at.clear()
        self.begin_at = self.at = self._agree_on_begin()
        self._sleep_until(self.begin_at)
        self.late_s = 0.0
        events = []
        row_shares = shares(self._plan, actions).tolist()
        for row, share in zip(actions.rows.tolist(), row_shares, strict=True):
            action, start = Action(*row), self.at
            kind = Kind(action.kind)
            self._board.row(kind.name, action.stage, action.micro_batch)
            work_s = self._work_s(kind, action, share) if kind.is_compute else 0.0
            if kind is Kind.UPDATE:
                self._advance(self.latest(self.at))
                start = max(start, self.at)
            self._execute(kind, action, share, work_s)
            if stretch and (kind.is_compute or self.at > start):
                start_s, end_s = (
                    (start - self.begin_at) / stretch,
                    (self.at - self.begin_at) / stretch,
                )
                name = kind.name.lower()
                events.append(Event(self._rank, start_s, end_s, name, *action[1:4]))
        return events

    def latest(self, value: float) -> float:
        """The maximum of all ranks' values, without spinning. Collective."""
        word = np.array([value])
        request = self._world.Iallreduce(MPI.IN_PLACE, word, MPI.MAX)
        while not request.Test():
            time.sleep(self._rehearsal.pause_s)
        return float(word[0])

    def _agree_on_begin(self) -> float:
        """A time shortly ahead at which all ranks start, after all have arrived here."""
        barrier(self._world)
        pauses_s = _HEAD_START_PAUSES * self._rehearsal.pause_s
        word = np.array([self.clock() + _HEAD_START_S + pauses_s])
        wait([self._world.Ibcast(word, 0)])
        return float(word[0])

    def _work_s(self, kind: Kind, action: Action, share: float) -> float:
        if kind is Kind.UPDATE:
            work_s = self._rehearsal.update_s[self._rank]
        else:
            work_s = share * self._rehearsal.work_s[kind.name][action.stage]
        return self._stretch * work_s / self._rehearsal.speed[self._rank]

    def _execute(self, kind: Kind, action: Action, share: float, work_s: float) -> None:
        if kind.is_compute:
            self._advance(self.at + work_s)
            return
        name, _, end = kind.name.rpartition("_")
        key = name, action.channel if action.channel >= 0 else action.stage, action.micro_batch
        if end != "START":
            self._finish(self._under_way.pop(key))
        elif kind in (Kind.SEND_START, Kind.RECEIVE_START):
            self._under_way[key] = self._start_message(kind, action, share)
        else:
            meeting, word, request = self._meetings[name, action.stage], np.array([self.at]), None
            if meeting.ranks in self._groups:
                group = self._groups[meeting.ranks]
                request = group.Iallreduce(MPI.IN_PLACE, word, MPI.MAX)
            self._under_way[key] = BackgroundTransfer(
                request, word, self.at, meeting.passage, share, (name, 0)
            )

    def _start_message(self, kind: Kind, action: Action, share: float) -> BackgroundTransfer:
        channel = self._channels[action.channel]
        passage = self._rehearsal.messages[action.channel]
        size_bytes = passage.size_bytes * share * self._rehearsal.message_share
        words = np.empty(max(1, round(size_bytes / _WORD)))
        tag = action.channel % _TAGS
        if kind is Kind.SEND_START:
            words[0] = self.at
            route = "send", channel.target_rank
            request = self._messages.Issend(words, channel.target_rank, tag)
        else:
            route = "receive", channel.source_rank
            request = self._messages.Irecv(words, channel.source_rank, tag)
        return BackgroundTransfer(request, words, self.at, passage, share, route)

    def _finish(self, transfer: BackgroundTransfer) -> None:
        """Wait until MPI has finished a transfer, and the links of the plan would have."""
        absent_at = 0.0
        while transfer.request is not None and not transfer.request.Test():
            absent_at = self.clock()
            time.sleep(self._rehearsal.pause_s)
        free_at = self._free_at.get(transfer.route, 0.0)
        begun_at = max(transfer.started_at, float(transfer.words[0]), free_at)
        held_until = begun_at + transfer.passage.hold_s * transfer.share * self._stretch
        self._free_at[transfer.route] = held_until
        over_at = held_until + transfer.passage.latency_s * self._stretch
        self._advance(max(self.at, absent_at, over_at))

    def _advance(self, until: float) -> None:
        """Wait until a time; a long delay moves the time of the rank."""
        self._sleep_until(until)
        late_s = self.clock() - until
        self.late_s = max(self.late_s, late_s)
        self.at = until if late_s <= self._rehearsal.late_s else until + late_s

    def _sleep_until(self, until: float) -> None:
        """Sleep; during transfers, advance them now and then."""
        while (left_s := until - self.clock()) > 0:
            if self._under_way:
                self._world.Iprobe()
                left_s = min(left_s, self._rehearsal.pause_s)
            time.sleep(left_s)


if __name__ == "__main__":
    run_rank(rehearse, __doc__)
