"""Validation: proves that rank programs can run together, before any of them does.

Sends are taken as rendezvous: a message moves only when both ends have started it, as MPI may do
with any message. What holds then holds for sends that MPI buffers, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from pipectl.errors import ScheduleError
from pipectl.graph import TransferKind
from pipectl.plan import Plan
from pipectl.schedule.actions import Integers, Kind, Program
from pipectl.schedule.channel import Channel, channels, rank_of_stage
from pipectl.schedule.deadlock import check_progress
from pipectl.schedule.memory import peak_in_flight, peak_memory_bytes
from pipectl.units import format_bytes

_USERS = {TransferKind.ACTIVATION: Kind.FORWARD, TransferKind.GRADIENT: Kind.BACKWARD}
"""The action that makes a message on one end and reads it on the other."""


@dataclass(frozen=True)
class Proof:
    """What valid programs need.

    Args:
        peak_in_flight: of every stage, micro-batches between forward and backward.
        peak_memory_bytes: of every rank, the process included.
    """

    peak_in_flight: tuple[int, ...]
    peak_memory_bytes: tuple[int, ...]


def validate(
    plan: Plan,
    programs: Sequence[Program],
    micro_batches: int | None = None,
    *,
    process_baseline_bytes: int = 0,
) -> Proof:
    """Check the programs of all ranks against each other and against the plan.

    Proved are: every stage computes every micro-batch once, backwards (hence the accumulation of
    gradients) in ascending order, UPDATE last; every message is started and ended once on both
    ends, in the same order; values are made before they are sent, there before they are read, and
    not released while they are sent; no ranks wait for each other; memory is within the limit.

    Args:
        programs: of every rank; their bodies are checked.
        micro_batches: of the step; by default the plan's.
        process_baseline_bytes: what a process holds before it has a stage.

    Raises:
        ScheduleError: naming the ranks, stages and micro-batches of the first fault.
    """
    if len(programs) != plan.ranks:
        raise _fault(f"{len(programs)} programs for {plan.ranks} ranks")
    connections = channels(plan)
    ranks = [
        _Rank(rank, program, micro_batches or plan.micro_batches)
        for rank, program in enumerate(programs)
    ]
    for stage in range(len(plan.stages)):
        _check_stage(ranks[rank_of_stage(plan, stage)], stage)
    for index, channel in enumerate(connections):
        _check_channel(ranks[channel.source_rank], ranks[channel.target_rank], index, channel)
    for rank in ranks:
        rank.check_nothing_else()
    check_progress(connections, programs)
    return Proof(
        tuple(
            peak_in_flight(programs[rank_of_stage(plan, stage)], stage)
            for stage in range(len(plan.stages))
        ),
        _check_memory(plan, programs, process_baseline_bytes),
    )


class _Rank:
    """Where the rows of a program are."""

    def __init__(self, rank: int, program: Program, micro_batches: int) -> None:
        self.rank = rank
        self.rows = program.body
        self.micro_batches = micro_batches
        self.seen = np.zeros(len(self.rows), dtype=bool)
        self.at = cache(self._at)

    def _at(self, kind: Kind, index: int) -> Integers:
        """Row of each micro-batch's action of a stage, or transfer of a channel."""
        name = "stage" if kind.is_compute else "channel"
        rows = np.flatnonzero(
            (self.rows.column("kind") == kind) & (self.rows.column(name) == index)
        )
        micro_batch = self.rows.column("micro_batch")[rows]
        if not np.array_equal(np.sort(micro_batch), np.arange(self.micro_batches)):
            raise _fault(
                f"rank {self.rank} has {kind.name} of {name} {index} for micro-batches "
                f"{_short(micro_batch)} instead of once for each of {self.micro_batches}"
            )
        self.seen[rows] = True
        return rows[np.argsort(micro_batch)]

    def check_order(self, first: tuple[Kind, int], second: tuple[Kind, int]) -> None:
        """The rows of ``first`` come before those of ``second``, micro-batch by micro-batch."""
        late = np.flatnonzero(self.at(*first) >= self.at(*second))
        if len(late):
            raise _fault(
                f"rank {self.rank}: {_words(*second)} comes before {_words(*first)} "
                f"for micro-batch {late[0]}"
            )

    def check_nothing_else(self) -> None:
        """Every row has been looked at but one UPDATE, the last."""
        rest = np.flatnonzero(~self.seen)
        kinds = [Kind(kind).name for kind in self.rows.column("kind")[rest]]
        if kinds != ["UPDATE"] or rest[0] != len(self.rows) - 1:
            raise _fault(
                f"rank {self.rank} has {_short(kinds)} beyond its stages and channels; "
                "one UPDATE at the end belongs there"
            )


def _check_stage(rank: _Rank, stage: int) -> None:
    rank.check_order((Kind.FORWARD, stage), (Kind.BACKWARD, stage))
    backward = rank.at(Kind.BACKWARD, stage)
    if np.any(np.diff(backward) < 0):
        raise _fault(
            f"rank {rank.rank} accumulates gradients of stage {stage} in micro-batch order "
            f"{_short(np.argsort(backward))}, which is not ascending"
        )


def _check_channel(source: _Rank, target: _Rank, index: int, channel: Channel) -> None:
    user = _USERS[channel.kind]
    made, read = (user, channel.source_stage), (user, channel.target_stage)
    if channel.is_local:
        source.check_order(made, read)
        return
    send, sent = (Kind.SEND_START, index), (Kind.SEND_WAIT, index)
    receive, received = (Kind.RECEIVE_START, index), (Kind.RECEIVE_WAIT, index)
    for rank, first, second in (
        (source, made, send),
        (source, send, sent),
        (target, receive, received),
        (target, received, read),
    ):
        rank.check_order(first, second)
    if channel.kind is TransferKind.ACTIVATION:
        source.check_order(sent, (Kind.BACKWARD, channel.source_stage))
    orders = np.argsort(source.at(*send)), np.argsort(target.at(*receive))
    if not np.array_equal(*orders):
        raise _fault(
            f"{channel}: rank {source.rank} sends micro-batches {_short(orders[0])}, "
            f"rank {target.rank} receives {_short(orders[1])}"
        )


def _check_memory(plan: Plan, programs: Sequence[Program], baseline: int) -> tuple[int, ...]:
    peaks = tuple(
        peak_memory_bytes(plan, rank, program, process_baseline_bytes=baseline)
        for rank, program in enumerate(programs)
    )
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    if plan.memory_limit_bytes is not None and peaks[worst] > plan.memory_limit_bytes:
        raise ScheduleError(
            f"rank {worst} would hold {format_bytes(peaks[worst])}, "
            f"above the memory limit of {format_bytes(plan.memory_limit_bytes)}",
            cure="plan again: with more ranks, smaller micro-batches or a smaller warm_up",
        )
    return peaks


def _fault(message: str) -> ScheduleError:
    return ScheduleError(
        f"rank programs: {message}", cure="write a new plan: pipectl plan JOB.yaml"
    )


def _words(kind: Kind, index: int) -> str:
    return f"{kind.name} of {'stage' if kind.is_compute else 'channel'} {index}"


def _short(items: Sequence[object] | Integers, most: int = 12) -> str:
    shown = ", ".join(str(item) for item in items[:most])
    return f"[{shown}{', ...' if len(items) > most else ''}]"
