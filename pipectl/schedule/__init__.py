"""Schedules: what every rank does in one optimizer step, as pure functions of the plan."""

from pipectl.schedule.actions import Action, Actions, Kind, Program
from pipectl.schedule.catalogue import (
    NAMES,
    compute_actions,
    compute_programs,
    default_warm_up,
)
from pipectl.schedule.channel import Channel, channels
from pipectl.schedule.lowering import lower, lower_evaluation, program_hash

__all__ = [
    "NAMES",
    "Action",
    "Actions",
    "Channel",
    "Kind",
    "Program",
    "channels",
    "compute_actions",
    "compute_programs",
    "default_warm_up",
    "lower",
    "lower_evaluation",
    "program_hash",
]
