"""Lowering: from what a rank computes to what it does, messages and memory included.

What a rank computes comes from its schedule; :mod:`pipectl.schedule.assembly` puts the rows of
messages, recomputation, copies and sums around it.

Where steps are not flushed, several are lowered as if they were one, with an UPDATE after the last
backward of each. From some step on all do the same, so a long stretch repeats the rows of one.

Where forward and backward of a stage have ranks of their own, the second starts to receive saved
values by the turn of the forward that makes them, so that the first can drop them soon; and a step
begins with the weights of the last one on their way back. Where steps are not flushed, they follow
their UPDATE, into buffers that are posted before the first forward with the weights before; an
UPDATE of a rank that only runs forwards says that a step has had its last one there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple

import numpy as np

from pipectl import __version__
from pipectl.graph import TransferKind
from pipectl.plan import Plan
from pipectl.schedule import unflushed
from pipectl.schedule.actions import Action, Actions, Integers, Kind
from pipectl.schedule.assembly import Assembly
from pipectl.schedule.channel import Channel, channels, channels_of_rank, is_kept, messages
from pipectl.schedule.order import Order
from pipectl.schedule.placement import Portion, is_apart, portion, roles
from pipectl.schedule.registry import is_unflushed, order_of
from pipectl.schedule.unflushed import first_uses, with_versions


def lower(plan: Plan, rank: int, micro_batches: int | None = None) -> Actions:
    """The program of one rank; costs time in proportion to that rank's actions.

    Every rank gets exactly one UPDATE a step, the last row, with the first stage it updates, or -1
    if there is none: idle ranks take part in what all ranks do together at the end of a step.
    Where steps are not flushed, it is the shortest stretch of them that has a steady one.

    Args:
        micro_batches: of this step; by default the plan's. A schedule without flushes has no
            others.

    Raises:
        ScheduleError: for an unknown schedule, or stages that do not suit it.
    """
    if is_unflushed(plan):
        return lower_stretch(plan, rank, 1 + unflushed.steps_apart(plan))
    return _rows(plan, rank, micro_batches or plan.micro_batches)


def lower_stretch(plan: Plan, rank: int, steps: int) -> Actions:
    """All that a rank does in some steps that are not flushed, from empty pipeline to empty one.

    Raises:
        ScheduleError: see :func:`lower`.
    """
    return with_versions(plan, _rows(plan, rank, steps * plan.micro_batches))


def stretch(plan: Plan, rank: int, steps: int) -> Iterator[tuple[Actions, int]]:
    """:func:`lower_stretch` in parts, each with what is to be added to its micro-batches.

    The steady steps of a long stretch share their rows.

    Raises:
        ScheduleError: see :func:`lower`.
    """
    alike = steps - unflushed.steps_apart(plan)
    if alike <= 1:
        yield lower_stretch(plan, rank, steps), 0
        return
    rows = lower(plan, rank)
    updates = np.flatnonzero(rows.column("kind") == Kind.UPDATE)
    first, last = 1 + updates[unflushed.steady_from(plan) - 1 :][:2]
    begin, steady, end = map(Actions, np.split(rows.rows, [first, last]))
    yield begin, 0
    yield from ((steady, number * plan.micro_batches) for number in range(alike))
    yield end, (alike - 1) * plan.micro_batches


def _rows(plan: Plan, rank: int, micro_batches: int) -> Actions:
    """The rows of a step, or of a stretch of steps that are not flushed."""
    order, held = order_of(plan, micro_batches), roles(plan, rank)
    parts = [
        (kind, role.stage, portion(plan, role.stage, role.replica, micro_batches))
        for role in held
        for kind in order.parts(role.kind)
    ]
    assembly = Assembly(rank, parts, order, micro_batches)
    overlaps = is_unflushed(plan)
    for index, channel in channels_of_rank(plan, rank):
        if channel.kind is TransferKind.WEIGHT:
            uses = first_uses(plan, channel.target_stage, micro_batches) if overlaps else None
            assembly.add_weights(index, channel, uses, plan.micro_batches)
        elif not channel.is_local:
            saved = channel.kind is TransferKind.SAVED
            assembly.add_messages(
                index,
                channel,
                messages(plan, channel, micro_batches),
                kept=is_kept(plan, channel),
                offload=saved and plan.stages[channel.target_stage].offload,
            )
    updated = [role for role in held if role.kind is Kind.BACKWARD]
    for role in updated:
        stage = plan.stages[role.stage]
        assembly.add_stage(
            role.stage,
            elsewhere=is_apart(plan, role.stage, role.replica),
            recompute=stage.recompute,
            offload=stage.offload,
            reduce=stage.replicas > 1,
        )
    first = min((role.stage for role in updated), default=-1)
    assembly.add_updates(first, plan.micro_batches if overlaps else None)
    return assembly.sorted()


def lower_evaluation(
    connections: Sequence[Channel], stages: Sequence[int], rank: int, micro_batches: int
) -> Actions:
    """The forward-only program of one rank, without UPDATE.

    Micro-batch after micro-batch; four stages, four micro-batches::

        stage 0  0123
        stage 1  .0123
        stage 2  ..0123
        stage 3  ...0123

    Args:
        connections: channels of the evaluation graph; the program holds their indices.
        stages: stages of this rank.
    """
    ends = [stage for item in connections for stage in (item.source_stage, item.target_stage)]
    width, every = 1 + max([0, *stages, *ends]), Portion(np.arange(micro_batches))

    def turns(stage: int, micro_batch: Integers) -> Integers:
        return micro_batch * width + stage

    parts = [(Kind.EVALUATE, stage, every) for stage in stages]
    assembly = Assembly(rank, parts, Order(turns, turns), micro_batches)
    for index, channel in enumerate(connections):
        if not channel.is_local:
            assembly.add_messages(index, channel, every, kept=False)
    return assembly.sorted()


def program_hash(plan: Plan) -> str:
    """Hash of all that ranks do by a plan; they compare it at their start."""
    content = [
        __version__,
        plan.schedule,
        plan.warm_up,
        plan.actions,
        [plan.batch_size, plan.micro_batch_size, plan.micro_batches],
        [plan.replication, plan.shard_optimizer],
        [[s.nodes, s.ranks, s.backward_ranks, s.recompute, s.offload] for s in plan.stages],
        [s.blocks and s.blocks.firsts for s in plan.stages],
        plan.offload_to,
        [astuple(channel) for channel in channels(plan)],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def lower_renewal(plan: Plan, rank: int) -> Actions:
    """What a rank does so that every forward has the weights that its backward's rank updated.

    All messages are started before any is awaited, so no ranks wait for each other.
    """
    starts, waits = [], []
    for index, channel in channels_of_rank(plan, rank):
        if channel.kind is TransferKind.WEIGHT:
            sends = channel.source_rank == rank
            stage = channel.source_stage
            start = Kind.SEND_START if sends else Kind.RECEIVE_START
            wait = Kind.SEND_WAIT if sends else Kind.RECEIVE_WAIT
            starts.append(Action(start, stage, channel=index))
            waits.append(Action(wait, stage, channel=index))
    return Actions.of([*starts, *waits])
