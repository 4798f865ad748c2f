"""Validation: proves that rank programs can run together, before any of them does.

Sends are taken as rendezvous: a message moves only when both ends have started it, as MPI may do
with any message. What holds then holds for sends that MPI buffers, too.

Proved are:

- Every stage computes every sample of every micro-batch once, backwards (hence the accumulation of
  gradients) in ascending order on each replica, unless a user's own lists say otherwise.
- A backward comes behind its recomputation, that behind what it starts from, and the weight half of
  one behind its input half. What is offloaded is gone before it is fetched, and there before it is
  needed.
- Every message is started and ended once on both ends, in the same order. Values are made before
  they are sent, there before they are read, and not released while they are sent.
- Gradients of replicas are summed behind the last backward; UPDATE is last.
- No ranks wait for each other, and device memory is within the limit.

Where steps are not flushed, all that holds from the first prologue to the last epilogue with two
bodies between them; every step updates behind its backwards, and all it computes uses weights of
the version that the schedule says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipectl.errors import ScheduleError
from pipectl.graph import TransferKind
from pipectl.plan import Plan
from pipectl.schedule.actions import Kind, Program
from pipectl.schedule.audit import ONCE, Audit, Item, fault, short
from pipectl.schedule.catalogue import order_of
from pipectl.schedule.channel import Channel, channels, is_kept, messages
from pipectl.schedule.deadlock import check_progress
from pipectl.schedule.memory import peak_host_bytes, peak_in_flight, peak_memory_bytes
from pipectl.schedule.placement import Portion, portion, roles
from pipectl.schedule.renewal import renewals
from pipectl.schedule.unflushed import check as check_unflushed
from pipectl.schedule.unflushed import is_unflushed, steps_apart, with_versions
from pipectl.units import format_bytes

BODIES = 2
"""Where steps are not flushed; so messages of one body meet those of the next."""

_AWAY = (Kind.OFFLOAD_START, Kind.OFFLOAD_WAIT, Kind.FETCH_START, Kind.FETCH_WAIT)


@dataclass(frozen=True)
class Proof:
    """What valid programs need.

    Args:
        peak_in_flight: of every stage, micro-batches between forward and backward, on the replica
            with the most.
        peak_memory_bytes: of every rank's device, the process included.
        peak_host_bytes: offloaded by every rank.
    """

    peak_in_flight: tuple[int, ...]
    peak_memory_bytes: tuple[int, ...]
    peak_host_bytes: tuple[int, ...]


def validate(
    plan: Plan,
    programs: Sequence[Program],
    micro_batches: int | None = None,
    *,
    process_baseline_bytes: int = 0,
) -> Proof:
    """Check the programs of all ranks against each other and against the plan, as said above.

    Args:
        programs: of every rank; if the schedule flushes, their bodies are checked.
        micro_batches: of the step; by default the plan's.
        process_baseline_bytes: what a process holds before it has a stage.

    Raises:
        ScheduleError: naming the ranks, stages and micro-batches of the first fault.
    """
    if len(programs) != plan.ranks:
        raise fault(f"{len(programs)} programs for {plan.ranks} ranks")
    count = micro_batches or plan.micro_batches
    if is_unflushed(plan):
        check_unflushed(plan)
        count = plan.micro_batches * (BODIES + steps_apart(plan))
        programs = [Program(item.unrolled(BODIES, plan.micro_batches)) for item in programs]
    step = _Step(plan, programs, count)
    for stage in range(len(plan.stages)):
        for replica in range(plan.stages[stage].replicas):
            step.check_replica(stage, replica)
    for index, channel in enumerate(channels(plan)):
        step.check_channel(index, channel)
    for rank in range(plan.ranks):
        step.check_updates(rank)
    check_progress(channels(plan), programs, _reducers(plan))
    return Proof(
        _in_flight(plan, programs),
        _check_memory(plan, programs, process_baseline_bytes),
        tuple(peak_host_bytes(plan, program) for program in programs),
    )


class _Step:
    """One step of all ranks."""

    def __init__(self, plan: Plan, programs: Sequence[Program], micro_batches: int) -> None:
        self.plan = plan
        self.micro_batches = micro_batches
        self.programs = programs
        self.audits = [Audit(rank, program) for rank, program in enumerate(programs)]
        self._order = order_of(plan, micro_batches)

    def check_replica(self, stage: int, replica: int) -> None:
        """What one replica computes, and what it does to its memory and gradients."""
        held = self.plan.stages[stage]
        mine = portion(self.plan, stage, replica, self.micro_batches)
        front, back = (self.audits[ranks[replica]] for ranks in (held.ranks, held.updating_ranks))
        forward, backward = Item(Kind.FORWARD, stage), Item(self._order.first_half, stage)
        complete = Item(self._order.last_half, stage)
        front.expect(forward, mine)
        for item in dict.fromkeys((backward, complete)):
            back.expect(item, mine)
            if not self.plan.actions:
                back.check_rising(item, "accumulates gradients")
        if complete != backward:
            back.check_order(backward, complete)
        begins = self._begins(stage)
        if begins != backward:
            back.expect(begins, mine)
            back.check_order(begins, backward)
        if front is back:
            front.check_order(forward, begins)
        if held.offload:
            _check_offload(front, forward, begins, mine)
        if held.replicas > 1:
            _check_reduction(back, complete)

    def check_channel(self, index: int, channel: Channel) -> None:
        """The messages of a channel, from what makes them to what reads them."""
        ends = self.audits[channel.source_rank], self.audits[channel.target_rank]
        made, read = self._users(channel)
        if channel.is_local:
            ends[0].check_order(made, read)
            return
        weights = channel.kind is TransferKind.WEIGHT
        if weights:
            carried = renewals(self.plan, channel.source_stage, self.micro_batches)
        else:
            carried = messages(self.plan, channel, self.micro_batches)
        send, sent = Item(Kind.SEND_START, index), Item(Kind.SEND_WAIT, index)
        receive, received = Item(Kind.RECEIVE_START, index), Item(Kind.RECEIVE_WAIT, index)
        for item in send, sent:
            ends[0].expect(item, carried, channel.source_stage)
        for item in receive, received:
            ends[1].expect(item, carried, channel.target_stage)
        ends[0].check_chain(*([] if weights else [made]), send, sent)
        ends[1].check_chain(receive, received)
        if not (weights and is_unflushed(self.plan)):  # ages say which forwards read what
            ends[1].check_order(received, read)
        elif weights:
            ends[0].check_newest(send, Item(Kind.UPDATE, channel.source_stage))
        if is_kept(self.plan, channel):
            ends[0].check_order(sent, Item(self._order.first_half, channel.source_stage))
        _check_same_order(channel, ends, carried, send, receive)

    def check_updates(self, rank: int) -> None:
        """Where a rank updates its stages; to be asked when all else is checked."""
        plan, audit = self.plan, self.audits[rank]
        mine = roles(plan, rank)
        stage = min((role.stage for role in mine if role.kind is Kind.BACKWARD), default=-1)
        if not is_unflushed(plan):
            audit.check_nothing_else(stage)
            return
        updates = Item(Kind.UPDATE, stage)
        lasts = np.arange(plan.micro_batches - 1, self.micro_batches, plan.micro_batches)
        audit.expect(updates, Portion(lasts))
        right = with_versions(plan, self.programs[rank].body)
        ended = [Item(role.kind, role.stage) for role in mine if stage < 0 or role.stage == stage]
        audit.check_steps(updates, ended[-1] if ended else updates, right)

    def _begins(self, stage: int) -> Item:
        """What a backward begins with."""
        again = self.plan.stages[stage].recompute
        return Item(Kind.RECOMPUTE if again else self._order.first_half, stage)

    def _users(self, channel: Channel) -> tuple[Item, Item]:
        """What makes a channel's messages, and what reads them."""
        source, target = channel.source_stage, channel.target_stage
        if channel.kind is TransferKind.GRADIENT:
            half = self._order.first_half
            return Item(half, source), Item(half, target)
        saved = channel.kind is TransferKind.SAVED
        read = self._begins(target) if saved else Item(Kind.FORWARD, target)
        return Item(Kind.FORWARD, source), read


def _check_offload(audit: Audit, forward: Item, begins: Item, mine: Portion) -> None:
    """Some micro-batches leave the device, all steps of the way, in order."""
    items = [Item(kind, forward.owner) for kind in _AWAY]
    gone = np.isin(mine.micro_batches, audit.micro_batches(items[0]))
    for item in items:
        audit.expect(item, mine.some(np.flatnonzero(gone)))
    audit.check_chain(forward, *items, begins)


def _check_reduction(audit: Audit, backward: Item) -> None:
    items = [Item(kind, backward.owner) for kind in (Kind.REDUCE_START, Kind.REDUCE_WAIT)]
    for item in items:
        audit.expect(item, ONCE)
    audit.check_chain(backward, *items)


def _check_same_order(
    channel: Channel, ends: tuple[Audit, Audit], carried: Portion, send: Item, receive: Item
) -> None:
    orders = [
        carried.micro_batches[np.argsort(audit.rows(item))]
        for audit, item in zip(ends, (send, receive), strict=True)
    ]
    if not np.array_equal(orders[0], orders[1]):
        raise fault(
            f"{channel}: rank {ends[0].rank} sends micro-batches {short(orders[0])}, "
            f"rank {ends[1].rank} receives {short(orders[1])}"
        )


def _reducers(plan: Plan) -> Mapping[int, Sequence[int]]:
    """Ranks that sum the gradients of a stage together, of every stage with replicas."""
    return {
        index: stage.updating_ranks for index, stage in enumerate(plan.stages) if stage.replicas > 1
    }


def _in_flight(plan: Plan, programs: Sequence[Program]) -> tuple[int, ...]:
    saved = {
        (channel.target_stage, channel.target_rank): index
        for index, channel in enumerate(channels(plan))
        if channel.kind is TransferKind.SAVED
    }
    return tuple(
        max(
            peak_in_flight(programs[rank], index, saved.get((index, rank)))
            for rank in stage.updating_ranks
        )
        for index, stage in enumerate(plan.stages)
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
