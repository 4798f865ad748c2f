"""Schedules: what every rank does in one optimizer step, as pure functions of the plan."""

from pipectl.schedule.actions import Action, Actions, Kind
from pipectl.schedule.channel import (
    Channel,
    Portion,
    channels,
    messages,
    plan_of_step,
    plan_of_trial,
    portion,
    roles,
    shares,
)
from pipectl.schedule.lowering import (
    lower,
    lower_evaluation,
    lower_renewal,
    lower_stretch,
    program_hash,
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
    "NAMES", "SCHEDULES", "Action", "Actions", "Channel", "Kind", "Portion", "channels",
    "default_ranks", "default_warm_up", "is_unflushed", "lower", "lower_evaluation",
    "lower_renewal", "lower_stretch", "messages", "plan_of_step", "plan_of_trial", "portion",
    "program_hash", "roles", "schedule_of", "shares", "splits_backwards",
]  # fmt: skip
