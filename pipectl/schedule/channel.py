"""Channels: the ordered streams of messages between replicas of stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipectl.graph import TransferKind
from pipectl.plan import Plan
from pipectl.schedule.actions import Actions
from pipectl.schedule.placement import Portion, common, is_apart, pairs


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
                size, back = stage.cost.parameter_bytes, ends[::-1]
                yield Channel(kind, index, index, *back, size, replica, replica)


def _by_rank(plan: Plan) -> list[tuple[tuple[int, Channel], ...]]:
    by_rank: list[list[tuple[int, Channel]]] = [[] for _ in range(plan.ranks)]
    for index, channel in enumerate(channels(plan)):
        for rank in {channel.source_rank, channel.target_rank}:
            by_rank[rank].append((index, channel))
    return [tuple(items) for items in by_rank]
