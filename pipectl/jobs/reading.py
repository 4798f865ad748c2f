"""What the files of one run say, and by what one sees that they still say it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipectl.errors import DataFileError
from pipectl.jobs.culprit import Culprit, culprit
from pipectl.jobs.measured import Expected, Measured, measured
from pipectl.plan import Plan
from pipectl.runs import (
    PROFILING,
    Record,
    RunDirectory,
    read_exit_code,
    read_figures,
    read_heartbeat,
)

Fact = tuple[int, int, int, int] | None
"""Inode, size, and times of the last change (ns) of a file; None where there is none."""
Facts = tuple[Fact, ...]
_RUN = RunDirectory(Path())
_FILES = (_RUN.record, _RUN.resubmitted, _RUN.exit_code, _RUN.heartbeat, _RUN.metrics, _RUN.plan)
_NAMES = (*(path.name for path in _FILES), _RUN.errors.name)
_SAID = ("attempt", "state", "step", "steps", "ranks")


@dataclass(frozen=True)
class Reading:
    """What a run has written, apart from its record.

    Args:
        heartbeat: the last one, of which only what is shown; empty where there is none.
        heartbeat_at: seconds since the epoch.
        expected: None before there is a plan.
    """

    exit_code: int | None
    heartbeat: Mapping[str, Any]
    heartbeat_at: float | None
    measured: Measured
    expected: Expected | None
    culprit: Culprit | None


def facts_of(run: RunDirectory) -> Facts:
    """Of all files that a :class:`Reading` and the record come from, in one look.

    Every one is replaced or grows when it changes; reports of errors come and go by name, which
    their directory shows.
    """
    found: dict[str, Fact] = dict.fromkeys(_NAMES)
    with suppress(OSError), os.scandir(run.path) as entries:
        for entry in entries:
            if entry.name in found:
                found[entry.name] = _fact(entry)
    return tuple(found.values())


def read(run: RunDirectory, record: Record | None, plan: Plan | None) -> Reading:
    """Read the files of a run; a damaged one counts as none."""
    heartbeat = _heartbeat(run)
    return Reading(
        exit_code=read_exit_code(run),
        heartbeat={key: heartbeat[key] for key in _SAID if key in heartbeat},
        heartbeat_at=_written_at(run.heartbeat) if heartbeat else None,
        measured=figures(run, record),
        expected=None if plan is None else Expected.of(plan),
        culprit=culprit(run),
    )


def figures(run: RunDirectory, record: Record | None) -> Measured:
    """What a run has done so far; the steps of one that only measures are percent."""
    if record is None or record.kind != PROFILING:
        return measured(read_figures(run))
    heartbeat = _heartbeat(run)
    return Measured(step=heartbeat.get("step") or 0, steps=record.steps)


def to_json(reading: Reading) -> dict[str, Any]:
    """As JSON data."""
    return asdict(reading)


def from_json(document: dict[str, Any]) -> Reading:
    """What :func:`to_json` gave; TypeError or KeyError for anything else."""
    found, expected, fault = (document[key] for key in ("measured", "expected", "culprit"))
    found = {**found, "not_finite": tuple(found["not_finite"])}
    if expected is not None:
        expected = {**expected, "peak_memory_bytes": tuple(expected["peak_memory_bytes"])}
    return Reading(
        exit_code=document["exit_code"],
        heartbeat=document["heartbeat"],
        heartbeat_at=document["heartbeat_at"],
        measured=Measured(**found),
        expected=None if expected is None else Expected(**expected),
        culprit=None if fault is None else Culprit(**fault),
    )


def _fact(entry: os.DirEntry[str]) -> Fact:
    try:
        found = entry.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


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
