"""Schedules: what every rank does in one optimizer step, as pure functions of the plan."""

from pipectl.schedule.actions import Action, Actions, Kind, Program
from pipectl.schedule.catalogue import NAMES, default_ranks, default_warm_up, splits_backwards
from pipectl.schedule.channel import Channel, channels, messages
from pipectl.schedule.computing import compute_actions, compute_programs
from pipectl.schedule.lowering import lower, lower_evaluation, lower_stretch, program_hash
from pipectl.schedule.memory import (
    host_bytes,
    memory_bytes,
    peak_host_bytes,
    peak_in_flight,
    peak_memory_bytes,
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
from pipectl.schedule.renewal import lower_renewal
from pipectl.schedule.unflushed import is_unflushed
from pipectl.schedule.validation import Proof, validate

__all__ = [
    "NAMES",
    "Action",
    "Actions",
    "Channel",
    "Kind",
    "Portion",
    "Program",
    "Proof",
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
    "memory_bytes",
    "messages",
    "peak_host_bytes",
    "peak_in_flight",
    "peak_memory_bytes",
    "plan_of_step",
    "plan_of_trial",
    "portion",
    "program_hash",
    "rank_of",
    "roles",
    "shares",
    "splits_backwards",
    "validate",
]
