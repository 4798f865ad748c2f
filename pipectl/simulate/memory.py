"""How much memory ranks hold while they execute their programs; it follows from the order of rows.

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
of their own, what it keeps is such a message. A gradient between two stages of a rank lasts from
one backward to the other.

While an action runs, it holds more than it leaves behind: see :class:`pipectl.plan.StagePeaks`.
Where these are not known, an action is taken to hold no temporary values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled_in_place, part_of_kernel
from pipectl.graph import TransferKind
from pipectl.plan import Plan
from pipectl.schedule.actions import Actions, Kind, Program
from pipectl.schedule.channel import Channel, is_kept
from pipectl.schedule.memory import resident_bytes
from pipectl.schedule.registry import is_unflushed
from pipectl.simulate.network import Numbering
from pipectl.simulate.rows import Part, flatten, rows_of, with_sizes
from pipectl.simulate.tables import KIND, MEET, MICRO_BATCH, SIZE, STAGE, STREAM, Programs
from pipectl.simulate.tables import shares as shares_of_sizes

BY_STAGE, FORWARD, BACKWARD, UPDATE, RECEIVE, RECEIVED, SEND, SENT, OTHER = range(9)
"""What a row does to memory."""
ROLES = np.full(MEET + 1, OTHER, dtype=np.int64)
ROLES[[Kind.RECOMPUTE, Kind.OFFLOAD_WAIT, Kind.FETCH_START, Kind.BACKWARD_WEIGHT]] = BY_STAGE
ROLES[[Kind.REDUCE_START, Kind.REDUCE_WAIT]] = BY_STAGE
ROLES[[Kind.FORWARD, Kind.EVALUATE]] = FORWARD
ROLES[[Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.UPDATE]] = BACKWARD, BACKWARD, UPDATE
ROLES[[Kind.RECEIVE_START, Kind.RECEIVE_WAIT]] = RECEIVE, RECEIVED
ROLES[[Kind.SEND_START, Kind.SEND_WAIT]] = SEND, SENT
_BACKWARDS = [Kind.BACKWARD, Kind.BACKWARD_INPUT]


class Amounts(NamedTuple):
    """Bytes by which rows change what is held.

    Args:
        role: by kind.
        born, dead: by kind and stage, of full micro-batches.
        received, sent: by stream, of full micro-batches; what is sent and kept anyway is 0.
        weights: by stream, of messages of weights.
        activation: by stream, whether it carries activations.
        gradient: by stage, from its first backward to UPDATE.
        most: by kind and stage, the most a row allocates; below 0 where it is not known.
        most_first: the same of the stage's first.
        resident: by rank.
        most_update: the most an update allocates, by stage.
        versions: of parameters, born and dead by row; no rows where steps are flushed.
    """

    role: Integers
    born: Floats
    dead: Floats
    received: Floats
    sent: Floats
    weights: Floats
    activation: Integers
    gradient: Floats
    most: Floats
    most_first: Floats
    resident: Floats
    most_update: Floats
    versions: Floats


def peak_bytes(programs: Programs, share: Floats, amounts: Amounts) -> Floats:
    """The most each rank holds; shape [ranks]."""
    peaks, _ = _executed(programs, share, amounts)
    return peaks


def _executed(programs: Programs, share: Floats, amounts: Amounts) -> tuple[Floats, Floats]:
    """The most each rank holds, and what the last one holds in each of its rows."""
    peaks = amounts.resident.copy()
    levels = np.zeros(int((programs.end - programs.first).max()))
    seen = np.full(len(amounts.gradient), -1, dtype=np.int64)
    most = programs.rows.max(axis=0, initial=0)
    moving = np.zeros((2, most[STAGE] + 1, most[MICRO_BATCH] + 2))
    _execute(programs, share, amounts, seen, moving, peaks, levels)
    return peaks, levels


ARRIVED, LEAVING = range(2)
"""Activations that are not kept, by what reads and what makes them."""


@compiled_in_place
def _execute(
    programs: Programs,
    share: Floats,
    amounts: Amounts,
    seen: Integers,
    moving: Floats,
    peaks: Floats,
    levels: Floats,
) -> None:
    """Fill in the peaks.

    Args:
        seen: room for the last step of every stage, below 0.
        moving: zeros; activations by stage and micro-batch.
        peaks: what ranks hold from step to step.
        levels: room for every row of a rank; filled with what the last one holds in each.
    """
    arrived, leaving = moving[ARRIVED], moving[LEAVING]
    step = 0
    for rank in range(len(peaks)):
        first, end = programs.first[rank], programs.end[rank]
        _note_leaving(programs, share, amounts, rank, leaving)
        held, gradients, updating = amounts.resident[rank], 0.0, 0.0
        step += 1
        for position in range(first, end):
            row = programs.rows[position]
            kind, part = row[KIND], share[row[SIZE]]
            role = amounts.role[kind]
            born, dead, most = 0.0, 0.0, -1.0
            if role <= BACKWARD:
                stage = programs.stages[programs.stage_base[rank] + row[STAGE]]
                born, dead = amounts.born[kind, stage] * part, amounts.dead[kind, stage] * part
                most = amounts.most[kind, stage]
                if role == FORWARD:
                    born += leaving[row[STAGE], row[MICRO_BATCH]]
                    dead += arrived[row[STAGE], row[MICRO_BATCH]]
                    leaving[row[STAGE], row[MICRO_BATCH]] = 0.0
                    arrived[row[STAGE], row[MICRO_BATCH]] = 0.0
                elif role == BACKWARD and seen[stage] != step:
                    seen[stage] = step
                    born += amounts.gradient[stage]
                    gradients += amounts.gradient[stage]
                    updating += amounts.most_update[stage]
                    most = amounts.most_first[kind, stage]
            elif role == UPDATE:
                most, dead = updating, gradients
                step, gradients, updating = step + 1, 0.0, 0.0
            elif role != OTHER:
                stream = programs.streams[programs.stream_base[rank] + row[STREAM]]
                born, dead = _message_bytes(amounts, role, stream, part)
                if role == RECEIVE:
                    arrived[row[STAGE], row[MICRO_BATCH]] += born * amounts.activation[stream]
            if len(amounts.versions):
                born += amounts.versions[position, 0]
                dead += amounts.versions[position, 1]
            level = held + _in_row(most, born, role == UPDATE)
            peaks[rank] = max(peaks[rank], level)
            levels[position - first] = level
            held += born - dead


@part_of_kernel
def _in_row(most: float, born: float, updates: bool) -> float:
    """What a row allocates at once: what is known of it, and versions of the parameters."""
    if most < 0:
        return born
    return most + born * updates


@part_of_kernel
def _note_leaving(
    programs: Programs, share: Floats, amounts: Amounts, rank: int, leaving: Floats
) -> None:
    """Note the activations that a rank sends and does not keep, by stage and micro-batch."""
    for position in range(programs.first[rank], programs.end[rank]):
        row = programs.rows[position]
        if amounts.role[row[KIND]] == SEND:
            stream = programs.streams[programs.stream_base[rank] + row[STREAM]]
            if amounts.activation[stream]:
                sent = amounts.sent[stream] * share[row[SIZE]]
                leaving[row[STAGE], row[MICRO_BATCH]] += sent


@part_of_kernel
def _message_bytes(amounts: Amounts, role: int, stream: int, part: float) -> tuple[float, float]:
    """What the row of a message adds to what is held, and what it frees."""
    born, dead = 0.0, 0.0
    if role == RECEIVE:
        born = amounts.received[stream] * part
    elif role == RECEIVED:
        dead = amounts.weights[stream]
    elif role == SENT:
        dead = amounts.sent[stream] * part
    return born, dead


def memory_bytes(plan: Plan, rank: int, program: Program) -> Floats:
    """The most bytes a rank's device holds while it executes each row of a program.

    Shape [rows of prologue, body, epilogue]; more bodies between them hold as much. The process
    itself (interpreter, torch, MPI) is not included.
    """
    numbering = Numbering(plan)
    actions = program.unrolled(1, plan.micro_batches)
    rows = rows_of(plan, numbering, rank, with_sizes(plan, actions))
    rows = rows[rows[:, KIND] != MEET]
    part = Part(0, rows, range(len(plan.stages)), range(numbering.streams))
    amounts = amounts_of(plan, numbering.connections, [actions])
    resident = np.array([float(resident_bytes(plan, rank))])
    if not len(rows):
        return np.zeros(0)
    amounts = amounts._replace(resident=resident)
    return _executed(flatten([part]), shares_of_sizes(plan), amounts)[1]


def amounts_of(
    plan: Plan, connections: Sequence[Channel], programs: Sequence[Actions] = ()
) -> Amounts:
    """The tables of a plan.

    Args:
        programs: the rows that are executed, if steps overlap.
    """
    stages, streams = len(plan.stages), len(connections)
    born, dead = np.zeros((MEET + 1, stages)), np.zeros((MEET + 1, stages))
    most, most_first = (np.full((MEET + 1, stages), -1.0) for _ in range(2))
    most_update = np.zeros(stages)
    for index, stage in enumerate(plan.stages):
        kept, cost, peaks = stage.kept_bytes, stage.running, stage.running.peaks
        born[[Kind.FORWARD, Kind.FETCH_START], index] = kept
        born[Kind.RECOMPUTE, index] = cost.saved_bytes - kept
        dead[Kind.OFFLOAD_WAIT, index] = kept
        dead[Kind.BACKWARD, index] = cost.saved_bytes
        born[Kind.BACKWARD_INPUT, index] = cost.grown_bytes
        dead[Kind.BACKWARD_INPUT, index] = cost.freed_bytes
        dead[Kind.BACKWARD_WEIGHT, index] = cost.between_bytes
        born[Kind.REDUCE_START, index] = dead[Kind.REDUCE_WAIT, index] = stage.reduction_bytes
        if peaks is None:
            continue
        # An input half holds what a whole backward does, and what it leaves; a weight half adds to
        # gradients that are there, one operator's at a time.
        half, weight = stage.input_half_bytes, stage.cost.accumulated_bytes
        most[Kind.FORWARD, index] = peaks.forward_bytes
        most[Kind.RECOMPUTE, index] = stage.recompute_peak_bytes
        most[_BACKWARDS, index] = peaks.backward_bytes, peaks.backward_bytes + half
        most[Kind.BACKWARD_WEIGHT, index] = min(peaks.backward_bytes, weight)
        first = peaks.first_backward_bytes
        most_first[_BACKWARDS, index] = first, first + half
        most_update[index] = peaks.update_bytes
    received, sent, weights = np.zeros((3, streams))
    activation = np.zeros(streams, dtype=np.int64)
    for stream, channel in enumerate(connections):
        received[stream] = channel.size_bytes
        activation[stream] = channel.kind is TransferKind.ACTIVATION
        if channel.kind is TransferKind.WEIGHT:
            weights[stream] = channel.size_bytes
        elif not is_kept(plan, channel):
            sent[stream] = channel.size_bytes
    gradients = (each for each in connections if each.kind is TransferKind.GRADIENT)
    # Between replicas of two stages, every micro-batch goes once in all.
    for channel in {(each.source_stage, each.target_stage): each for each in gradients}.values():
        born[_BACKWARDS, channel.source_stage] += channel.size_bytes
        dead[_BACKWARDS, channel.target_stage] += channel.size_bytes
    return Amounts(
        role=ROLES,
        born=born,
        dead=dead,
        received=received,
        sent=sent,
        weights=weights,
        activation=activation,
        gradient=np.array([float(stage.cost.accumulated_bytes) for stage in plan.stages]),
        most=most,
        most_first=most_first,
        resident=np.array([float(resident_bytes(plan, rank)) for rank in range(plan.ranks)]),
        most_update=most_update,
        versions=_versions(plan, programs) if is_unflushed(plan) else np.zeros((0, 2)),
    )


def _versions(plan: Plan, programs: Sequence[Actions]) -> Floats:
    """Versions of parameters beside the newest: from the UPDATE that outdates them to the last
    backward that uses them; shape [rows of all programs, 2]."""
    found = [np.zeros((len(rows), 2)) for rows in programs]
    for rows, changes in zip(programs, found, strict=True):
        updates = np.flatnonzero(rows.column("kind") == Kind.UPDATE)
        backward = np.flatnonzero(rows.column("kind") == Kind.BACKWARD)
        made = np.searchsorted(updates, backward) - rows.column("weight_version")[backward]
        for version, row in dict(zip(made.tolist(), backward.tolist(), strict=True)).items():
            if version < len(updates) and row > updates[version]:
                size = plan.stages[rows.column("stage")[row]].cost.parameter_bytes
                changes[updates[version], 0] += size
                changes[row, 1] += size
    return np.concatenate(found)
