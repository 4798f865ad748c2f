"""Run directories: creating, finding and reading them."""

from pipectl.runs.best import Best, BestCheckpoint, best_checkpoint, best_evaluation
from pipectl.runs.directory import (
    RUN_VARIABLE,
    SCRIPT,
    START_VARIABLE,
    RunDirectory,
    StartDirectory,
    SweepDirectory,
    checkpoints,
    find,
    find_run,
    find_runs,
    list_runs,
    list_sweeps,
    locked,
    name_in_shell,
    runs_directory,
    start_of_job,
    stem_of,
    step_of,
    sweep_of,
)
from pipectl.runs.logs import Line, Log, Logs, last_lines
from pipectl.runs.metrics import (
    WARM_UP_STEPS,
    Columns,
    CoreShare,
    Measured,
    Metrics,
    MetricsLine,
    NotFinite,
    Speed,
    plan_id,
    read_columns,
    read_measured,
    read_metrics,
    read_speed,
)
from pipectl.runs.pauses import Pauses, read_pauses
from pipectl.runs.readers import (
    Heartbeat,
    LostTo,
    RankBeat,
    last_checkpoint,
    measured_steps,
    read_errors,
    read_exit_code,
    read_exit_warning,
    read_heartbeat,
    read_nodes,
    read_requeue_error,
    read_stall,
    read_starts,
)
from pipectl.runs.record import PROFILING, REHEARSAL, TRAINING, Event, Record, SweepPoint, is_job_id

__all__ = [
    "PROFILING", "REHEARSAL", "RUN_VARIABLE", "SCRIPT", "START_VARIABLE", "TRAINING",
    "WARM_UP_STEPS", "Best", "BestCheckpoint", "Columns", "CoreShare", "Event", "Heartbeat",
    "Line", "Log", "Logs", "LostTo", "Measured", "Metrics", "MetricsLine", "NotFinite", "Pauses",
    "RankBeat", "Record", "RunDirectory", "Speed", "StartDirectory", "SweepDirectory", "SweepPoint",
    "best_checkpoint", "best_evaluation", "checkpoints", "find", "find_run", "find_runs",
    "is_job_id", "last_checkpoint", "last_lines", "list_runs", "list_sweeps", "locked",
    "measured_steps", "name_in_shell", "plan_id", "read_columns", "read_errors", "read_exit_code",
    "read_exit_warning", "read_heartbeat", "read_measured", "read_metrics", "read_nodes",
    "read_pauses", "read_requeue_error", "read_speed", "read_stall", "read_starts",
    "runs_directory", "start_of_job", "stem_of", "step_of", "sweep_of",
]  # fmt: skip
