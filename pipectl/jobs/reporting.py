"""How a job's first step, or a job that only measures, tells what it does and why it failed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from pipectl.faults import as_fault, describe_error, with_details
from pipectl.files import write_json
from pipectl.printable import printable
from pipectl.runs import RunDirectory, beat

_BEAT_S = 1.0
_PLACE = {"rank": None, "stage": None, "action": "PREPARE", "step": None}


class Heartbeat:
    """Writes ``heartbeat.json`` as the ranks write it later, at most once a second.

    Args:
        steps: optimizer steps of the run; 100 for one that only measures, whose steps are percent.
        measuring_only: whether it is such a run.
    """

    def __init__(
        self,
        run: RunDirectory,
        steps: int,
        clock: Callable[[], float] = time.time,
        *,
        measuring_only: bool = False,
    ) -> None:
        self._run, self._steps, self._clock = run, steps, clock
        self._measuring_only = measuring_only
        self._last = 0.0

    def profiling(self, done: int, total: int, what: str) -> None:
        """Write how far the measuring is, if the last beat is old enough, or what comes before."""
        if not total:
            self.beat(what)
        elif self._clock() - self._last >= _BEAT_S:
            percent = 100 * done // total
            if self._measuring_only:
                self.beat("profiling", percent)
            else:
                self.beat(f"profiling {percent}%")

    def beat(self, state: str, step: int = 0) -> None:
        """Write what is going on."""
        self._last = self._clock()
        beat(self._run, state, step, self._steps, now=self._last)


def report_failure(run: RunDirectory, work: Callable[[], None]) -> int:
    """Do the work of a job; a failure goes to ``errors/prepare.json`` and standard error.

    Returns:
        The exit code that commands have.
    """
    try:
        work()
    except Exception as raised:
        error = with_details(as_fault(raised), run.preparation_error)
        report = {**_PLACE, **describe_error(error)}
        write_json(run.preparation_error, report)
        sys.stderr.write(printable(f"error: {error or type(error).__name__}\n"))
        return int(report["exit_code"])
    return 0
