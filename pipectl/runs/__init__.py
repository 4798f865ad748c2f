"""Run directories: making, finding, recording and reading them."""

from pipectl.runs.directory import ATTEMPT, RESUBMITTED, RUN_VARIABLE, SCRIPT, RunDirectory
from pipectl.runs.find import find_run, list_runs
from pipectl.runs.lock import locked
from pipectl.runs.manifest import LossScaleState, Manifest, Shard, checkpoints, step_of
from pipectl.runs.readers import (
    last_checkpoint,
    measured_steps,
    read_errors,
    read_exit_code,
    read_figures,
    read_heartbeat,
    read_metrics,
)
from pipectl.runs.record import PROFILING, REHEARSAL, Event, Record, is_job_id

__all__ = [
    "ATTEMPT",
    "PROFILING",
    "REHEARSAL",
    "RESUBMITTED",
    "RUN_VARIABLE",
    "SCRIPT",
    "Event",
    "LossScaleState",
    "Manifest",
    "Record",
    "RunDirectory",
    "Shard",
    "checkpoints",
    "find_run",
    "is_job_id",
    "last_checkpoint",
    "list_runs",
    "locked",
    "measured_steps",
    "read_errors",
    "read_exit_code",
    "read_figures",
    "read_heartbeat",
    "read_metrics",
    "step_of",
]
