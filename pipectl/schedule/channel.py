"""The replicas of stages on ranks: their part of the work, and the channels between them.

A channel is the ordered stream of messages between two replicas. Replicas that take whole
micro-batches take them in turn: from a stage with two replicas to a stage with three, a message of
micro-batch i goes from replica i mod 2 to replica i mod 3. Otherwise every micro-batch is split by
samples, for example six samples::

    replica of two      0 0 0 1 1 1
    replica of three    0 0 1 1 2 2      messages 0-0, 0-1, 1-1, 1-2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipectl.arrays import Floats, unique
from pipectl.lanes import TransferKind
from pipectl.plan import Plan, Replication
from pipectl.schedule.actions import Actions, Integers, Kind
from pipectl.schedule.sum_tree import max_held, micro_batches_in_turn, roots

Column = Integers | int
"""One value per micro-batch, or one value for all."""


class Role(NamedTuple):
    """The part of one replica of a stage on one rank; ``kind`` is FORWARD or BACKWARD."""

    kind: Kind
    stage: int
    replica: int


class Portion(NamedTuple):
    """The part of a step that a replica computes or a channel carries, by ascending micro-batch.

    Args:
        start, stop: half-open range of samples of each micro-batch; both -1 for all.
    """

    micro_batches: Integers
    start: Column = -1
    stop: Column = -1

    def some(self, chosen: Integers) -> Portion:
        """Return the part with the micro-batches at these indices."""
        start, stop = (
            edge if isinstance(edge, int) else edge[chosen] for edge in (self.start, self.stop)
        )
        return Portion(self.micro_batches[chosen], start, stop)


def plan_of_step(plan: Plan, samples: int) -> Plan:
    """Return the plan of a step that may have fewer samples, such as the last of an epoch."""
    if samples == plan.batch_size:
        return plan
    return replace(plan, batch_size=samples, micro_batches=ceil(samples / plan.micro_batch_size))


def plan_of_trial(plan: Plan, size: int) -> Plan:
    """Return the plan of a short step that uses every channel.

    Args:
        size: samples of each micro-batch.
    """
    count = 1
    if plan.replication is Replication.WHOLE:
        count = min(plan.micro_batches, lcm(*(stage.replicas for stage in plan.stages)))
    return replace(plan, micro_batch_size=size, batch_size=count * size, micro_batches=count)


def roles(plan: Plan, rank: int) -> tuple[Role, ...]:
    """Return what a rank computes, forwards first, by ascending stage."""
    return plan.derived(_roles)[rank]


def is_apart(plan: Plan, stage: int, replica: int) -> bool:
    """Return whether the forward and the backward of a replica run on different ranks."""
    held = plan.stages[stage]
    return held.updating_ranks[replica] != held.ranks[replica]


def portion(plan: Plan, stage: int, replica: int, micro_batches: int) -> Portion:
    """Return what a replica computes in a step of so many micro-batches."""
    places = common(plan, (stage, replica), (stage, replica), micro_batches)
    return _numbered(plan, places, micro_batches)


def numbers_in_turn(plan: Plan, micro_batches: int) -> Integers:
    """Return which micro-batch of a step comes i-th, for all i; shape [micro-batches]."""
    if not plan.reproducible or plan.replication is not Replication.WHOLE:
        return np.arange(micro_batches)
    return micro_batches_in_turn(tuple(each.replicas for each in plan.stages), micro_batches)


def sums_held(plan: Plan, stage: int) -> int:
    """Return how many sums of the gradients of a stage a rank holds at most."""
    return max(held for held, _ in plan.derived(_sums)[stage])


def roots_sent(plan: Plan, stage: int) -> tuple[int, ...]:
    """Return how many sums of its gradients each replica of a stage sends; at least one."""
    return tuple(sent for _, sent in plan.derived(_sums)[stage])


def _sums(plan: Plan) -> list[list[tuple[int, int]]]:
    """Return for the replicas of each stage how many sums they hold at most, and send."""
    if not plan.reproducible:
        return [[(1, 1)] * stage.replicas for stage in plan.stages]
    number = plan.micro_batches
    numbers = numbers_in_turn(plan, number)
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for index, stage in enumerate(plan.stages):
        for replica in range(stage.replicas):
            if (stage.replicas, replica) not in found:
                places = common(plan, (index, replica), (index, replica), number)
                taken = numbers[places.micro_batches].tolist()
                found[stage.replicas, replica] = max(1, max_held(taken)), max(1, len(roots(taken)))
    return [[found[each.replicas, k] for k in range(each.replicas)] for each in plan.stages]


def _numbered(plan: Plan, places: Portion, micro_batches: int) -> Portion:
    """Return the micro-batches at these places of a step."""
    if not plan.reproducible:
        return places
    numbers = numbers_in_turn(plan, micro_batches)[places.micro_batches]
    rising = numbers.argsort()
    return places.some(rising)._replace(micro_batches=numbers[rising])


def shares(plan: Plan, rows: Actions) -> Floats:
    """Return the samples of each row relative to a full micro-batch; shape [rows].

    The share of a row that belongs to no micro-batch is 1.
    """
    micro_batch = rows.column("micro_batch")
    sizes = np.ones(1 + micro_batch.max(initial=plan.micro_batches - 1) + 1)
    sizes[:-1] = np.resize(plan.micro_batch_shares, len(sizes) - 1)
    start, stop = rows.column("start"), rows.column("stop")
    part: Floats = (stop - start) / plan.micro_batch_size
    return np.where(start >= 0, part, sizes[micro_batch])


def common(plan: Plan, source: tuple[int, int], target: tuple[int, int], number: int) -> Portion:
    """Return the messages between two (stage, replica): the samples that both compute.

    Micro-batches are counted as they come, see :func:`numbers_in_turn`.

    Args:
        number: micro-batches in the step.
    """
    (first, one), (second, other) = source, target
    counts = plan.stages[first].replicas, plan.stages[second].replicas
    if counts == (1, 1):
        return Portion(np.arange(number))
    if plan.replication is Replication.WHOLE:
        shared = np.arange(one, number, counts[0])
        return Portion(shared[shared % counts[1] == other])
    sizes = _sizes(plan, number)
    ours, theirs = _edges(sizes, counts[0]), _edges(sizes, counts[1])
    start = np.maximum(ours[one], theirs[other])
    stop = np.minimum(ours[one + 1], theirs[other + 1])
    index = np.flatnonzero(start < stop)
    return Portion(index, start[index], stop[index])


def pairs(plan: Plan, source: int, target: int) -> list[tuple[int, int]]:
    """Return the pairs of replicas of two stages that exchange messages, in ascending order."""
    one, other = plan.stages[source].replicas, plan.stages[target].replicas
    if plan.replication is Replication.WHOLE:
        period = min(plan.micro_batches, lcm(one, other))
        return sorted({(index % one, index % other) for index in range(period)})
    sizes = unique(_sizes(plan, plan.micro_batches))
    ours, theirs = _edges(sizes, one), _edges(sizes, other)
    first = np.maximum(ours[:-1, None], theirs[None, :-1])
    overlap = first < np.minimum(ours[1:, None], theirs[None, 1:])
    return [(int(a), int(b)) for a, b in np.argwhere(overlap.any(axis=2))]


def _roles(plan: Plan) -> list[tuple[Role, ...]]:
    by_rank: list[list[Role]] = [[] for _ in range(plan.ranks)]
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for index, stage in enumerate(plan.stages):
            ranks = stage.ranks if kind is Kind.FORWARD else stage.updating_ranks
            for replica, rank in enumerate(ranks):
                by_rank[rank].append(Role(kind, index, replica))
    return [tuple(items) for items in by_rank]


def _sizes(plan: Plan, micro_batches: int) -> Integers:
    sizes = np.full(micro_batches, plan.micro_batch_size)
    if micro_batches == plan.micro_batches:
        sizes[-1] = plan.batch_size - (micro_batches - 1) * plan.micro_batch_size
    return sizes


def _edges(sizes: Integers, replicas: int) -> Integers:
    """Return the first sample of each replica, and the end; shape [replicas + 1, sizes]."""
    edges: Integers = np.arange(replicas + 1)[:, None] * sizes // replicas
    return edges


@dataclass(frozen=True)
class Channel:
    """All messages from one replica of a stage to one replica of another, by ascending micro-batch.

    Messages of a channel travel first in, first out. The ``channel`` column of a program holds the
    index in :func:`channels`. If the forward and the backward of a replica run on different ranks,
    saved values go from the first to the second, and once per step weights go back.

    Args:
        size_bytes: bytes of the message of one full micro-batch, with all its samples and values.
    """

    kind: TransferKind
    source_stage: int
    target_stage: int
    source_rank: int
    target_rank: int
    size_bytes: int
    source_replica: int = 0
    target_replica: int = 0

    @property
    def is_local(self) -> bool:
        """Whether both ends are on the same rank, so that nothing is sent."""
        return self.source_rank == self.target_rank

    def __str__(self) -> str:
        if self.source_stage == self.target_stage:
            return f"{self.kind} of stage {self.source_stage}"
        return f"{self.kind} of stage {self.source_stage} for stage {self.target_stage}"


def channels(plan: Plan) -> tuple[Channel, ...]:
    """Return the channels of a plan: activations, gradients, saved values, weights.

    Each group is sorted by (source, target) stage, then by replica. Transfers of the same kind and
    stages share a channel. Replicas that exchange nothing have no channel.
    """
    return plan.derived(_channels)


def channels_of_rank(plan: Plan, rank: int) -> tuple[tuple[int, Channel], ...]:
    """Return the channels that start or end at a rank, including local ones, with their indices."""
    return plan.derived(_by_rank)[rank]


def carries_weights(plan: Plan, rows: Actions) -> npt.NDArray[np.bool_]:
    """Return whether each row of a program starts or ends a message of weights."""
    kinds = [channel.kind is TransferKind.WEIGHT for channel in channels(plan)]
    return np.array([*kinds, False])[rows.column("channel")]  # -1 if there is no channel


def is_kept(plan: Plan, channel: Channel) -> bool:
    """Return whether the sender keeps what it sends until the backward of its stage anyway."""
    stage = plan.stages[channel.source_stage]
    stays = not (stage.recompute or stage.offload)
    apart = is_apart(plan, channel.source_stage, channel.source_replica)
    return channel.kind is TransferKind.ACTIVATION and stays and not apart


def messages(plan: Plan, channel: Channel, micro_batches: int) -> Portion:
    """Return what a channel, other than of weights, carries in a step of so many micro-batches."""
    return _numbered(plan, messages_in_turn(plan, channel, micro_batches), micro_batches)


def messages_in_turn(plan: Plan, channel: Channel, micro_batches: int) -> Portion:
    """Return the same as :func:`messages`, with micro-batches counted as they come."""
    source = channel.source_stage, channel.source_replica
    target = channel.target_stage, channel.target_replica
    return common(plan, source, target, micro_batches)


def _channels(plan: Plan) -> tuple[Channel, ...]:
    sizes: dict[tuple[TransferKind, int, int], int] = {}
    for item in plan.transfers:
        key = item.kind, item.source, item.target
        sizes[key] = sizes.get(key, 0) + item.size_bytes
    between = [
        channel
        for key, size in sorted(sizes.items())
        for channel in _channels_between(plan, *key, size)
    ]
    return (
        *between,
        *_channels_within(plan, TransferKind.SAVED),
        *_channels_within(plan, TransferKind.WEIGHT),
    )


def _channels_between(
    plan: Plan, kind: TransferKind, source: int, target: int, size_bytes: int
) -> Iterator[Channel]:
    ends = plan.stages[source], plan.stages[target]
    forward = kind is TransferKind.ACTIVATION
    ranks = [end.ranks if forward else end.updating_ranks for end in ends]
    for one, other in pairs(plan, source, target):
        held = ranks[0][one], ranks[1][other]
        yield Channel(kind, source, target, *held, size_bytes, one, other)


def _channels_within(plan: Plan, kind: TransferKind) -> Iterator[Channel]:
    """Yield the channels of replicas whose forward and backward run on different ranks."""
    for index, stage in enumerate(plan.stages):
        for replica, ends in enumerate(zip(stage.ranks, stage.updating_ranks, strict=True)):
            if not is_apart(plan, index, replica):
                continue
            if kind is TransferKind.SAVED:
                yield Channel(kind, index, index, *ends, stage.kept_bytes, replica, replica)
            else:
                size, back = stage.cost.changed_bytes, ends[::-1]
                yield Channel(kind, index, index, *back, size, replica, replica)


def _by_rank(plan: Plan) -> list[tuple[tuple[int, Channel], ...]]:
    by_rank: list[list[tuple[int, Channel]]] = [[] for _ in range(plan.ranks)]
    for index, channel in enumerate(channels(plan)):
        for rank in {channel.source_rank, channel.target_rank}:
            by_rank[rank].append((index, channel))
    return [tuple(items) for items in by_rank]
