"""What ranks hold from step to step and in the memory of their hosts, and micro-batches in flight.

How much memory a rank holds while it executes its program is in :mod:`pipectl.simulate.memory`.
"""

from __future__ import annotations

from math import inf

import numpy as np

from pipectl.arrays import Floats
from pipectl.graph import TransferKind
from pipectl.plan import Plan
from pipectl.schedule.actions import Actions, Kind
from pipectl.schedule.channel import channels
from pipectl.schedule.lowering import lower
from pipectl.schedule.placement import roles, shares


def host_bytes(plan: Plan, rows: Actions) -> Floats:
    """Bytes that its rank has offloaded while it executes each row; shape [rows]."""
    kind = rows.column("kind")
    if not (kind == Kind.OFFLOAD_START).any():
        return np.zeros(len(rows))
    kept = np.array([stage.kept_bytes for stage in plan.stages], dtype=float)
    moved = kept[rows.column("stage")] * shares(plan, rows)
    there: Floats = moved * (kind == Kind.OFFLOAD_START)
    changes = there - moved * (kind == Kind.FETCH_WAIT)
    return np.concatenate([np.zeros(1), np.cumsum(changes)])[: len(rows)] + there


def peak_host_bytes(plan: Plan, rows: Actions) -> int:
    """The most its rank has offloaded at once."""
    return round(float(host_bytes(plan, rows).max(initial=0)))


def stage_peaks_in_flight(plan: Plan) -> tuple[int, ...]:
    """The most micro-batches that wait at once for their backward of each stage, on one rank.

    Raises:
        ScheduleError: see :func:`pipectl.schedule.lower`.
    """
    arrivals = {
        (channel.target_stage, channel.target_rank): index
        for index, channel in enumerate(channels(plan))
        if channel.kind is TransferKind.SAVED
    }
    peaks = [0] * len(plan.stages)
    for rank in range(plan.ranks):
        rows = lower(plan, rank)
        kind, channel = rows.column("kind"), rows.column("channel")
        for role in roles(plan, rank):
            if role.kind is Kind.BACKWARD:
                mine = rows.column("stage") == role.stage
                begun = mine & (kind == Kind.FORWARD)
                if (saved := arrivals.get((role.stage, rank))) is not None:
                    begun = (channel == saved) & (kind == Kind.RECEIVE_START)
                ended = mine & ((kind == Kind.BACKWARD) | (kind == Kind.BACKWARD_WEIGHT))
                peak = int(np.cumsum(begun.astype(int) - ended).max(initial=0))
                peaks[role.stage] = max(peaks[role.stage], peak)
    return tuple(peaks)


def resident_bytes(plan: Plan, rank: int) -> int:
    """What a rank holds from step to step; optimizer state only where it updates."""
    costs = {role.stage: plan.stages[role.stage].cost for role in roles(plan, rank)}
    updated = {role.stage for role in roles(plan, rank) if role.kind is Kind.BACKWARD}
    return sum(
        cost.resident_bytes - (0 if stage in updated else cost.optimizer_bytes)
        for stage, cost in costs.items()
    )


def room_bytes(plan: Plan, rank: int, limit_bytes: float | None) -> int | None:
    """What a rank's copy of what it saves may take while a checkpoint is written.

    Ranks copy between two steps, when all that a step holds at its peak is still with the process.
    So the copy comes on top of the peak; without room for it, the rank writes from where it is.
    None if nothing limits the copy, or the peak is not known.

    Args:
        limit_bytes: of this rank, which may be less than that of the job.
    """
    if limit_bytes is None or limit_bytes == inf or plan.prediction is None:
        return None
    return max(0, int(limit_bytes) - plan.prediction.peak_memory_bytes[rank])


def copy_bytes(plan: Plan, rank: int, limit_bytes: float | None) -> int:
    """What it takes: parameters, buffers and optimizer state of the rank; 0 without room."""
    room, state = room_bytes(plan, rank, limit_bytes), resident_bytes(plan, rank)
    return state if room is None or state <= room else 0
