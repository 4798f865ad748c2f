"""A rank of a rehearsal: ``python -m mpi4py -m pipectl.runtime.rehearsal.worker --run DIRECTORY``.

It reads ``plan.json`` and ``rehearsal.json``, passes one round of messages to make connections,
then executes the steps. Rank 0 writes the timeline of the last step into ``trace/`` and a line a
step into ``metrics.jsonl``, all in time of the plan.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from pipectl.access import open_regular
from pipectl.plan import Plan
from pipectl.rehearsal import Rehearsal
from pipectl.runs import RunDirectory, beat
from pipectl.runtime import clock
from pipectl.runtime.failure import Doing, run_rank
from pipectl.runtime.rehearsal.rank import Rank
from pipectl.runtime.rehearsal.transfers import Transfers
from pipectl.runtime.waiting import barrier, wait
from pipectl.runtime.world import check_world
from pipectl.schedule import Actions, channels, lower, shares
from pipectl.timeline import Event, Timeline

_HEAD_START_S = 0.05
"""From the last word of rank 0 to the begin of a step; and so many pauses."""
_HEAD_START_PAUSES = 20


def rehearse(directory: RunDirectory, communicator: MPI.Intracomm, doing: Doing) -> None:
    """Execute the steps of a rehearsal on this rank.

    Raises:
        PipectlError: the files and the processes do not belong together.
    """
    doing.action = "reading the plan"
    plan, rehearsal = Plan.load(directory.plan), Rehearsal.load(directory.rehearsal)
    check_world(communicator, plan)
    _Rehearsing(directory, communicator, plan, rehearsal, doing).run()


class _Rehearsing:
    """One rank's part."""

    def __init__(
        self,
        directory: RunDirectory,
        communicator: MPI.Intracomm,
        plan: Plan,
        rehearsal: Rehearsal,
        doing: Doing,
    ) -> None:
        self._run = directory
        self._world = communicator.Dup()
        self._plan, self._rehearsal, self._doing = plan, rehearsal, doing
        self._clock = clock.agree(self._world)
        transfers = Transfers(communicator.Dup(), channels(plan), rehearsal)
        self._rank = Rank(self._world, rehearsal, transfers, self._clock, self._shares, doing)

    def run(self) -> None:
        """One round of messages, then the steps."""
        self._beat("connecting", 0)
        most = max(stage.replicas for stage in self._plan.stages)
        first = lower(self._plan, self._world.rank, min(most, self._plan.micro_batches))
        self._rank.run(first.body, self._begin(), stretch=0.0)
        program = lower(self._plan, self._world.rank).body
        for step in range(1, self._rehearsal.steps + 1):
            self._doing.step = step
            self._beat("rehearsing", step - 1)
            begin = self._begin()
            events = self._rank.run(program, begin, stretch=self._rehearsal.stretch)
            self._report(step, begin, self._rank.ended_at())
            if step == self._rehearsal.steps:
                self._write(events, begin)
        self._beat("done", self._rehearsal.steps)

    def _shares(self, actions: Actions) -> list[float]:
        found: list[float] = shares(self._plan, actions).tolist()
        return found

    def _begin(self) -> float:
        """A moment shortly ahead at which all ranks begin; all have come here by then."""
        barrier(self._world)
        pauses_s = _HEAD_START_PAUSES * self._rehearsal.pause_s
        word = np.array([self._clock() + _HEAD_START_S + pauses_s])
        wait([self._world.Ibcast(word, 0)])
        return float(word[0])

    def _report(self, step: int, begin: float, end: float) -> None:
        """A line for the step."""
        late_s = self._rank.latest_over_all()
        if self._world.rank:
            return
        step_s = (end - begin) / self._rehearsal.stretch
        line: dict[str, Any] = {
            "attempt": 1,
            "step": step,
            "steps": self._rehearsal.steps,
            "time": time.time(),
            "loss": None,
            "step_time_s": step_s,
            "samples_per_s": self._plan.batch_size / step_s if step_s else None,
            "late_s": late_s / self._rehearsal.stretch,
        }
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(open_regular(self._run.metrics, flags), "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def _write(self, events: list[Event], begin: float) -> None:
        """The timeline of all ranks."""
        stretch = self._rehearsal.stretch
        mine = [
            event._replace(
                start_s=(event.start_s - begin) / stretch, end_s=(event.end_s - begin) / stretch
            )
            for event in events
        ]
        gathered = self._world.gather(mine)
        if gathered is not None:
            everything = tuple(sorted(event for events in gathered for event in events))
            step, error_s = self._rehearsal.steps, self._clock.error_s / stretch
            timeline = Timeline(everything, self._world.size, step, error_s)
            timeline.save(self._run.measured_of(step))

    def _beat(self, state: str, step: int) -> None:
        if self._world.rank == 0:
            beat(self._run, state, step, self._rehearsal.steps, 1)


if __name__ == "__main__":
    run_rank(rehearse, __doc__)
