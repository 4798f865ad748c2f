"""Recorded steps: the actions of all ranks in one file, in the time of rank 0's clock.

Ranks send their columns after a step and continue training; rank 0 collects them between its steps,
and a thread writes the file after the last have arrived; small consecutive steps are written a few
at a time.

Clocks drift apart by up to about 50 us per second, so they are compared before a recorded step, and
every few steps in a sequence of such steps: a comparison that is n steps old is wrong by at most
0.005 n % of a step.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import chain

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from pipectl.capture.data import Loader, Samples
from pipectl.plan import Plan
from pipectl.runs import RunDirectory
from pipectl.runtime import clock
from pipectl.runtime.rank_process import warn
from pipectl.runtime.reports import Attempts, Reports
from pipectl.runtime.waiting import gather_all, poll
from pipectl.runtime.work_clock import Interval
from pipectl.schedule.actions import EVENT_NAMES, Action, Columns
from pipectl.spec.models import Trace
from pipectl.timeline import Event, Timeline, shown_ranks

MAX_EVENTS = 1_000_000
"""Events per file (about 60 MB); if there are more, evenly spaced ranks are recorded."""
STEPS_A_CLOCK = 16
MAX_WAITING = 8
"""Batches of files that may be queued before rank 0 waits for them."""
EVENTS_AT_ONCE, HELD_S = 1000, 1.0
"""Small files are written in batches, which takes half as long as one by one: after
``EVENTS_AT_ONCE`` events, or when the first is ``HELD_S`` seconds old."""


Table = npt.NDArray[np.float64]

WIDTH = 6
"""Columns of a table: start, end, kind (index of ``EVENT_NAMES``), stage, micro-batch, channel."""

_NAMED = [Action._fields.index(name) for name in ("kind", "stage", "micro_batch", "channel")]
_WAIT_FOR_ALL = EVENT_NAMES.index("update_wait")


class Recording:
    """One pass of a rank. Its program describes the rows; only their times are recorded.

    The times are those of ``perf_counter``.
    """

    def __init__(self) -> None:
        self._rows: list[Columns] = []
        self._times = array("d")
        self._next = 0
        self._waits_ended: list[tuple[int, float]] = []
        self._worked: list[Interval] = []

    @property
    def count(self) -> int:
        """Rows that are done."""
        return self._next // 2

    def expect(self, rows: Columns) -> None:
        """Reserve space for the rows that follow."""
        self._rows.append(rows)
        self._times.frombytes(bytes(2 * self._times.itemsize * len(rows)))

    def add(self, start_s: float, end_s: float) -> None:
        """Record the end of a row."""
        times, at = self._times, self._next
        times[at] = start_s
        times[at + 1] = end_s
        self._next = at + 2

    def correct(self, intervals: Sequence[Interval]) -> None:
        """Take over when an accelerator did the work of some rows."""
        self._worked += intervals

    def wait_ended(self) -> None:
        """Record that the current row, an UPDATE, has waited for the other ranks until now."""
        self._waits_ended.append((self._next // 2, time.perf_counter()))

    def table(self) -> Table:
        """All completed rows, in order; shape [events, ``WIDTH``]."""
        count = self.count
        table = np.empty((count, WIDTH))
        table[:, :2] = np.frombuffer(self._times).reshape(-1, 2)[:count]
        if self._worked:
            _follow(table, self._worked)
        if self._rows:
            table[:, 2:] = np.concatenate(self._rows)[:count, _NAMED]
        waits = [(row, at_s) for row, at_s in self._waits_ended if row < count]
        for more, (row, at_s) in enumerate(waits):  # an UPDATE is a wait and the rest
            row += more
            at_s = max(at_s, table[row, 0])
            table = np.insert(table, row, table[row], axis=0)
            table[row, 1:3] = at_s, _WAIT_FOR_ALL
            table[row + 1, 0] = at_s
        return table


def _follow(table: Table, worked: Sequence[Interval]) -> None:
    """Let rows happen when the accelerator did them, not when they were called.

    It does one after the other. Other rows (waits) last until their call returned, but what passes
    meanwhile on the accelerator is its work and no wait.
    """
    by_row = {row: (start_s, end_s) for row, start_s, end_s in worked}
    until_s = -np.inf
    for row, times in enumerate(table[:, :2]):
        times[:] = np.maximum(by_row.get(row, times), until_s)
        until_s = times[1]


class PlannedBatches:
    """Which steps have the batch that a plan predicts: a full one, of the longest sequences."""

    def __init__(self, loader: Loader, plan: Plan) -> None:
        self._samples, self._length = plan.batch_size, loader.lengths[-1]
        self._loader = loader

    def differs(self, batch: Samples) -> str | None:
        """How a batch differs from the planned one, in words; None if it does not."""
        if batch.size != self._samples:
            return f"its batch had {batch.size} of {self._samples} samples"
        if batch.length != self._length:
            return f"its sequences were padded to {batch.length} positions, not {self._length}"
        return None

    def nearest(self, wanted: Iterable[int], steps: int) -> frozenset[int]:
        """For each step the first one from it on that has such a batch; the last one before it if
        none follows in a run of so many steps. The step itself if no batch is such a one."""
        batches_of = lru_cache(1)(self._loader.epoch)  # a long list, which nobody needs later

        def nearest(step: int) -> int:
            step, count = min(step, steps), len(batches_of(0))
            window = 2 * count  # epochs have batches of each length in orders of their own
            later, before = range(step, steps + 1)[:window], range(step - 1, 0, -1)[:window]
            for each in chain(later, before):
                epoch, index = divmod(each - 1, count)
                if self.differs(batches_of(epoch)[index]) is None:
                    return each
            return step

        return frozenset(map(nearest, wanted))


class Tracing:
    """One rank's part of the recording.

    Args:
        communicator: duplicated for its own messages. Collective.
        steps: of the whole run.
        rows: number of rows in this rank's program.
        planned: the batches that the plan predicts.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        run: RunDirectory,
        trace: Trace,
        steps: int,
        rows: int,
        planned: PlannedBatches,
    ) -> None:
        self._run, self._every, self._planned = run, trace.every, planned
        self._steps = planned.nearest(trace.steps, steps)
        self._world = communicator.Dup()
        self._rank, self._size = communicator.rank, communicator.size
        events = sum(gather_all(communicator, rows))
        limit = max(2, self._size * MAX_EVENTS // max(1, events))
        self._recorded = frozenset(shown_ranks(self._size, limit))
        self._clock = clock.CommonClock()
        self._compared = self._last = -STEPS_A_CLOCK
        self._tables = Reports[Table](self._world, sorted(self._recorded))
        self._whole: dict[int, dict[int, Table]] = {}
        self._differs: dict[int, str] = {}
        self._held_since = 0.0
        self._writer = ThreadPoolExecutor(1, "trace")
        self._writing: deque[Future[None]] = deque()
        self._attempts = Attempts("the trace", warn)

    def wants(self, step: int) -> bool:
        """Whether a step is recorded."""
        return step in self._steps or (self._every is not None and step % self._every == 0)

    def begin(self, step: int) -> Recording | None:
        """The recording for a step; None on ranks that are not recorded. Collective."""
        if step != self._last + 1 or step - self._compared >= STEPS_A_CLOCK:
            self._clock = clock.common_clock(self._world)
            self._compared = step
        self._last = step
        return Recording() if self._rank in self._recorded else None

    def end(
        self,
        step: int,
        recording: Recording | None,
        begin_s: float,
        batches: Sequence[Samples],
        *,
        skipped: bool,
    ) -> None:
        """Start sending a recording; never waits for another rank.

        Args:
            begin_s: of the step, by this rank's ``perf_counter``.
            batches: that were recorded.
            skipped: whether the update was left out.
        """
        if recording is None:
            return
        differs = next(filter(None, map(self._planned.differs, batches)), None)
        if differs is None and skipped:
            differs = "its update was left out"
        if differs is not None:
            self._differs[step] = differs
        head = np.zeros((1, WIDTH))
        head[0, :3] = step, begin_s + self._clock.offset_s, self._clock.error_s
        table = np.concatenate([head, recording.table()])
        table[1:, :2] += self._clock.offset_s
        self._tables.send(step, table)

    def advance(self) -> None:
        """Advance messages and files between steps; files that cannot be written are dropped."""
        while self._writing and (self._writing[0].done() or len(self._writing) > MAX_WAITING):
            written = self._writing.popleft()
            self._attempts(written.result)
        for step, tables in self._tables.collect() if self._tables.incomplete else ():
            if not self._whole:
                self._held_since = time.perf_counter()
            self._whole[step] = tables
            events = sum(len(table) for each in self._whole.values() for table in each.values())
            if events > EVENTS_AT_ONCE or not self.wants(step + 1):
                self._start_writing()
        if self._whole and time.perf_counter() - self._held_since > HELD_S:
            self._start_writing()

    def finish(self) -> None:
        """Wait until everything is written."""

        def is_over() -> bool:
            self.advance()
            if self._whole and not self._tables.incomplete:
                self._start_writing()
            return not (self._tables.is_sending or self._tables.incomplete or self._writing)

        poll(is_over)
        self._writer.shutdown()

    def _start_writing(self) -> None:
        steps, self._whole = self._whole, {}
        self._writing.append(self._writer.submit(self._write, steps))

    def _write(self, steps: dict[int, dict[int, Table]]) -> None:
        for step, tables in steps.items():
            timeline = timeline_of(tables, self._size, self._differs.pop(step, None))
            timeline.save(self._run.measured_of(step))


def timeline_of(tables: dict[int, Table], ranks: int, differs: str | None = None) -> Timeline:
    """The timeline of a step, which starts when its first rank begins it.

    Args:
        tables: by rank, on one clock; the first row holds step, begin and error of the clock.
        differs: see :class:`Timeline`.
    """
    begin_s = min(table[0, 1] for table in tables.values())
    events = [event for rank in sorted(tables) for event in _events(rank, tables[rank], begin_s)]
    error_s = max(float(table[0, 2]) for table in tables.values())
    return Timeline(tuple(events), ranks, int(tables[min(tables)][0, 0]), error_s, differs)


def _events(rank: int, table: Table, begin_s: float) -> list[Event]:
    starts, ends = (table[1:, :2] - begin_s).T.tolist()
    names = table[1:, 2:].astype(int).tolist()
    return [
        Event(rank, start, end, EVENT_NAMES[kind], *names_of_row)
        for start, end, (kind, *names_of_row) in zip(starts, ends, names, strict=True)
    ]
