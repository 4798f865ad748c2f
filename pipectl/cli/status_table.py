"""The state of many runs for people: a table."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from pipectl.batch import JobStatus
from pipectl.cli.console import note, output, plain, say, say_json
from pipectl.cli.rows import Rows
from pipectl.cli.status_json import status_json
from pipectl.cli.status_words import progress, state_text
from pipectl.cli.sweep_values import values_text
from pipectl.jobs.status import RunStatus, statuses
from pipectl.runs import list_runs
from pipectl.units import format_bytes, format_time

_REASON = 40
"""Characters of a reason that a table has room for."""
_FIGURES = (
    "step", "loss", "a step", "predicted", "efficiency", "memory", "restarts", "remaining",
)  # fmt: skip
_HEADS = ("run", "values", "state", "on", *_FIGURES, "waits for")
_OPTIONAL = (  # the least important first
    "predicted", "memory", "efficiency", "on", "restarts", "waits for", "remaining", "a step",
    "values",
)  # fmt: skip


def show_all(directory: Path, limit: int, *, as_json: bool) -> None:
    """Print how the newest runs of a directory are."""
    runs = list_runs(directory)
    found = statuses(runs[-limit:], time.time())
    if as_json:
        say_json([status_json(status) for status in found])
    elif not found:
        say(f"{directory}: no runs yet; start one with: pipectl submit JOB.yaml")
    else:
        console = output()
        console.print(runs_table(found, console.width))
        if len(runs) > limit:
            note(f"{len(runs) - limit} older runs are not shown; see --limit")


def runs_table(found: Sequence[RunStatus], width: int) -> Rows:
    """One row per run; without empty columns, and without the least important if it gets too wide.

    Args:
        width: columns there are.
    """
    rows = [
        (
            *map(plain, (status.run.name, _values(status))),
            state_text(status),
            *map(plain, _cells(status)),
        )
        for status in found
    ]
    columns = {head: [row[index] for row in rows] for index, head in enumerate(_HEADS)}
    return Rows(columns, _FIGURES, optional=_OPTIONAL, room=width)


def _values(status: RunStatus) -> str:
    sweep = status.record.sweep if status.record else None
    return "" if sweep is None else values_text(sweep.values)


def _cells(status: RunStatus) -> tuple[str, ...]:
    found = status.measured
    left = found.remaining_s if status.job.state.alive else None
    return (
        status.record.scheduler if status.record else "",
        progress(status, "{}/{}"),
        "" if found.last_loss is None else f"{found.last_loss:.4g}",
        _time(found.step_time_s),
        _time(status.predicted_step_s),
        "" if status.efficiency is None else f"{status.efficiency:.0%}",
        format_bytes(max(peak.measured_bytes for peak in status.peaks)) if status.peaks else "",
        str(status.restarts or ""),
        _time(left),
        _waits_for(status.job),
    )


def _waits_for(job: JobStatus) -> str:
    """What a job in the queue waits for, and until when, as far as the batch system says."""
    if not job.state.waits:
        return ""
    start = "" if job.start is None else f"{datetime.fromtimestamp(job.start):%a %H:%M}"
    return ", ".join(filter(None, (job.reason[:_REASON], start and f"until {start}")))


def _time(time_s: float | None) -> str:
    return "" if time_s is None else format_time(time_s)
