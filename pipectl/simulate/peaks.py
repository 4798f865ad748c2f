"""The most memory every rank holds, for plans without replicas, recomputation and offload.

The same as :func:`pipectl.schedule.memory.peak_memory_bytes`, whose docstring says what is counted,
in one pass over the rows of all ranks. Compiled.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipectl.compiled import compiled
from pipectl.graph import TransferKind
from pipectl.plan import Plan
from pipectl.schedule.actions import Kind
from pipectl.schedule.channel import Channel
from pipectl.simulate.tables import (
    KIND,
    MEET,
    SIZE,
    STAGE,
    STREAM,
    Floats,
    Integers,
    Programs,
)

KNOWN = np.array(
    [
        Kind.FORWARD,
        Kind.BACKWARD,
        Kind.UPDATE,
        Kind.SEND_START,
        Kind.SEND_WAIT,
        Kind.RECEIVE_START,
        Kind.RECEIVE_WAIT,
        MEET,
    ]
)
"""Kinds that programs may hold."""

COMPUTES, BACKWARD, UPDATE, RECEIVE, SENT, OTHER = range(6)
"""What a row does to memory."""

ROLES = np.full(MEET + 1, OTHER, dtype=np.int64)
ROLES[[Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE]] = COMPUTES, BACKWARD, UPDATE
ROLES[[Kind.RECEIVE_START, Kind.SEND_WAIT]] = RECEIVE, SENT


class Amounts(NamedTuple):
    """Bytes by which rows change what is held.

    Args:
        role: by kind.
        born, dead: by kind and stage, of full micro-batches.
        received, sent: by stream, of full micro-batches.
        gradient: by stage, from its first backward to UPDATE.
        most: by kind and stage, the most a row allocates; below 0 where it is not known.
        most_first: the same of a stage's first backward.
        resident, most_update: by rank.
    """

    role: Integers
    born: Floats
    dead: Floats
    received: Floats
    sent: Floats
    gradient: Floats
    most: Floats
    most_first: Floats
    resident: Floats
    most_update: Floats


@compiled
def peak_bytes(programs: Programs, share: Floats, amounts: Amounts) -> Floats:
    """The most each rank holds; shape [ranks]."""
    peaks = amounts.resident.copy()
    seen = np.full(len(amounts.gradient), -1, dtype=np.int64)
    for rank in range(len(peaks)):
        held, gradients = amounts.resident[rank], 0.0
        for position in range(programs.first[rank], programs.end[rank]):
            kind = programs.rows[position, KIND]
            role = amounts.role[kind]
            part = share[programs.rows[position, SIZE]]
            born, dead, most = 0.0, 0.0, -1.0
            if role <= BACKWARD:
                stage = programs.stages[programs.stage_base[rank] + programs.rows[position, STAGE]]
                born = amounts.born[kind, stage] * part
                dead = amounts.dead[kind, stage] * part
                most = amounts.most[kind, stage]
                if role == BACKWARD and seen[stage] != rank:
                    seen[stage] = rank
                    born += amounts.gradient[stage]
                    gradients += amounts.gradient[stage]
                    most = amounts.most_first[stage]
            elif role == UPDATE:
                most = amounts.most_update[rank]
                dead = gradients
            elif role != OTHER:
                stream = programs.streams[
                    programs.stream_base[rank] + programs.rows[position, STREAM]
                ]
                if role == RECEIVE:
                    born = amounts.received[stream] * part
                else:
                    dead = amounts.sent[stream] * part
            peaks[rank] = max(peaks[rank], held + (most if most >= 0 else born))
            held += born - dead
    return peaks


def knows(plan: Plan, programs: Programs) -> bool:
    """Whether the memory of these programs follows from the tables here."""
    plain = not any(
        stage.recompute or stage.offload or stage.replicas > 1 or stage.backward_ranks
        for stage in plan.stages
    )
    kinds = np.bincount(programs.rows[:, KIND], minlength=MEET + 1)
    return plain and int(kinds.sum() - kinds[KNOWN].sum()) == 0


def amounts_of(plan: Plan, connections: tuple[Channel, ...]) -> Amounts:
    """The tables of a plan."""
    stages, streams = len(plan.stages), len(connections)
    born, dead = np.zeros((MEET + 1, stages)), np.zeros((MEET + 1, stages))
    most, most_first = np.full((MEET + 1, stages), -1.0), np.full(stages, -1.0)
    received, sent = np.zeros(streams), np.zeros(streams)
    resident, most_update = np.zeros(plan.ranks), np.zeros(plan.ranks)
    for index, stage in enumerate(plan.stages):
        cost, rank = stage.cost, stage.ranks[0]
        born[Kind.FORWARD, index] = dead[Kind.BACKWARD, index] = cost.saved_bytes
        resident[rank] += cost.resident_bytes
        if cost.peaks is not None:
            most[Kind.FORWARD, index] = cost.peaks.forward_bytes
            most[Kind.BACKWARD, index] = cost.peaks.backward_bytes
            most_first[index] = cost.peaks.first_backward_bytes
            most_update[rank] += cost.peaks.update_bytes
    for stream, channel in enumerate(connections):
        received[stream] = channel.size_bytes
        if channel.kind is TransferKind.GRADIENT:
            sent[stream] = channel.size_bytes
            born[Kind.BACKWARD, channel.source_stage] += channel.size_bytes
            dead[Kind.BACKWARD, channel.target_stage] += channel.size_bytes
        elif not channel.is_local:
            dead[Kind.FORWARD, channel.target_stage] += channel.size_bytes
    gradient = np.array([stage.cost.accumulated_bytes for stage in plan.stages], dtype=np.float64)
    return Amounts(
        ROLES, born, dead, received, sent, gradient, most, most_first, resident, most_update
    )
