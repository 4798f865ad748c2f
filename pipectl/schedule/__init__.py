"""Schedules: what every rank does in one optimizer step, as pure functions of the plan."""

from pipectl.schedule.actions import Action, Actions, Kind, Program
from pipectl.schedule.channel import Channel, channels, messages
from pipectl.schedule.computing import compute_actions, compute_programs
from pipectl.schedule.lowering import (
    lower,
    lower_evaluation,
    lower_renewal,
    lower_stretch,
    program_hash,
)
from pipectl.schedule.memory import (
    host_bytes,
    peak_host_bytes,
    peak_in_flight,
    stage_peaks_in_flight,
)
from pipectl.schedule.placement import (
    Portion,
    Role,
    plan_of_step,
    plan_of_trial,
    portion,
    rank_of,
    roles,
    shares,
)
from pipectl.schedule.registry import (
    NAMES,
    SCHEDULES,
    default_ranks,
    default_warm_up,
    is_unflushed,
    schedule_of,
    splits_backwards,
)

__all__ = [
    "NAMES",
    "SCHEDULES",
    "Action",
    "Actions",
    "Channel",
    "Kind",
    "Portion",
    "Program",
    "Role",
    "channels",
    "compute_actions",
    "compute_programs",
    "default_ranks",
    "default_warm_up",
    "host_bytes",
    "is_unflushed",
    "lower",
    "lower_evaluation",
    "lower_renewal",
    "lower_stretch",
    "messages",
    "peak_host_bytes",
    "peak_in_flight",
    "plan_of_step",
    "plan_of_trial",
    "portion",
    "program_hash",
    "rank_of",
    "roles",
    "schedule_of",
    "shares",
    "splits_backwards",
    "stage_peaks_in_flight",
]
