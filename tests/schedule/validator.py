"""Validation: executes the programs of all ranks without time, and checks each row in its turn.

A rank stops only at a WAIT whose other end has not started; sends are taken as rendezvous, as MPI
may do with any message. What is started stays started: if all ranks get to their end in this
execution, they do in every one. Every row must be one that the plan asks for, once, with the right
samples, after all that it needs on its own rank. Gradients accumulate by rising micro-batch, unless
a user's own lists say otherwise, and what steps that overlap compute uses weights of the version
that the schedule says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import numpy as np

from pipectl.lanes import TransferKind
from pipectl.plan import Plan, Replication
from pipectl.schedule import Action, Actions, Channel, Kind, channels
from pipectl.schedule.actions import Integers
from pipectl.schedule.channel import is_apart, is_kept
from pipectl.schedule.registry import is_unflushed, order_of, schedule_of

STARTED_BY = {
    Kind.SEND_WAIT: Kind.RECEIVE_START,
    Kind.RECEIVE_WAIT: Kind.SEND_START,
    Kind.REDUCE_WAIT: Kind.REDUCE_START,
}
"""What the other rank must have done before a wait is over."""
OF_CHANNEL = (Kind.SEND_START, Kind.SEND_WAIT, Kind.RECEIVE_START, Kind.RECEIVE_WAIT)
AWAY = (Kind.OFFLOAD_START, Kind.OFFLOAD_WAIT, Kind.FETCH_START, Kind.FETCH_WAIT)
Span = tuple[int, int, int]
"""A micro-batch, and its first and last sample, or -1 twice for all of them."""
ONCE = ((-1, -1, -1),)
"""What belongs to no micro-batch."""
Row = tuple[Kind, int, int]
"""Kind, stage or channel, micro-batch."""


class InvalidError(Exception):
    """Programs that cannot run together, or do not do what the plan says."""


def validate(plan: Plan, programs: Sequence[Actions], micro_batches: int | None = None) -> None:
    """Execute the programs.

    Args:
        programs: of every rank; of overlapping steps, a stretch of some number of these.
        micro_batches: of the step; by default the plan's.

    Raises:
        InvalidError: naming rank and row of the first fault, or the ranks that wait.
    """
    count = micro_batches or plan.micro_batches
    if is_unflushed(plan):
        count = plan.micro_batches * sum(row.kind is Kind.UPDATE for row in programs[0])
    Execution(plan, programs, count).run()


class Execution:
    """All ranks of one step, or of a stretch of steps that overlap.

    Ranks go on until they wait for what another one has not started.
    """

    def __init__(self, plan: Plan, programs: Sequence[Actions], micro_batches: int) -> None:
        self.plan, self.count = plan, micro_batches
        self.programs = [list(program) for program in programs]
        self.channels = list(enumerate(channels(plan)))
        self.order, self.overlaps = order_of(plan, micro_batches), is_unflushed(plan)
        self.expected = [dict(self.rows_of(rank)) for rank in range(plan.ranks)]
        self.started: Counter[Row] = Counter()
        self.done: list[dict[Row, None]] = [{} for _ in self.programs]

    def run(self) -> None:
        """Execute everything, after which nothing is missing."""
        self.check_channels()
        position, moved = [0] * len(self.programs), True
        while moved:
            moved = False
            for rank, rows in enumerate(self.programs):
                while position[rank] < len(rows) and self.is_over(rank, rows[position[rank]]):
                    self.execute(rank, rows[position[rank]])
                    position[rank] += 1
                    moved = True
        waiting = [r for r, rows in enumerate(self.programs) if position[r] < len(rows)]
        if waiting:
            raise InvalidError(f"ranks {waiting} wait for each other")
        for rank, (expected, done) in enumerate(zip(self.expected, self.done, strict=True)):
            gone = {row[1:] for row in done if row[0] is Kind.OFFLOAD_START}
            missing = {r for r in expected if r[0] not in AWAY or r[1:] in gone} - done.keys()
            if missing:
                raise InvalidError(f"rank {rank} lacks {sorted(missing)[:5]}")
        for index, channel in self.channels:
            ends = (channel.source_rank, Kind.SEND_START), (channel.target_rank, Kind.RECEIVE_START)
            sent, received = (
                [row[2] for row in self.done[rank] if row[:2] == (kind, index)]
                for rank, kind in ends
            )
            if sent != received:
                raise InvalidError(f"{channel}: sent {sent}, received {received}")

    def is_over(self, rank: int, action: Action) -> bool:
        """Whether a row does not wait for another rank."""
        kind, owner, index = row = row_of(action)
        if kind not in STARTED_BY or row not in self.expected[rank]:
            return True
        starters = self.plan.stages[owner].replicas if kind is Kind.REDUCE_WAIT else 1
        return self.started[STARTED_BY[kind], owner, index] >= starters

    def execute(self, rank: int, action: Action) -> None:
        """Check a row, and note what it has done."""
        row, done = row_of(action), self.done[rank]
        samples = action.stage, action.start, action.stop
        if row in done or self.expected[rank].get(row) != samples:
            raise InvalidError(f"rank {rank}: {action} is not expected, or not again")
        missing = [need for need in self.needs(rank, row) if need not in done]
        if missing:
            raise InvalidError(f"rank {rank}: {action} comes before {missing[0]}")
        self.check_weights(rank, action)
        self.started[row] += 1
        done[row] = None

    def rows_of(self, rank: int) -> Iterator[tuple[Row, Span]]:
        """Every row that a rank should have, or may (``AWAY``): stage, first and last sample."""
        updated = -1
        for index, stage in reversed(list(enumerate(self.plan.stages))):
            if rank in stage.ranks:
                mine = self.spans((index, stage.ranks.index(rank)))
                yield from rows(self.order.parts(Kind.FORWARD), index, mine)
            if rank in stage.updating_ranks:
                updated = index
                mine = self.spans((index, stage.updating_ranks.index(rank)))
                kinds = [*self.order.parts(Kind.BACKWARD)]
                kinds += [Kind.RECOMPUTE] * stage.recompute + [*AWAY] * stage.offload
                yield from rows(kinds, index, mine)
                if stage.replicas > 1:
                    yield from rows((Kind.REDUCE_START, Kind.REDUCE_WAIT), index, ONCE)
        for number, channel in self.channels:
            if channel.is_local:
                continue
            weights = channel.kind is TransferKind.WEIGHT
            carried = ONCE if weights else list(self.spans(*ends_of(channel)))
            if weights and self.overlaps:
                versions = np.unique(self.versions(channel.source_stage)).tolist()
                carried = [(version * self.plan.micro_batches - 1, -1, -1) for version in versions]
            for end, kinds in (("source", OF_CHANNEL[:2]), ("target", OF_CHANNEL[2:])):
                if getattr(channel, f"{end}_rank") == rank:
                    yield from rows(kinds, number, carried, getattr(channel, f"{end}_stage"))
        step = self.plan.micro_batches
        lasts = [(last, -1, -1) for last in range(step - 1, self.count, step)]
        yield from rows((Kind.UPDATE,), updated, lasts if self.overlaps else ONCE)

    def share(self, stage: int, replica: int, index: int) -> tuple[int, int]:
        """Replicas take micro-batches in turn, or each an equal part of the samples."""
        size, count = self.plan.micro_batch_size, self.plan.stages[stage].replicas
        if index == self.plan.micro_batches - 1:
            size = self.plan.batch_size - index * size
        if self.plan.replication is Replication.WHOLE:
            return (0, size) if index % count == replica else (0, 0)
        return replica * size // count, (replica + 1) * size // count

    def spans(self, *ends: tuple[int, int]) -> Iterator[Span]:
        """The samples that one (stage, replica) computes, or that two of them have in common."""
        is_whole = self.plan.replication is Replication.WHOLE
        is_whole |= all(self.plan.stages[stage].replicas == 1 for stage, _ in ends)
        for index in range(self.count):
            starts, stops = zip(*(self.share(*end, index) for end in ends), strict=True)
            if max(starts) < min(stops):
                yield (index, -1, -1) if is_whole else (index, max(starts), min(stops))

    def check_channels(self) -> None:
        """Every sample of every transfer has a channel between the ranks that compute it."""
        known = {(c.kind, *ends_of(c), c.source_rank, c.target_rank) for _, c in self.channels}
        for item in self.plan.transfers:
            source, target = (self.plan.stages[index] for index in (item.source, item.target))
            senders, receivers = source.updating_ranks, target.updating_ranks
            if item.kind is TransferKind.ACTIVATION:
                senders, receivers = source.ranks, target.ranks
            for (one, sender), (other, receiver) in product(
                enumerate(senders), enumerate(receivers)
            ):
                ends = (item.source, one), (item.target, other)
                if [*self.spans(*ends)] and (item.kind, *ends, sender, receiver) not in known:
                    raise InvalidError(f"{item}: nothing from {sender} to {receiver}")

    def needs(self, rank: int, row: Row) -> Iterator[Row]:
        """Rows that must be done before this one on its rank."""
        kind, owner, index = row
        if kind is Kind.UPDATE or kind is Kind.REDUCE_START:
            ends = [r for r in self.expected[rank] if r[0] is self.ends_with(rank)]
            if kind is Kind.REDUCE_START:
                yield from (r for r in ends if r[1] == owner)
            elif self.overlaps:
                yield from (r for r in ends if r[2] <= index)
            else:
                yield from (r for r in self.expected[rank] if r != row and r[0] not in AWAY)
        elif kind is Kind.SEND_START:
            channel = self.channels[owner][1]
            gradient = channel.kind is TransferKind.GRADIENT
            if channel.kind is not TransferKind.WEIGHT:
                made = self.order.first_half if gradient else Kind.FORWARD
                yield made, channel.source_stage, index
            elif index >= 0:
                yield Kind.UPDATE, channel.source_stage, index
        elif kind is Kind.OFFLOAD_START:
            yield from self.saved(rank, owner, index)
        elif not kind.is_compute and kind is not Kind.RECEIVE_START:
            yield Kind(kind - 1), owner, index  # a START before its WAIT, OFFLOAD before FETCH
        elif kind.is_compute:
            yield from self.needs_of_computation(rank, row)

    def needs_of_computation(self, rank: int, row: Row) -> Iterator[Row]:
        kind, owner, index = row
        first = self.order.first_half
        if kind is Kind.FORWARD:
            yield from self.arrivals(rank, owner, index, TransferKind.ACTIVATION)
            if not self.overlaps:
                yield from self.arrivals(rank, owner, -1, TransferKind.WEIGHT)
            return
        if kind is Kind.BACKWARD_WEIGHT:
            yield Kind.BACKWARD_INPUT, owner, index
        elif kind is first and self.plan.stages[owner].recompute:
            yield Kind.RECOMPUTE, owner, index
        else:
            yield from self.saved(rank, owner, index)
            if (Kind.OFFLOAD_START, owner, index) in self.done[rank]:
                yield Kind.FETCH_WAIT, owner, index
        if kind is not Kind.RECOMPUTE and not self.plan.actions:
            earlier = [r[2] for r in self.expected[rank] if r[:2] == (kind, owner) and r[2] < index]
            yield from ((kind, owner, before) for before in sorted(earlier)[-1:])
        if kind is first:
            yield from self.arrivals(rank, owner, index, TransferKind.GRADIENT)
            for number, channel in self.channels:
                send = Kind.SEND_WAIT, number, index
                is_mine = (channel.source_rank, channel.source_stage) == (rank, owner)
                if is_mine and is_kept(self.plan, channel) and send in self.expected[rank]:
                    yield send

    def arrivals(self, rank: int, stage: int, index: int, kind: TransferKind) -> Iterator[Row]:
        """What brings the values or weights of a kind that a stage reads."""
        maker = self.order.first_half if kind is TransferKind.GRADIENT else Kind.FORWARD
        for number, channel in self.channels:
            if (channel.kind, channel.target_rank, channel.target_stage) == (kind, rank, stage):
                made = maker, channel.source_stage, index
                arrived = Kind.RECEIVE_WAIT, number, index
                if channel.is_local:
                    yield from [made] * (made in self.expected[rank])
                else:
                    yield from [arrived] * (arrived in self.expected[rank])

    def saved(self, rank: int, stage: int, index: int) -> Iterator[Row]:
        """What makes or brings what a backward starts from."""
        replica = self.plan.stages[stage].updating_ranks.index(rank)
        if is_apart(self.plan, stage, replica):
            yield from self.arrivals(rank, stage, index, TransferKind.SAVED)
        else:
            yield Kind.FORWARD, stage, index

    def ends_with(self, rank: int) -> Kind:
        """What completes a micro-batch on a rank: its forward, where no backward follows."""
        last = self.order.last_half
        return last if any(row[0] is last for row in self.expected[rank]) else Kind.FORWARD

    def versions(self, stage: int) -> Integers:
        """The version of the weights that every step of a stretch uses."""
        staleness = schedule_of(self.plan).staleness
        steps = np.arange(self.count // self.plan.micro_batches)
        return staleness.version(self.plan.warm_up[stage], steps)

    def check_weights(self, rank: int, action: Action) -> None:
        """Computations of overlapping steps use the right version, and messages hold theirs."""
        age, step = 0, self.plan.micro_batches
        made = sum(row[0] is Kind.UPDATE for row in self.done[rank])
        if self.overlaps and action.kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD):
            weights = {n for n, channel in self.channels if channel.kind is TransferKind.WEIGHT}
            arrived = [
                row for row in self.done[rank] if row[0] is Kind.RECEIVE_WAIT and row[1] in weights
            ]
            newest = len(arrived) - 1 if arrived else made
            age = newest - int(self.versions(action.stage)[action.micro_batch // step])
            if action.kind is self.ends_with(rank) and made != action.micro_batch // step:
                raise InvalidError(f"rank {rank}: {action} after {made} updates")
        if self.overlaps and action.kind is Kind.SEND_START:
            weights_of = self.channels[action.channel][1].kind is TransferKind.WEIGHT
            if weights_of and (action.micro_batch + 1) // step != made:
                raise InvalidError(f"rank {rank}: {action} holds version {made}")
        if action.weight_version != age:
            raise InvalidError(f"rank {rank}: {action} should use weights of age {age}")


def ends_of(channel: Channel) -> tuple[tuple[int, int], tuple[int, int]]:
    """The (stage, replica) that send and receive."""
    source = channel.source_stage, channel.source_replica
    return source, (channel.target_stage, channel.target_replica)


def row_of(action: Action) -> Row:
    """What a row does."""
    owner = action.channel if action.kind in OF_CHANNEL else action.stage
    return action.kind, owner, action.micro_batch


def rows(
    kinds: Sequence[Kind], owner: int, spans: Iterable[Span], stage: int | None = None
) -> Iterator[tuple[Row, Span]]:
    """Rows of some kinds for some samples."""
    for index, start, stop in spans:
        for kind in kinds:
            yield (kind, owner, index), (owner if stage is None else stage, start, stop)
