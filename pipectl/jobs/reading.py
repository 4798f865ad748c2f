"""What the files of one run say."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipectl.errors import DataFileError
from pipectl.jobs.culprit import Culprit, culprit
from pipectl.jobs.measured import Measured, measured
from pipectl.runs import (
    PROFILING,
    Record,
    RunDirectory,
    read_exit_code,
    read_figures,
    read_heartbeat,
)

_SAID = ("attempt", "state", "step", "steps", "ranks")


@dataclass(frozen=True)
class Reading:
    """What a run has written, apart from its record.

    Args:
        heartbeat: the last one, of which only what is shown; empty where there is none.
        heartbeat_at: seconds since the epoch.
    """

    exit_code: int | None
    heartbeat: Mapping[str, Any]
    heartbeat_at: float | None
    measured: Measured
    culprit: Culprit | None


def read(run: RunDirectory, record: Record | None) -> Reading:
    """Read the files of a run; a damaged one counts as none."""
    heartbeat = _heartbeat(run)
    return Reading(
        exit_code=read_exit_code(run),
        heartbeat={key: heartbeat[key] for key in _SAID if key in heartbeat},
        heartbeat_at=_written_at(run.heartbeat) if heartbeat else None,
        measured=figures(run, record),
        culprit=culprit(run),
    )


def figures(run: RunDirectory, record: Record | None) -> Measured:
    """What a run has done so far; the steps of one that only measures are percent."""
    if record is None or record.kind != PROFILING:
        return measured(read_figures(run))
    heartbeat = _heartbeat(run)
    return Measured(step=heartbeat.get("step") or 0, steps=record.steps)


def _written_at(path: Path) -> float | None:
    """By the clock of the file system, which all nodes share; their own may be wrong."""
    with suppress(OSError):
        return path.stat().st_mtime
    return None


def _heartbeat(run: RunDirectory) -> Mapping[str, Any]:
    try:
        return read_heartbeat(run) or {}
    except DataFileError:
        return {}
