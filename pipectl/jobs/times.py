"""How long a run has waited and run, and what is left of its walltime."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipectl.batch import LOCAL, JobStatus
from pipectl.runs import Record, StartDirectory, read_nodes


@dataclass(frozen=True)
class Times:
    """Times of a run since its last submission, in seconds; None if unknown.

    Args:
        waited_s: time in the queue until the first start, or until now.
        run_s: time since the last start, or from that to the end.
        left_s: what is left of the walltime while the run is alive.
        node_hours: nodes times ``run_s``; None on this machine.
    """

    waited_s: float | None = None
    run_s: float | None = None
    left_s: float | None = None
    node_hours: float | None = None


NO_TIMES = Times()


def measure_times(
    start: StartDirectory, record: Record, job: JobStatus, restarts: int, now: float
) -> Times:
    """Return the times of a run by what the batch system says, or else the files of its script.

    Args:
        start: the newest start of the run.
        restarts: how often the job was started again; what it waited before that is unknown.
    """
    submitted_at = record.submitted_at
    began_at, ended_at = map(_written_at, (start.begun, start.exit_code))
    if job.state.waits:
        return Times(waited_s=max(0.0, now - submitted_at) if began_at is None else None)
    start_at = job.start or began_at
    if start_at is None or not (job.state.alive or job.state.final):
        return NO_TIMES
    end = now if job.state.alive else job.end or ended_at
    run_s = None if end is None else max(0.0, end - start_at)
    is_queued = record.scheduler != LOCAL
    deadline = job.deadline
    if job.source == "heartbeat" and record.walltime_s is not None and is_queued:
        deadline = start_at + record.walltime_s
    nodes = _nodes_of(start, record)
    return Times(
        waited_s=max(0.0, start_at - submitted_at) if is_queued and not restarts else None,
        run_s=run_s,
        left_s=None if deadline is None or job.state.final else max(0.0, deadline - now),
        node_hours=nodes * run_s / 3600 if is_queued and run_s is not None else None,
    )


def _nodes_of(start: StartDirectory, record: Record) -> int:
    """Return the number of nodes that a start uses; those the run asks for if it is fixed."""
    used = None if record.min_nodes is None else read_nodes(start)
    return used or record.nodes


def _written_at(path: Path) -> float | None:
    """Return when a file was written; None if it was not."""
    with suppress(OSError):
        return path.stat().st_mtime
    return None
