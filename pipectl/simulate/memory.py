"""Memory of ranks: between steps, while they execute their programs, and on their hosts.

- Between steps: parameters, buffers and optimizer state; if steps are not flushed, also older
  versions of the parameters that a backward still uses.
- During a step: casts of parameters to half precision, one of each version of the parameters.
- From the first backward of a stage to UPDATE: the gradients of its parameters; while they are
  summed over replicas, also the copies to send and what other replicas send. If the training is
  reproducible, several sums of them, beside the gradients that each backward allocates.
- Per micro-batch, from its forward to the end of its backward: what the stage keeps. This is its
  saved bytes; with recomputation its inputs, and the rest from RECOMPUTE on; by segments
  the inputs of all, and the rest of the last one. It includes what the stage receives and sends,
  because a backward needs both. While offloaded, it takes host memory instead. Between the halves
  of a split backward, it is what the weight half needs.
- Buffers of messages: on the receiver from RECEIVE_START to the end of the action that reads the
  value, or to RECEIVE_WAIT for weights, which then belong to the stage; on the sender, unless it
  keeps the value anyway, from the action that computes it to SEND_WAIT. If the forward and the
  backward of a stage run on different ranks, what the stage keeps is such a message. A gradient
  between two stages of one rank lasts from one backward to the other.
- During an action: its temporary values (:class:`pipectl.plan.StagePeaks`); none if unknown.

An evaluation runs between steps: on top of what ranks hold then come the casts, and the values of
one micro-batch of its own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers, Records, record
from pipectl.compiled import compiled
from pipectl.lanes import TransferKind
from pipectl.plan import Plan, Replication
from pipectl.schedule.actions import Actions, Kind
from pipectl.schedule.channel import (
    channels,
    is_kept,
    roles,
    roots_sent,
    shares,
    sums_held,
)
from pipectl.schedule.lowering import lower
from pipectl.schedule.registry import is_unflushed
from pipectl.simulate.tables import (
    KIND,
    MEET,
    MICRO_BATCH,
    SIZE,
    STAGE,
    STREAM,
    Programs,
)

BY_STAGE, FORWARD, BACKWARD, UPDATE, RECEIVE, RECEIVED, SEND, SENT, OTHER = range(9)
"""Effect of a row on memory."""
ROLES = np.full(MEET + 1, OTHER, dtype=np.int64)
ROLES[[Kind.RECOMPUTE, Kind.OFFLOAD_WAIT, Kind.FETCH_START, Kind.BACKWARD_WEIGHT]] = BY_STAGE
ROLES[[Kind.REDUCE_START, Kind.REDUCE_WAIT]] = BY_STAGE
ROLES[[Kind.FORWARD, Kind.EVALUATE]] = FORWARD
ROLES[[Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.UPDATE]] = BACKWARD, BACKWARD, UPDATE
ROLES[[Kind.RECEIVE_START, Kind.RECEIVE_WAIT]] = RECEIVE, RECEIVED
ROLES[[Kind.SEND_START, Kind.SEND_WAIT]] = SEND, SENT
_BLOCKS_BESIDE_GRADIENT = 2
"""Measured with zb-h1 on GPTs with 98 to 32,768 words: 1 to 3."""
_BACKWARDS = [Kind.BACKWARD, Kind.BACKWARD_INPUT]


EFFECT = record("", "born dead most most_first")
"""Effect of a row of a kind and stage, for a full micro-batch: bytes that it adds and frees, and
peak bytes that it allocates, also as the first backward of the stage; below 0 if unknown."""
OF_STAGE = record("seen", "gradient update")
"""Of each stage: the last step with a backward so far, bytes from its first backward to UPDATE, and
peak bytes of an update."""
OF_STREAM = record("activation", "received sent weights")
"""Of each stream: whether it carries activations, bytes of full micro-batches (as sent, 0 if kept
anyway), and bytes of messages of weights."""
MOVING = record("", "arrived leaving")
"""Of each stage and micro-batch of a rank: bytes of activations received, and sent but not kept."""


class Amounts(NamedTuple):
    """Bytes by which rows change memory.

    Args:
        role: by kind.
        effects: by kind and stage.
        resident, casts: by rank.
        versions: bytes of parameter versions added and freed by row; empty if steps are flushed.
    """

    role: Integers
    effects: Records
    stages: Records
    streams: Records
    resident: Floats
    casts: Floats
    versions: Floats


def peak_bytes(programs: Programs, amounts: Amounts) -> Floats:
    """Return the peak bytes of each rank; shape [ranks]."""
    peaks, largest = amounts.resident.copy(), programs.rows.max(axis=0, initial=0)
    moving = np.zeros((largest[STAGE] + 1, largest[MICRO_BATCH] + 2), dtype=MOVING)
    amounts.stages["seen"] = -1
    _execute(programs, amounts, moving, peaks)
    return peaks


@compiled
def _execute(programs: Programs, amounts: Amounts, moving: Records, peaks: Floats) -> None:
    """Fill in the peaks.

    Args:
        moving: zeros.
        peaks: bytes that ranks hold between steps.
    """
    step = 0
    for number in range(len(peaks)):
        rank = programs.ranks[number]
        _note_leaving(programs, amounts, rank, moving)
        held, gradients, updating = amounts.resident[number] + amounts.casts[number], 0.0, 0.0
        step += 1
        for position in range(rank.first, rank.end):
            row = programs.rows[position]
            kind, part = row[KIND], programs.share[row[SIZE]]
            role = amounts.role[kind]
            born, dead, most = 0.0, 0.0, -1.0
            if role <= BACKWARD:
                place = programs.names[rank.stages + row[STAGE]]
                stage, effect = amounts.stages[place], amounts.effects[kind, place]
                born, dead, most = effect.born * part, effect.dead * part, effect.most
                if role == FORWARD:
                    crossing = moving[row[STAGE], row[MICRO_BATCH]]
                    born, dead = born + crossing.leaving, dead + crossing.arrived
                    crossing.leaving, crossing.arrived = 0.0, 0.0
                elif role == BACKWARD and stage.seen != step:
                    stage.seen = step
                    born += stage.gradient
                    gradients += stage.gradient
                    updating += stage.update
                    most = effect.most_first
            elif role == UPDATE:
                most, dead = updating, gradients
                step, gradients, updating = step + 1, 0.0, 0.0
            elif role != OTHER:
                stream = amounts.streams[programs.names[rank.streams + row[STREAM]]]
                born = stream.received * part * (role == RECEIVE)
                dead = stream.weights * (role == RECEIVED) + stream.sent * part * (role == SENT)
                if role == RECEIVE and stream.activation:
                    moving[row[STAGE], row[MICRO_BATCH]].arrived += born
            if len(amounts.versions):
                born += amounts.versions[position, 0]
                dead += amounts.versions[position, 1]
            # The known peak of a row; UPDATE also adds versions of the parameters.
            at_once = born if most < 0 else most + born * (role == UPDATE)
            peaks[number] = max(peaks[number], held + at_once)
            held += born - dead


@compiled
def _note_leaving(programs: Programs, amounts: Amounts, rank: Any, moving: Records) -> None:
    """Record the activations that a rank sends and does not keep, by stage and micro-batch."""
    for position in range(rank.first, rank.end):
        row = programs.rows[position]
        if amounts.role[row[KIND]] == SEND:
            stream = amounts.streams[programs.names[rank.streams + row[STREAM]]]
            if stream.activation:
                moving[row[STAGE], row[MICRO_BATCH]].leaving += (
                    stream.sent * programs.share[row[SIZE]]
                )


def amounts_of(plan: Plan, actions: Sequence[Actions] = ()) -> Amounts:
    """Return the tables of a plan.

    Args:
        actions: those that every rank executes, if steps overlap.
    """
    effects = np.zeros((MEET + 1, len(plan.stages)), dtype=EFFECT)
    effects["most"] = effects["most_first"] = -1.0
    born, dead, most = effects["born"], effects["dead"], effects["most"]
    stages = np.zeros(len(plan.stages), dtype=OF_STAGE)
    for index, stage in enumerate(plan.stages):
        kept, cost, peaks = stage.kept_bytes, stage.running, stage.running.peaks
        summing = stage.reduction_bytes(roots_sent(plan, index))
        stages[index]["gradient"] = stage.cost.accumulated_bytes * sums_held(plan, index)
        born[[Kind.FORWARD, Kind.FETCH_START], index] = kept
        born[Kind.RECOMPUTE, index] = cost.saved_bytes - kept
        dead[Kind.OFFLOAD_WAIT, index] = kept
        dead[Kind.BACKWARD, index] = cost.saved_bytes
        born[Kind.BACKWARD_INPUT, index] = cost.grown_bytes
        dead[Kind.BACKWARD_INPUT, index] = cost.freed_bytes
        dead[Kind.BACKWARD_WEIGHT, index] = cost.between_bytes
        born[Kind.REDUCE_START, index] = dead[Kind.REDUCE_WAIT, index] = summing
        if peaks is None:
            continue
        # An input half holds what a whole backward holds, and what it leaves; a weight half adds to
        # existing gradients, one operator at a time.
        half, weight = stage.input_half_bytes, stage.cost.accumulated_bytes
        most[Kind.FORWARD, index] = peaks.forward_bytes
        most[Kind.RECOMPUTE, index] = stage.recompute_peak_bytes
        first = peaks.first_backward_bytes
        again = first if plan.reproducible else peaks.backward_bytes
        most[_BACKWARDS, index] = again, again + half
        most[Kind.BACKWARD_WEIGHT, index] = min(again, weight)
        effects["most_first"][_BACKWARDS, index] = first, first + half
        # An update begins without the casts, unless backwards of older parameters are to come.
        without = 0 if is_unflushed(plan) else stage.cost.cast_bytes
        stages[index]["update"] = max(0, peaks.update_bytes - without)
    sent = channels(plan)
    streams = np.zeros(len(sent), dtype=OF_STREAM)
    for stream, channel in zip(streams, sent, strict=True):
        stream["received"] = channel.size_bytes
        stream["activation"] = channel.kind is TransferKind.ACTIVATION
        if channel.kind is TransferKind.WEIGHT:
            stream["weights"] = channel.size_bytes
        elif not is_kept(plan, channel):
            stream["sent"] = channel.size_bytes
    gradients = (each for each in sent if each.kind is TransferKind.GRADIENT)
    # All replicas of two stages together send every micro-batch once.
    for channel in {(each.source_stage, each.target_stage): each for each in gradients}.values():
        born[_BACKWARDS, channel.source_stage] += channel.size_bytes
        dead[_BACKWARDS, channel.target_stage] += channel.size_bytes
    return Amounts(
        role=ROLES,
        effects=effects,
        stages=stages,
        streams=streams,
        resident=np.array([float(resident_bytes(plan, rank)) for rank in range(plan.ranks)]),
        casts=np.array([float(_cast_bytes(plan, rank)) for rank in range(plan.ranks)]),
        versions=_versions(plan, actions) if is_unflushed(plan) else np.zeros((0, 2)),
    )


def _versions(plan: Plan, actions: Sequence[Actions]) -> Floats:
    """Return the bytes of older parameter versions: added by the UPDATE that replaces
    them, freed by the last backward that uses them; shape [rows of all programs, 2]."""
    versions = [np.zeros((len(rows), 2)) for rows in actions]
    for rows, changes in zip(actions, versions, strict=True):
        updates = np.flatnonzero(rows.column("kind") == Kind.UPDATE)
        backward = np.flatnonzero(rows.column("kind") == Kind.BACKWARD)
        made = np.searchsorted(updates, backward) - rows.column("weight_version")[backward]
        for version, row in dict(zip(made.tolist(), backward.tolist(), strict=True)).items():
            if version < len(updates) and row > updates[version]:
                cost = plan.stages[rows.column("stage")[row]].cost
                size = cost.changed_bytes + cost.cast_bytes
                changes[updates[version], 0] += size
                changes[row, 1] += size
    return np.concatenate(versions)


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


def unused_bytes(plan: Plan, allocated: Floats, heap_share: float) -> Floats:
    """Return the bytes that the C library of each rank keeps and does not use; shape [ranks].

    Of equal blocks side by side, one that is freed is too small for the next, since torch asks for
    aligned memory. So what a forward drops beside what it keeps is of no use until the backward:
    once for every micro-batch that waits. If this is more than the usual share, as with the logits
    of many words, it counts instead. Between the halves of split backwards, the largest gradient
    waits while other micro-batches come and go; memory of its size on either side is then free and
    of no use.

    Args:
        allocated: what a step allocates; shape [ranks].
        heap_share: the part of this that is not used in any case.
    """
    blocks, left = np.zeros(plan.ranks), np.zeros(plan.ranks)
    for stage, ahead in zip(plan.stages, plan.warm_up, strict=True):
        peaks, in_turn = stage.running.peaks, plan.replication is Replication.WHOLE
        waiting = ceil(min(ahead, plan.micro_batches) / (stage.replicas if in_turn else 1))
        if stage.recompute or stage.offload:
            waiting = 1
        for rank in stage.ranks:
            blocks[rank] = max(blocks[rank], stage.cost.deferred_block_bytes or 0)
            left[rank] += waiting * peaks.left_bytes if peaks is not None else 0
    unused: Floats = np.maximum(heap_share * allocated, left) + _BLOCKS_BESIDE_GRADIENT * blocks
    return unused


def evaluation_peaks(plan: Plan, heap_share: float) -> Floats:
    """Return the peak bytes of each rank in an evaluation, 0 if it takes no part; shape [ranks].

    Only the first replica of a stage takes part.

    Args:
        heap_share: the part of what it allocates that the C library keeps and does not use.
    """
    allocated = np.zeros(plan.ranks)
    for stage in plan.stages:
        if stage.cost.peaks is not None:
            rank = stage.ranks[0]
            allocated[rank] = max(allocated[rank], stage.cost.peaks.evaluation_bytes)
    return np.array(
        [
            resident_bytes(plan, rank) + _cast_bytes(plan, rank) + (1 + heap_share) * own
            if own
            else 0
            for rank, own in enumerate(allocated.tolist())
        ]
    )


def resident_bytes(plan: Plan, rank: int) -> int:
    """Return the bytes that a rank holds between steps; optimizer state only if it updates."""
    costs = {role.stage: plan.stages[role.stage].cost for role in roles(plan, rank)}
    updated = {role.stage for role in roles(plan, rank) if role.kind is Kind.BACKWARD}
    return sum(
        cost.resident_bytes - (0 if stage in updated else cost.optimizer_bytes)
        for stage, cost in costs.items()
    )


def _cast_bytes(plan: Plan, rank: int) -> int:
    stages = {role.stage for role in roles(plan, rank)}
    return sum(plan.stages[stage].cost.cast_bytes for stage in stages)


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
