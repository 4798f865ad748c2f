"""How much memory a rank program holds, row by row; it follows from the order of rows alone.

From step to step: parameters, buffers and optimizer state; where steps are not flushed, also older
versions of the parameters that a backward still uses. From the first backward of a stage to
UPDATE: the gradients of its parameters; while they are summed over replicas, their copies on the
way, and what other replicas send. A micro-batch adds, from its forward to the end of its
backward, what the stage keeps: its saved bytes, or under recomputation its inputs, and the rest
from RECOMPUTE on; of a stage in blocks the inputs of all, and the rest of the last. They include
what the stage received and what it sends, since a backward needs both. While they are offloaded,
they take the host's memory instead. Between the halves of a split backward, a micro-batch keeps
what its weight half needs.

On top come buffers of messages: from RECEIVE_START to the end of the action that reads a value,
or of RECEIVE_WAIT for weights, which are then the stage's; and, unless the sender keeps the value
anyway, from the action that makes it to SEND_WAIT. Where forward and backward of a stage have ranks
of their own, what it keeps is such a message.

While an action runs, it holds more than it leaves behind: see :class:`pipectl.plan.StagePeaks`.
Where these are not known, an action is taken to hold no temporary values.
"""

from __future__ import annotations

import numpy as np

from pipectl.arrays import Floats
from pipectl.plan import Plan
from pipectl.schedule.actions import Kind, Program
from pipectl.schedule.live_bytes import Changes, kept_bytes
from pipectl.schedule.placement import roles, shares


def memory_bytes(plan: Plan, rank: int, program: Program) -> Floats:
    """The most bytes a rank's device holds while it executes each row of a program.

    Shape [rows of prologue, body, epilogue]; more bodies between them hold as much. The process
    itself (interpreter, torch, MPI) is not included.
    """
    changes = Changes(plan, rank, program.unrolled(1, plan.micro_batches))
    return resident_bytes(plan, rank) + _before(changes.born - changes.dead) + changes.during


def host_bytes(plan: Plan, program: Program) -> Floats:
    """Bytes that its rank has offloaded while it executes each row; shape [rows]."""
    rows = program.unrolled(1, plan.micro_batches)
    kind = rows.column("kind")
    if not (kind == Kind.OFFLOAD_START).any():
        return np.zeros(len(rows))
    moved = plan.derived(kept_bytes)[rows.column("stage")] * shares(plan, rows)
    there: Floats = moved * (kind == Kind.OFFLOAD_START)
    return _before(there - moved * (kind == Kind.FETCH_WAIT)) + there


def peak_memory_bytes(
    plan: Plan, rank: int, program: Program, *, process_baseline_bytes: int = 0
) -> int:
    """The most a rank's device holds at once, the process included."""
    resident = resident_bytes(plan, rank)
    peak = memory_bytes(plan, rank, program).max(initial=resident)
    return process_baseline_bytes + round(float(peak))


def peak_host_bytes(plan: Plan, program: Program) -> int:
    """The most its rank has offloaded at once."""
    return round(float(host_bytes(plan, program).max(initial=0)))


def peak_in_flight(program: Program, stage: int, saved: int | None = None) -> int:
    """The most micro-batches that wait at once on a rank for their backward of a stage.

    Args:
        saved: channel of saved values, where the forward has another rank.
    """
    rows = program.unrolled(1, 0)
    mine, kind = rows.column("stage") == stage, rows.column("kind")
    begun = mine & (kind == Kind.FORWARD)
    if saved is not None:
        begun = (rows.column("channel") == saved) & (kind == Kind.RECEIVE_START)
    ended = mine & ((kind == Kind.BACKWARD) | (kind == Kind.BACKWARD_WEIGHT))
    return int(np.cumsum(begun.astype(int) - ended).max(initial=0))


def resident_bytes(plan: Plan, rank: int) -> int:
    """What a rank holds from step to step; optimizer state only where it updates."""
    costs = {role.stage: plan.stages[role.stage].cost for role in roles(plan, rank)}
    updated = {role.stage for role in roles(plan, rank) if role.kind is Kind.BACKWARD}
    return sum(
        cost.resident_bytes - (0 if stage in updated else cost.optimizer_bytes)
        for stage, cost in costs.items()
    )


def _before(changes: Floats) -> Floats:
    """The sum of all earlier rows."""
    return np.concatenate([np.zeros(1), np.cumsum(changes)])[: len(changes)]
