"""The stage-level model of a hybrid pipeline as arrays that the compiled searches read.

Devices stand in one order, and every stage takes the next ones, so a stage is known by where it
begins and how many replicas it has. What its messages and its reduction cost is read from tables
by (begin modulo the period of the machines, replicas). Costs of a stage between two states are
differences of what the states hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from pipectl.arrays import Flags, Floats, Integers
from pipectl.planner.costs.held import held_bytes
from pipectl.planner.costs.operator_times import operator_times
from pipectl.planner.hybrid.links import LinkRules
from pipectl.planner.hybrid.states import States
from pipectl.profile import Profile

EVERY_COUNT = 24
"""Up to so many devices, every number of replicas is tried; beyond, about six per doubling."""
REFERENCE_BYTES = 2**20
"""Messages of this size say what a link takes per byte."""


class Costs(NamedTuple):
    """What the states hold, for one micro-batch size; bytes as float64.

    Args:
        forward_s, backward_s, resident_bytes: shape (replica counts, states); on one of so many
            replicas, the last: parameters, their gradients and its part of the optimizer's state.
        stage_s: shape (2,); what every stage adds to a forward and a backward.
        update_s: of the optimizer.
        activation_bytes, gradient_bytes: what crosses a cut at the state, and comes back.
        reduced_bytes: gradients of the parameters.
        saved_bytes: kept for the backward of a whole micro-batch.
    """

    forward_s: Floats
    backward_s: Floats
    stage_s: Floats
    update_s: Floats
    activation_bytes: Floats
    gradient_bytes: Floats
    reduced_bytes: Floats
    resident_bytes: Floats
    saved_bytes: Floats


class Layout(NamedTuple):
    """What the devices and links cost, by where a stage begins in the order of devices.

    Args:
        devices: how many there are.
        replicas: the numbers of replicas a stage may have, rising.
        slowness: shape (period, counts); of the slowest replica, relative to the profile's device.
        limit_bytes: shape (period, counts); of the smallest.
        late_s, s_per_byte: shape (period, counts, counts); of messages from a stage to the next.
        reduce_late_s, reduce_s_per_byte: shape (period, counts).
    """

    devices: int
    replicas: Integers
    slowness: Floats
    limit_bytes: Floats
    late_s: Floats
    s_per_byte: Floats
    reduce_late_s: Floats
    reduce_s_per_byte: Floats


class Model(NamedTuple):
    """Everything that gives a plan its step time.

    Args:
        follows: shape (states, states); which state can follow which.
        most: entry of ``replicas`` up to which a stage may be split.
        last_share: size of the last micro-batch relative to the others.
        stages: that every plan has; 0 if any number will do.
    """

    costs: Costs
    layout: Layout
    follows: Flags
    most: int
    micro_batches: int
    last_share: float
    stages: int = 0


def replica_counts(devices: int) -> Integers:
    """Numbers of replicas to try, rising, up to all devices."""
    counts = list(range(1, min(devices, EVERY_COUNT) + 1))
    while counts[-1] < devices:
        counts.append(min(devices, max(counts[-1] + 1, round(counts[-1] * 1.125))))
    return np.array(counts, np.int64)


def costs_of(
    profile: Profile,
    states: States,
    size: int,
    replicas: Sequence[int],
    *,
    fractions: bool,
    shard_optimizer: bool = False,
) -> Costs:
    """Costs of all states at a micro-batch size.

    Args:
        fractions: whether replicas may get fractions of a sample, at proportional times.
        shard_optimizer: whether replicas share out the optimizer's state.
    """
    members = states.members.astype(np.float64)
    scale = size / profile.micro_batch_size
    crossing = states.crossing(profile.edge_indices).astype(np.float64)
    columns = members @ _times(profile, size, replicas, fractions=fractions)
    held = held_bytes(profile, members, replicas, shard_optimizer=shard_optimizer)
    operators, overhead = profile.operators, profile.stage
    return Costs(
        forward_s=np.ascontiguousarray(columns[:, : len(replicas)].T),
        backward_s=np.ascontiguousarray(columns[:, len(replicas) :].T),
        stage_s=np.array([overhead.forward_s, overhead.backward_s]),
        update_s=held.parameters * profile.optimizer_cost.step_s_per_byte,
        activation_bytes=crossing @ np.array([float(o.output_bytes) for o in operators]) * scale,
        gradient_bytes=crossing @ np.array([float(o.gradient_bytes) for o in operators]) * scale,
        reduced_bytes=held.trained,
        resident_bytes=held.resident,
        saved_bytes=held.saved * scale,
    )


def _times(profile: Profile, size: int, replicas: Sequence[int], *, fractions: bool) -> Floats:
    """Forward, then backward of every operator on the replica with the most samples.

    Returns:
        Shape (operators, 2 x replica counts).
    """
    own = profile.micro_batch_size
    shares = [size / count if fractions else float(ceil(size / count)) for count in replicas]
    if fractions or not profile.has_several_sizes:
        base = np.array([(o.forward_s, o.backward_s) for o in profile.operators], np.float64)
        scales = np.array(shares) / own
        return np.hstack([base[:, :1] * scales, base[:, 1:] * scales])
    measured = {share: operator_times(profile, int(share)).uncached for share in set(shares)}
    pairs = np.array([measured[share] for share in shares], np.float64)
    return np.hstack([pairs[:, :, 0].T, pairs[:, :, 1].T])


def layout_of(rules: LinkRules, order: Sequence[int], replicas: Integers) -> Layout:
    """The tables of an order of the ranks."""
    period = _period(rules, order)
    counts = replicas.tolist()
    shape = (period, len(counts))
    slowness, limits = np.ones(shape), np.full(shape, np.inf)
    reduce_late_s, reduce_s_per_byte = np.zeros(shape), np.zeros(shape)
    late_s, s_per_byte = np.zeros((*shape, len(counts))), np.zeros((*shape, len(counts)))
    for begin, row in _starts(period, counts, len(order)):
        ranks = order[begin : begin + counts[row]]
        slowness[begin, row] = 1.0 / min(rules.speed(rank) for rank in ranks)
        limits[begin, row] = min(rules.memory_bytes(rank) for rank in ranks)
        none_s = rules.reduce_s(0.0, ranks)
        reduce_late_s[begin, row] = none_s
        reduce_s_per_byte[begin, row] = (
            rules.reduce_s(REFERENCE_BYTES, ranks) - none_s
        ) / REFERENCE_BYTES
        for column, count in enumerate(counts):
            after = order[begin + len(ranks) : begin + len(ranks) + count]
            if len(after) == count:
                message = rules.transfer_s(REFERENCE_BYTES, ranks, after)
                late_s[begin, row, column] = message.late_s
                s_per_byte[begin, row, column] = message.hold_s / REFERENCE_BYTES
    return Layout(
        len(order),
        replicas,
        slowness,
        limits,
        late_s,
        s_per_byte,
        reduce_late_s,
        reduce_s_per_byte,
    )


def _starts(period: int, counts: Sequence[int], devices: int) -> list[tuple[int, int]]:
    """(begin, entry of counts) of all stages within one period that fit the devices."""
    return [
        (begin, row)
        for begin in range(period)
        for row, count in enumerate(counts)
        if begin + count <= devices
    ]


def _period(rules: LinkRules, order: Sequence[int]) -> int:
    """After how many devices the order looks the same again: equal machines, one after another."""
    devices = [
        (rules.machine_of[rank], rules.speed(rank), rules.memory_bytes(rank)) for rank in order
    ]
    size = next((i for i, d in enumerate(devices) if d[0] != devices[0][0]), len(devices))
    kinds = {device[1:] for device in devices}
    blocks = [{d[0] for d in devices[at : at + size]} for at in range(0, len(devices), size)]
    equal = len(kinds) == 1 and len(devices) % size == 0
    alike = equal and all(len(block) == 1 for block in blocks)
    machines = {device[0] for device in devices}
    return size if alike and len(blocks) == len(machines) else len(devices)
