"""Run directories: making, finding, recording and reading them."""

from pipectl.runs.directory import (
    ATTEMPT,
    REQUEUE_ERROR,
    RESUBMITTED,
    RUN_VARIABLE,
    SCRIPT,
    VARIABLES,
    RunDirectory,
)
from pipectl.runs.find import (
    USUAL,
    as_typed,
    find_run,
    find_runs,
    find_sweep,
    list_runs,
    list_sweeps,
    one_of,
)
from pipectl.runs.heartbeat import beat
from pipectl.runs.lock import locked
from pipectl.runs.manifest import LossScaleState, Manifest, Shard, checkpoints, step_of
from pipectl.runs.printed import Line, Logs, Printed
from pipectl.runs.readers import (
    last_checkpoint,
    measured_steps,
    read_errors,
    read_exit_code,
    read_figures,
    read_heartbeat,
    read_metrics,
    read_stall,
    read_starts,
)
from pipectl.runs.record import (
    PROFILING,
    REHEARSAL,
    TRAINING,
    Event,
    Record,
    Setting,
    is_job_id,
)
from pipectl.runs.sweep import Members, SweepDirectory, sweep_of

__all__ = [
    "ATTEMPT",
    "PROFILING",
    "REHEARSAL",
    "REQUEUE_ERROR",
    "RESUBMITTED",
    "RUN_VARIABLE",
    "SCRIPT",
    "TRAINING",
    "USUAL",
    "VARIABLES",
    "Event",
    "Line",
    "Logs",
    "LossScaleState",
    "Manifest",
    "Members",
    "Printed",
    "Record",
    "RunDirectory",
    "Setting",
    "Shard",
    "SweepDirectory",
    "as_typed",
    "beat",
    "checkpoints",
    "find_run",
    "find_runs",
    "find_sweep",
    "is_job_id",
    "last_checkpoint",
    "list_runs",
    "list_sweeps",
    "locked",
    "measured_steps",
    "one_of",
    "read_errors",
    "read_exit_code",
    "read_figures",
    "read_heartbeat",
    "read_metrics",
    "read_stall",
    "read_starts",
    "step_of",
    "sweep_of",
]
