"""The state of runs again and again, for somebody who watches them.

What jobs write is read every time. Batch systems serve many people: they are asked at once when
there is a job that they were not asked about, and then ever more rarely.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pipectl.jobs.places import LOCAL
from pipectl.jobs.status import Answers, RunStatus, ask, statuses
from pipectl.runs import Record, RunDirectory

_LEAST_S, _MOST_S, _GROWTH = 10.0, 60.0, 1.25


class Watching:
    """Looks at runs.

    Args:
        clock: in seconds, of any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause_s, self._due_s = _LEAST_S, 0.0
        self._asked: frozenset[tuple[str, str | None]] = frozenset()
        self._answers: Answers = {}

    def look(self, runs: Sequence[RunDirectory], now: float) -> list[RunStatus]:
        """How they are; the word of a batch system may be up to a minute old.

        Args:
            now: seconds since the epoch.
        """
        return statuses(runs, now, self._ask)

    def _ask(self, records: Sequence[Record]) -> Answers:
        here = [record for record in records if record.scheduler == LOCAL]
        away = [record for record in records if record.scheduler != LOCAL]
        jobs = frozenset((record.scheduler, record.job_id) for record in away)
        known = jobs <= self._asked
        if not known or self._clock() >= self._due_s:
            self._pause_s = min(self._pause_s * _GROWTH, _MOST_S) if known else _LEAST_S
            self._asked, self._answers = jobs, ask(away)
            self._due_s = self._clock() + self._pause_s
        return {**self._answers, **ask(here)}
