"""The most memory every rank holds, for most plans.

The same as :func:`pipectl.schedule.memory.peak_memory_bytes`, whose docstring says what is counted,
in one compiled pass over the rows of all ranks. It takes what a computation reads to be as large as
what it makes: so it holds where each stage has its forward and backward on the same ranks, and
where stages with replicas share no ranks with others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Floats, Integers
from pipectl.compiled import compiled
from pipectl.graph import TransferKind
from pipectl.plan import Plan
from pipectl.schedule.actions import Kind
from pipectl.schedule.channel import Channel, is_kept
from pipectl.schedule.memory import halves_peaks
from pipectl.schedule.registry import is_unflushed
from pipectl.simulate.tables import KIND, MEET, SIZE, STAGE, STREAM, Programs

UNKNOWN = [Kind.EVALUATE]
"""Kinds that programs may not hold."""

BY_STAGE, BACKWARD, UPDATE, RECEIVE, SENT, OTHER = range(6)
"""What a row does to memory."""

ROLES = np.full(MEET + 1, OTHER, dtype=np.int64)
ROLES[[Kind.FORWARD, Kind.RECOMPUTE, Kind.OFFLOAD_WAIT, Kind.FETCH_START]] = BY_STAGE
ROLES[[Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.UPDATE]] = BACKWARD, BACKWARD, UPDATE
ROLES[[Kind.BACKWARD_WEIGHT, Kind.REDUCE_START, Kind.REDUCE_WAIT]] = BY_STAGE
ROLES[[Kind.RECEIVE_START, Kind.SEND_WAIT]] = RECEIVE, SENT


class Amounts(NamedTuple):
    """Bytes by which rows change what is held.

    Args:
        role: by kind.
        born, dead: by kind and stage, of full micro-batches.
        received, sent: by stream, of full micro-batches.
        gradient: by stage, from its first backward to UPDATE.
        most: by kind and stage, the most a row allocates; below 0 where it is not known.
        most_first: the same of the stage's first.
        most_update: the same of a stage's update.
        resident: by rank.
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
        held, gradients, updating = amounts.resident[rank], 0.0, 0.0
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
                    updating += amounts.most_update[stage]
                    most = amounts.most_first[kind, stage]
            elif role == UPDATE:
                most = updating
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


def knows(plan: Plan, connections: Sequence[Channel], programs: Programs) -> bool:
    """Whether the memory of these programs follows from the tables here."""
    kinds = np.bincount(programs.rows[:, KIND], minlength=MEET + 1)
    if (
        is_unflushed(plan)
        or kinds[UNKNOWN].any()
        or any(stage.backward_ranks for stage in plan.stages)
    ):
        return False
    has_replicas = any(stage.replicas > 1 for stage in plan.stages)
    return not (has_replicas and any(channel.is_local for channel in connections))


def amounts_of(plan: Plan, connections: Sequence[Channel]) -> Amounts:
    """The tables of a plan."""
    stages, streams = len(plan.stages), len(connections)
    born, dead = np.zeros((MEET + 1, stages)), np.zeros((MEET + 1, stages))
    received, sent = np.zeros(streams), np.zeros(streams)
    for index, stage in enumerate(plan.stages):
        kept, cost = stage.kept_bytes, stage.running
        born[[Kind.FORWARD, Kind.FETCH_START], index] = kept
        born[Kind.RECOMPUTE, index] = cost.saved_bytes - kept
        dead[Kind.OFFLOAD_WAIT, index] = kept
        dead[Kind.BACKWARD, index] = cost.saved_bytes
        born[Kind.BACKWARD_INPUT, index] = cost.grown_bytes
        dead[Kind.BACKWARD_INPUT, index] = cost.freed_bytes
        dead[Kind.BACKWARD_WEIGHT, index] = cost.between_bytes
        born[Kind.REDUCE_START, index] = dead[Kind.REDUCE_WAIT, index] = stage.reduction_bytes
    for stream, channel in enumerate(connections):
        received[stream] = channel.size_bytes
        if _is_buffer(plan, channel):
            sent[stream] = channel.size_bytes
    for channel in _one_a_pair_of_stages(connections):
        users = _USERS[channel.kind]
        if _is_buffer(plan, channel):
            born[users, channel.source_stage] += channel.size_bytes
        if channel.kind is TransferKind.GRADIENT or not channel.is_local:
            dead[users, channel.target_stage] += channel.size_bytes
    return Amounts(ROLES, born, dead, received, sent, *_of_stages(plan))


_USERS = {
    TransferKind.ACTIVATION: [Kind.FORWARD],
    TransferKind.GRADIENT: [Kind.BACKWARD, Kind.BACKWARD_INPUT],
}
"""What makes a message, and what reads it."""


def _of_stages(plan: Plan) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """The tables that follow from single stages."""
    stages = len(plan.stages)
    most, most_first = (np.full((MEET + 1, stages), -1.0) for _ in range(2))
    most_update, resident = np.zeros(stages), np.zeros(plan.ranks)
    for index, stage in enumerate(plan.stages):
        ranks, peaks = list(stage.ranks), stage.running.peaks
        resident[ranks] += stage.cost.resident_bytes
        if peaks is not None:
            most[Kind.FORWARD, index] = peaks.forward_bytes
            most[Kind.RECOMPUTE, index] = stage.recompute_peak_bytes
            most[Kind.BACKWARD, index] = peaks.backward_bytes
            for half, at_most in halves_peaks(stage, peaks):
                most[half, index] = at_most
            most_first[Kind.BACKWARD, index] = peaks.first_backward_bytes
            most_first[Kind.BACKWARD_INPUT, index] = (
                peaks.first_backward_bytes + stage.input_half_bytes
            )
            most_update[index] = peaks.update_bytes
    gradient = np.array([stage.cost.accumulated_bytes for stage in plan.stages], dtype=np.float64)
    return gradient, most, most_first, resident, most_update


def _is_buffer(plan: Plan, channel: Channel) -> bool:
    """Whether it is sent, or left on the rank, in memory that the sender keeps for nothing else."""
    if channel.kind is TransferKind.GRADIENT:
        return True
    return not (channel.is_local or is_kept(plan, channel))


def _one_a_pair_of_stages(connections: Sequence[Channel]) -> Iterable[Channel]:
    """Between replicas of two stages, every micro-batch goes once in all."""
    return {(c.kind, c.source_stage, c.target_stage): c for c in connections}.values()
