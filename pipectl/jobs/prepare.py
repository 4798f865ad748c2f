"""The first step of a batch job: profile and plan within the allocation, where files are missing.

Started as ``python -m pipectl.jobs.prepare RUN_DIRECTORY``. Progress goes to ``heartbeat.json``,
as the ranks write it later; a failure goes to ``errors/prepare.json`` and standard error.
"""

from __future__ import annotations

import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from pipectl.cluster import Cluster
from pipectl.errors import PipectlError
from pipectl.files import write_json
from pipectl.jobs.plan import find_plan, write_plan
from pipectl.jobs.profile import measure
from pipectl.profile import Profile
from pipectl.runs import RunDirectory
from pipectl.spec import load

_BEAT_S = 1.0


def prepare(run: RunDirectory, clock: Callable[[], float] = time.time) -> None:
    """Write the profile and the plan of a run, unless they are there.

    Raises:
        PipectlError: the model cannot be profiled, or no plan fits.
    """
    spec = load(run.job)
    cluster = Cluster.load(run.cluster)
    heartbeat = _Heartbeat(run, spec.training.steps, clock)
    if run.profile.exists():
        profile = Profile.load(run.profile)
    else:
        profile = measure(spec, run.profile, heartbeat.profiling)
    if not run.plan.exists():
        heartbeat.beat("planning")
        write_plan(run, find_plan(spec, profile, cluster), cluster)


def main(arguments: list[str]) -> int:
    """Prepare one run; the exit code is the one that commands have."""
    run = RunDirectory(Path(arguments[0]))
    try:
        prepare(run)
    except Exception as error:
        code = error.exit_code if isinstance(error, PipectlError) else 1
        write_json(run.preparation_error, _report(error, code))
        sys.stderr.write(f"error: {error or type(error).__name__}\n")
        return code
    return 0


class _Heartbeat:
    """Tells at most once a second how far the preparation is."""

    def __init__(self, run: RunDirectory, steps: int, clock: Callable[[], float]) -> None:
        self._run = run
        self._steps = steps
        self._clock = clock
        self._last = 0.0

    def profiling(self, done: int, total: int, _what: str) -> None:
        if self._clock() - self._last >= _BEAT_S:
            self.beat(f"profiling {done}/{total}")

    def beat(self, state: str) -> None:
        self._last = self._clock()
        document = {
            "version": 1,
            "time": self._last,
            "attempt": 1,
            "state": state,
            "step": 0,
            "steps": self._steps,
            "ranks": [],
        }
        write_json(self._run.heartbeat, document)


def _report(error: Exception, code: int) -> dict[str, object]:
    """The same fields as the ranks' error files."""
    return {
        "rank": None,
        "host": socket.gethostname(),
        "stage": None,
        "action": "PREPARE",
        "step": None,
        "type": type(error).__name__,
        "message": error.message if isinstance(error, PipectlError) else str(error),
        "cure": getattr(error, "cure", None),
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
        "exit_code": code,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
