"""What the rows of a program refer to on one rank: channels, and messages that never leave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipectl.capture import Lane
from pipectl.plan import Plan, Replication
from pipectl.schedule import Actions, Channel, Kind, Portion, channels, messages, portion


class Range(NamedTuple):
    """Samples of a micro-batch that a message holds; -1 for all of them."""

    start: int = -1
    stop: int = -1


@dataclass(frozen=True, eq=False)
class Wiring:
    """The channels of a pass.

    Args:
        channels: what the channel column refers to.
        local: channels both of whose ends are on this rank, and what they carry by micro-batch;
            None for every micro-batch as a whole.
        heads: by channel and micro-batch, where the part of the replica behind it begins; empty
            where micro-batches are not split.
        closing: of every stage whose gradients are summed, its last backward's micro-batch.
    """

    channels: Sequence[Channel]
    local: tuple[tuple[int, Mapping[int, Range] | None], ...]
    heads: Mapping[tuple[int, int], int]
    closing: Mapping[int, int]

    @cached_property
    def lanes(self) -> list[Lane]:
        """The lane of every channel."""
        return [Lane(c.kind, c.source_stage, c.target_stage) for c in self.channels]

    @cached_property
    def local_lanes(self) -> list[tuple[int, Lane, Mapping[int, Range] | None]]:
        """Local channels with their lanes."""
        return [(index, self.lanes[index], carried) for index, carried in self.local]

    @classmethod
    def plain(cls, found: Sequence[Channel], rank: int) -> Wiring:
        """Channels that all carry every micro-batch as a whole."""
        own = (i for i, c in enumerate(found) if c.is_local and c.source_rank == rank)
        return cls(found, tuple((index, None) for index in own), {}, {})

    @classmethod
    def of(cls, plan: Plan, rank: int, actions: Actions) -> Wiring:
        """The channels of one step.

        Args:
            plan: of this step.
            actions: the rank's.
        """
        found = channels(plan)
        own = [i for i, c in enumerate(found) if c.is_local and c.source_rank == rank]
        local = tuple((i, _carried(plan, found[i])) for i in own)
        here = [i for i, c in enumerate(found) if rank in (c.source_rank, c.target_rank)]
        return cls(found, local, _heads(plan, found, here), _closing(actions))


def ranges(given: Portion) -> dict[int, Range]:
    """A portion by micro-batch."""
    index = given.micro_batches
    start, stop = (np.broadcast_to(np.asarray(edge), index.shape) for edge in given[1:])
    rows = zip(index.tolist(), start.tolist(), stop.tolist(), strict=True)
    return {micro_batch: Range(*edges) for micro_batch, *edges in rows}


def _carried(plan: Plan, channel: Channel) -> Mapping[int, Range]:
    return ranges(messages(plan, channel, plan.micro_batches))


def _heads(
    plan: Plan, found: Sequence[Channel], indices: Sequence[int]
) -> dict[tuple[int, int], int]:
    if plan.replication is Replication.WHOLE:
        return {}
    heads = {}
    for index in indices:
        stage, replica = _later_end(found[index])
        mine = ranges(portion(plan, stage, replica, plan.micro_batches))
        heads.update({(index, i): max(0, edges.start) for i, edges in mine.items()})
    return heads


def _later_end(channel: Channel) -> tuple[int, int]:
    """Stage and replica of the end that reads values and makes gradients."""
    ends = (
        (channel.source_stage, channel.source_replica),
        (channel.target_stage, channel.target_replica),
    )
    return max(ends)


def _closing(actions: Actions) -> dict[int, int]:
    rows = actions.rows.tolist()
    summed = {row[1] for row in rows if row[0] == Kind.REDUCE_START}
    return {row[1]: row[2] for row in rows if row[0] == Kind.BACKWARD and row[1] in summed}
