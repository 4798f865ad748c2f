"""Channels: the ordered streams of messages between two stages."""

from __future__ import annotations

from dataclasses import dataclass

from pipectl.errors import ScheduleError
from pipectl.graph import TransferKind
from pipectl.plan import Plan


@dataclass(frozen=True)
class Channel:
    """All that one stage sends another in one direction: a message for every micro-batch.

    Messages of a channel travel first in, first out. Its index in :func:`channels` is what the
    ``channel`` column of a program holds.

    Args:
        size_bytes: of the message of one full micro-batch, all its values together.
    """

    kind: TransferKind
    source_stage: int
    target_stage: int
    source_rank: int
    target_rank: int
    size_bytes: int

    @property
    def is_local(self) -> bool:
        """Whether both stages share a rank, so that nothing is sent."""
        return self.source_rank == self.target_rank

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.source_stage} for stage {self.target_stage}"


def channels(plan: Plan) -> tuple[Channel, ...]:
    """The channels of a plan, activations first, each by rising (source, target) stage.

    Transfers with the same kind and stages share a channel.

    Raises:
        ScheduleError: for a stage with replicas.
    """
    sizes: dict[tuple[TransferKind, int, int], int] = {}
    for item in plan.transfers:
        key = item.kind, item.source, item.target
        sizes[key] = sizes.get(key, 0) + item.size_bytes
    return tuple(
        Channel(
            kind, source, target, rank_of_stage(plan, source), rank_of_stage(plan, target), size
        )
        for (kind, source, target), size in sorted(sizes.items())
    )


def rank_of_stage(plan: Plan, stage: int) -> int:
    """The rank that holds a stage.

    Raises:
        ScheduleError: if the stage has replicas, which no schedule here places.
    """
    ranks = plan.stages[stage].ranks
    if len(ranks) != 1:
        raise ScheduleError(
            f"stage {stage} has {len(ranks)} ranks; {plan.schedule!r} places a stage on one rank",
            cure="plan with pipeline.replicas: 1",
        )
    return ranks[0]
