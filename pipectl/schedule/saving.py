"""Memory that a rank's checkpoint takes beside the training, while it is written.

Ranks copy what they save between two steps, when all that a step holds at its peak is still with
the process. So the copy comes on top of the peak, and takes no more than the limit leaves free
there; what finds no room is written from where it is, without a copy.
"""

from __future__ import annotations

from math import inf

from pipectl.plan import Plan
from pipectl.schedule.memory import resident_bytes


def room_bytes(plan: Plan, rank: int, limit_bytes: float | None) -> int | None:
    """What a rank's copies may take; None where nothing limits them, or the peak is not known.

    Args:
        limit_bytes: of this rank, which may be less than that of the job.
    """
    if limit_bytes is None or limit_bytes == inf or plan.prediction is None:
        return None
    return max(0, int(limit_bytes) - plan.prediction.peak_memory_bytes[rank])


def copy_bytes(plan: Plan, rank: int, limit_bytes: float | None) -> int:
    """What they take at most: parameters, buffers and optimizer state that the rank holds."""
    room, state = room_bytes(plan, rank, limit_bytes), resident_bytes(plan, rank)
    return state if room is None else min(room, state)
