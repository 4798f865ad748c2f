"""Lowering: from the computations of a rank to its program, with messages and memory operations.

The schedule provides the computations, :mod:`pipectl.schedule.assembly` the other rows.

If steps are not flushed, several steps are lowered as one, with an UPDATE after the last backward
of each. After a few steps all steps are the same, so a long stretch repeats the rows of one.

If the forward and the backward of a stage run on different ranks, the second rank starts to receive
saved values by the turn of the forward that computes them, so that the first can release them soon.
A step begins with the return of the last step's weights. If steps are not flushed, weights are sent
after their UPDATE, into buffers that are posted before the first forward with the previous weights;
a rank that only runs forwards has an UPDATE after the last forward of each step.
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
    """Return the program of one rank, in time proportional to the number of its actions.

    Every rank has exactly one UPDATE per step, the last row, with the first stage that it updates
    or -1: idle ranks take part in the collective operations at the end of a step. If steps are not
    flushed, the program is the shortest stretch with a steady step.

    Args:
        micro_batches: number in this step; by default the plan's, the only one without flushes.

    Raises:
        ScheduleError: the schedule is unknown, or the stages do not suit it.
    """
    if is_unflushed(plan):
        return lower_stretch(plan, rank, 1 + unflushed.steps_apart(plan))
    return _rows(plan, rank, micro_batches or plan.micro_batches)


def lower_stretch(plan: Plan, rank: int, steps: int) -> Actions:
    """Return the program of a rank for steps without flushes, between two empty pipelines.

    Raises:
        ScheduleError: see :func:`lower`.
    """
    return with_versions(plan, _rows(plan, rank, steps * plan.micro_batches))


def stretch(plan: Plan, rank: int, steps: int) -> Iterator[tuple[Actions, int]]:
    """Yield :func:`lower_stretch` in parts, each with the offset of its micro-batches.

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
    """Return the rows of a step, or of several steps that are not flushed."""
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
    """Return the forward-only program of one rank, without UPDATE.

    One micro-batch follows another; four stages, four micro-batches::

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
    """Return the hash of all that ranks do by a plan; ranks compare it when they start."""
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
    """Return the rows that bring updated weights to forwards on other ranks than their backwards.

    All messages are started before any is awaited, so ranks cannot wait for each other.
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
