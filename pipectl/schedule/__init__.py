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
from pipectl.schedule.memory import memory_bytes, peak_in_flight, peak_memory_bytes
from pipectl.schedule.validation import Proof, validate

__all__ = [
    "NAMES",
    "Action",
    "Actions",
    "Channel",
    "Kind",
    "Program",
    "Proof",
    "channels",
    "compute_actions",
    "compute_programs",
    "default_warm_up",
    "lower",
    "lower_evaluation",
    "memory_bytes",
    "peak_in_flight",
    "peak_memory_bytes",
    "program_hash",
    "validate",
]
