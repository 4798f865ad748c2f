"""Memory that ranks hold between steps and on their hosts, and micro-batches in flight.

The memory of a rank during its program is in :mod:`pipectl.simulate.memory`.
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
    """Return the bytes that a rank has offloaded during each row; shape [rows]."""
    kind = rows.column("kind")
    if not (kind == Kind.OFFLOAD_START).any():
        return np.zeros(len(rows))
    kept = np.array([stage.kept_bytes for stage in plan.stages], dtype=float)
    moved = kept[rows.column("stage")] * shares(plan, rows)
    there: Floats = moved * (kind == Kind.OFFLOAD_START)
    changes = there - moved * (kind == Kind.FETCH_WAIT)
    return np.concatenate([np.zeros(1), np.cumsum(changes)])[: len(rows)] + there


def peak_host_bytes(plan: Plan, rows: Actions) -> int:
    """Return the peak bytes that a rank has offloaded."""
    return round(float(host_bytes(plan, rows).max(initial=0)))


def stage_peaks_in_flight(plan: Plan) -> tuple[int, ...]:
    """Return, by stage, the maximum number of micro-batches that wait on a rank for their backward.

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
    """Return the bytes that a rank holds between steps; optimizer state only if it updates."""
    costs = {role.stage: plan.stages[role.stage].cost for role in roles(plan, rank)}
    updated = {role.stage for role in roles(plan, rank) if role.kind is Kind.BACKWARD}
    return sum(
        cost.resident_bytes - (0 if stage in updated else cost.optimizer_bytes)
        for stage, cost in costs.items()
    )


def room_bytes(plan: Plan, rank: int, limit_bytes: float | None) -> int | None:
    """Return the bytes that a rank's copy of its state may take while a checkpoint is written.

    Ranks copy between two steps, when the process still holds the peak memory of a step, so the
    copy adds to the peak. Without room for it, the rank writes from the original memory. None if
    nothing limits the copy, or the peak is unknown.

    Args:
        limit_bytes: memory limit of this rank, which may be below that of the job.
    """
    if limit_bytes is None or limit_bytes == inf or plan.prediction is None:
        return None
    return max(0, int(limit_bytes) - plan.prediction.peak_memory_bytes[rank])


def copy_bytes(plan: Plan, rank: int, limit_bytes: float | None) -> int:
    """Return the bytes of a rank's copy of its state for a checkpoint; 0 if there is no room."""
    room, state = room_bytes(plan, rank, limit_bytes), resident_bytes(plan, rank)
    return state if room is None or state <= room else 0
