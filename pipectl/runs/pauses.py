"""How long runs of a job have done something else than steps: start, evaluate, save, end."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pipectl.errors import DataFileError
from pipectl.files import is_of_another
from pipectl.runs.directory import RunDirectory, list_runs
from pipectl.runs.metrics import WARM_UP_STEPS, Metrics
from pipectl.runs.record import TRAINING, Record

_MAX_RUNS = 20
"""Number of the latest runs of a directory that are looked at."""
_MIN_STEPS = 20
"""A run of fewer steps says little."""


class Pauses(NamedTuple):
    """What a run takes in addition to its steps, in seconds.

    Args:
        start_s: from the start of its script to the begin of the first step; for each start.
        step_s: for evaluations and checkpoints, on average of a step.
        end_s: after the last step.
        run: name of the run; empty if none is known.
    """

    start_s: float = 0.0
    step_s: float = 0.0
    end_s: float = 0.0
    run: str = ""


def read_pauses(directory: Path, name: str) -> Pauses:
    """Read the pauses of the latest run of a job that was trained in one start."""
    for run in list(reversed(list_runs(directory)))[:_MAX_RUNS]:
        with suppress(OSError, ValueError, DataFileError):
            record = Record.load(run.record)
            is_alike = record.name == name and record.kind == TRAINING
            is_alike = is_alike and not is_of_another(run.path)  # users may share a directory
            if is_alike and (found := _pauses_of(run)) is not None:
                return found
    return Pauses()


def _pauses_of(run: RunDirectory) -> Pauses | None:
    """None if the run is not complete, has too few steps, or was started more than once."""
    start = run.start
    if start.exit_code.read_text("utf-8").strip() != "0":
        return None
    lines = [line for line in Metrics(run.metrics).lines() if line.is_step]
    timed = [line for line in lines if line.time is not None and line.step_time_s is not None]
    if len(timed) < _MIN_STEPS or any(line.attempt != 1 for line in timed):
        return None
    first, begin, last = timed[0], timed[WARM_UP_STEPS], timed[-1]
    usual_s = median(line.step_time_s or 0.0 for line in timed[WARM_UP_STEPS:])
    began_at, ended_at = (path.stat().st_mtime for path in (start.begun, start.exit_code))
    begin_time, end_time = begin.time or 0.0, last.time or 0.0
    passed_s, steps = end_time - begin_time, last.step - begin.step
    return Pauses(
        start_s=max(0.0, begin_time - (begin.step - first.step + 1) * usual_s - began_at),
        step_s=max(0.0, passed_s / steps - usual_s),
        end_s=max(0.0, ended_at - end_time),
        run=run.name,
    )
