"""Schedules: what every rank does in one optimizer step, as pure functions of the plan."""

from pipectl.schedule.actions import Action, Actions, Kind
from pipectl.schedule.channel import Channel, channels, messages
from pipectl.schedule.lowering import (
    lower,
    lower_evaluation,
    lower_renewal,
    lower_stretch,
    program_hash,
)
from pipectl.schedule.memory import host_bytes, peak_host_bytes, stage_peaks_in_flight
from pipectl.schedule.placement import Portion, plan_of_step, plan_of_trial, portion, roles, shares
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
    "default_ranks", "default_warm_up", "host_bytes", "is_unflushed", "lower", "lower_evaluation",
    "lower_renewal", "lower_stretch", "messages", "peak_host_bytes", "plan_of_step",
    "plan_of_trial", "portion", "program_hash", "roles", "schedule_of", "shares",
    "splits_backwards", "stage_peaks_in_flight",
]  # fmt: skip
