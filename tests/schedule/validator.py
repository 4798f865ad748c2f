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
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipectl.compiled import compiled
from pipectl.errors import ScheduleError
from pipectl.graph import TransferKind
from pipectl.plan import Plan
from pipectl.schedule.actions import Action, Actions, Integers, Kind, Program
from pipectl.schedule.channel import Channel, channels, is_kept, messages
from pipectl.schedule.lowering import renewed
from pipectl.schedule.memory import peak_host_bytes, resident_bytes, stage_peaks_in_flight
from pipectl.schedule.placement import Portion, portion, roles
from pipectl.schedule.registry import is_unflushed, order_of
from pipectl.schedule.unflushed import steps_apart, with_versions
from pipectl.simulate.memory import memory_bytes
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
        order_of(plan, plan.micro_batches)
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
        stage_peaks_in_flight(plan, programs),
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
            arrives = forward
            if front is not back:
                arrives = self._arrival(stage, replica)
                back.expect(arrives, mine)
            _check_offload(back, stage, arrives, begins, mine)
        if held.replicas > 1:
            _check_reduction(back, complete)

    def _arrival(self, stage: int, replica: int) -> Item:
        """Where what a forward on another rank has saved is there."""
        saved = TransferKind.SAVED, stage, replica
        index = next(
            index
            for index, item in enumerate(channels(self.plan))
            if (item.kind, item.source_stage, item.source_replica) == saved
        )
        return Item(Kind.RECEIVE_WAIT, index)

    def check_channel(self, index: int, channel: Channel) -> None:
        """The messages of a channel, from what makes them to what reads them."""
        ends = self.audits[channel.source_rank], self.audits[channel.target_rank]
        made, read = self._users(channel)
        if channel.is_local:
            ends[0].check_order(made, read)
            return
        weights = channel.kind is TransferKind.WEIGHT
        if weights:
            uses = renewed(self.plan, channel.source_stage, self.micro_batches)
            carried = Portion(np.arange(len(uses)) * self.plan.micro_batches - 1)
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


def _check_offload(audit: Audit, stage: int, arrives: Item, begins: Item, mine: Portion) -> None:
    """Some micro-batches leave the device, all steps of the way, in order."""
    items = [Item(kind, stage) for kind in _AWAY]
    gone = np.isin(mine.micro_batches, audit.micro_batches(items[0]))
    for item in items:
        audit.expect(item, mine.some(np.flatnonzero(gone)))
    audit.check_chain(arrives, *items, begins)


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


def peak_memory_bytes(
    plan: Plan, rank: int, program: Program, *, process_baseline_bytes: int = 0
) -> int:
    """The most a rank's device holds at once, the process included."""
    resident = resident_bytes(plan, rank)
    peak = memory_bytes(plan, rank, program).max(initial=resident)
    return process_baseline_bytes + round(float(peak))


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


ONCE = Portion(np.array([-1]))
"""What belongs to no micro-batch."""

_WITH_CHANNEL = (Kind.SEND_START, Kind.SEND_WAIT, Kind.RECEIVE_START, Kind.RECEIVE_WAIT)
_HAS_CHANNEL = np.isin(np.arange(len(Kind)), _WITH_CHANNEL)


class Item(NamedTuple):
    """All rows of a kind of one stage or channel."""

    kind: Kind
    owner: int

    def __str__(self) -> str:
        of = "channel" if self.kind in _WITH_CHANNEL else "stage"
        return f"{self.kind.name} of {of} {self.owner}"


class Audit:
    """One rank's program; remembers which rows have been looked at."""

    def __init__(self, rank: int, program: Program) -> None:
        self.rank = rank
        self._rows = program.body
        self._seen = np.zeros(len(self._rows), dtype=bool)
        self._order, self._bounds = self._sorted()

    def _sorted(self) -> tuple[Integers, dict[Item, tuple[int, int]]]:
        """Rows by item and micro-batch, and where each item's are."""
        kind, stage, index, channel = (
            self._rows.column(name) for name in ("kind", "stage", "micro_batch", "channel")
        )
        owner = np.where(_HAS_CHANNEL[kind], channel, stage).astype(np.int64)
        owners, width = int(owner.max(initial=-1)) + 2, int(index.max(initial=-1)) + 2
        number = (kind * owners + owner + 1) * width + index + 1
        order = number.argsort(kind="stable")
        item = number[order] // width
        edges = np.flatnonzero(item[1:] != item[:-1]) + 1
        bounds = [0, *edges.tolist(), len(order)] if len(order) else [0]
        firsts = (divmod(first, owners) for first in item[bounds[:-1]].tolist())
        items = [Item(Kind(kind), owner - 1) for kind, owner in firsts]
        return order, dict(zip(items, pairwise(bounds), strict=True))

    def rows(self, item: Item) -> Integers:
        """Positions of an item's rows by micro-batch, whichever there are."""
        first, last = self._bounds.get(item, (0, 0))
        return self._order[first:last]

    def expect(self, item: Item, portion: Portion, stage: int | None = None) -> None:
        """An item's rows must be exactly a portion.

        Args:
            stage: of rows that belong to a channel.

        Raises:
            ScheduleError: a micro-batch is missing, twice, too much, or has other samples.
        """
        rows = self.rows(item)
        names = ("micro_batch", "start", "stop")
        found = [self._rows.column(name)[rows] for name in names]
        if not np.array_equal(found[0], portion.micro_batches):
            raise fault(
                f"rank {self.rank} has {item} for micro-batches {short(found[0])} instead of "
                f"once for each of {short(portion.micro_batches)}"
            )
        for name, have, wanted in zip(names[1:], found[1:], portion[1:], strict=True):
            if np.any(have != wanted):
                raise fault(
                    f"rank {self.rank} has {item} with {name} at samples {short(have)} instead "
                    f"of {wanted if isinstance(wanted, int) else short(wanted)}"
                )
        if stage is not None and np.any(self._rows.column("stage")[rows] != stage):
            raise fault(f"rank {self.rank} has {item} for another stage than {stage}")
        self._seen[rows] = True

    def micro_batches(self, item: Item) -> Integers:
        """Micro-batches of an item's rows."""
        found: Integers = self._rows.column("micro_batch")[self.rows(item)]
        return found

    def check_order(self, first: Item, second: Item) -> None:
        """The rows of ``first`` come before those of ``second``, for every micro-batch of both.

        An item of no micro-batch has one row, which comes before, or behind, all of the other's.
        """
        positions = [self.rows(first), self.rows(second)]
        index = [self.micro_batches(first), self.micro_batches(second)]
        if any(np.array_equal(item, ONCE.micro_batches) for item in index):
            late = positions[0].max(initial=-1) >= positions[1].min(initial=len(self._rows))
            where = ""
        else:
            both, one, other = _common(*index)
            wrong = np.flatnonzero(positions[0][one] >= positions[1][other])
            late = bool(len(wrong))
            where = f" for micro-batch {both[wrong[0]]}" if late else ""
        if late:
            raise fault(f"rank {self.rank}: {second} comes before {first}{where}")

    def check_chain(self, *items: Item) -> None:
        """Each item comes before the next."""
        for first, second in pairwise(items):
            self.check_order(first, second)

    def check_rising(self, item: Item, what: str) -> None:
        """The rows of an item come by rising micro-batch."""
        rows = self.rows(item)
        if np.any(np.diff(rows) < 0):
            order = self.micro_batches(item)[np.argsort(rows)]
            raise fault(
                f"rank {self.rank} {what} of stage {item.owner} in micro-batch order "
                f"{short(order)}, which is not ascending"
            )

    def check_nothing_else(self, updated: int) -> None:
        """Every row has been looked at but one UPDATE, the last.

        Args:
            updated: its stage.
        """
        rest, kinds = self._rest()
        if kinds != ["UPDATE"] or rest[0] != len(self._rows) - 1:
            raise fault(
                f"rank {self.rank} has {short(kinds)} beyond its stages and channels; "
                "one UPDATE at the end belongs there"
            )
        expected = Action(Kind.UPDATE, updated)
        if self._rows.rows[-1].tolist() != list(expected):
            raise fault(f"rank {self.rank} ends in {self._rows.rows[-1]} instead of {expected}")

    def check_newest(self, sends: Item, updates: Item) -> None:
        """Each update is sent before the next, the first message before any."""
        rows = self.rows(sends)
        if np.any(np.searchsorted(self.rows(updates), rows) != np.arange(len(rows))):
            raise fault(f"rank {self.rank} has {sends} with weights of another version")

    def check_steps(self, updates: Item, ended: Item, versions: Actions) -> None:
        """Of steps that are not flushed: each updates behind its own backwards, with weights of the
        right age in all that it computes, and there is nothing that has not been looked at.

        Args:
            ended: its backwards; the forwards, where a rank has no others.
            versions: these rows with the right ages.
        """
        rows = self.rows(updates)
        ends = np.searchsorted(rows, self.rows(ended))
        steps = np.searchsorted(self.micro_batches(updates), self.micro_batches(ended))
        if not np.array_equal(ends, steps):
            raise fault(f"rank {self.rank} updates stage {updates.owner} within a step")
        wrong = np.flatnonzero((self._rows.rows != versions.rows).any(axis=1))
        if len(wrong):
            raise fault(
                f"rank {self.rank} has {self._rows.rows[wrong[0]]} with weights of another age "
                f"than {versions.rows[wrong[0]]}"
            )
        if self._rest()[1]:
            raise fault(
                f"rank {self.rank} has {short(self._rest()[1])} beyond its stages and channels"
            )

    def _rest(self) -> tuple[Integers, list[str]]:
        """Rows that nobody has looked at, and their kinds."""
        rest = np.flatnonzero(~self._seen)
        return rest, [Kind(kind).name for kind in self._rows.column("kind")[rest]]


def _common(
    ones: Integers, others: Integers
) -> tuple[Integers, Integers | slice, Integers | slice]:
    """Micro-batches that are in both, rising, and their places there."""
    if np.array_equal(ones, others):
        return ones, slice(None), slice(None)
    return np.intersect1d(ones, others, assume_unique=True, return_indices=True)


def fault(message: str) -> ScheduleError:
    """The error for programs that cannot run."""
    return ScheduleError(
        f"rank programs: {message}", cure="write a new plan: pipectl plan JOB.yaml"
    )


def short(items: Sequence[object] | Integers, most: int = 12) -> str:
    """A list of at most some items."""
    shown = ", ".join(str(item) for item in items[:most])
    return f"[{shown}{', ...' if len(items) > most else ''}]"


_STARTS = (Kind.SEND_START, Kind.RECEIVE_START, Kind.REDUCE_START)
_WAITS = (Kind.RECEIVE_WAIT, Kind.SEND_WAIT, Kind.REDUCE_WAIT)
"""Each waits for what the other rank must have done: the start in the same place of ``_STARTS``."""

Start = tuple[int, int, int]
"""Kind, channel, micro-batch; of a reduction kind, stage, rank."""


def check_progress(
    connections: Sequence[Channel],
    programs: Sequence[Program],
    reducers: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Execute the transfers of all ranks without time.

    Computations and copies never block, so a rank stops only at a WAIT whose other end has not
    started. If all ranks get to their end in one such execution, they do in every one: what is
    started stays started.

    Args:
        reducers: ranks that sum gradients together, by stage.

    Raises:
        ScheduleError: with the ranks that wait for each other, in a circle, in words.
    """
    numbers = _Numbers(connections, programs, reducers or {})
    rows = [numbers.of(program.body) for program in programs]
    ends = np.cumsum([len(part) for part in rows])
    position = np.concatenate([[0], ends[:-1]])
    started = np.zeros(numbers.first_sum + len(numbers.sums), dtype=np.int64)
    everything = np.concatenate(rows)
    _execute(everything, position, ends, started, numbers.first_sum, numbers.sums)
    stopped = np.flatnonzero(position < ends).tolist()
    if stopped:
        begun = {r: everything[ends[r] - len(rows[r]) : position[r]] for r in stopped}
        awaited = {r: ~int(everything[position[r]]) for r in stopped}
        waits = {r: numbers.start(number, begun) for r, number in awaited.items()}
        raise _deadlock(connections, waits)


class _Numbers:
    """A number for everything that is started.

    Messages come by channel, then micro-batch (-1 first), the send before the receive; behind them
    the sums by stage.

    Attributes:
        first_sum: number of the first of these.
        sums: by stage, how many ranks start it.
    """

    def __init__(
        self,
        connections: Sequence[Channel],
        programs: Sequence[Program],
        reducers: Mapping[int, Sequence[int]],
    ) -> None:
        latest = [program.body.column("micro_batch").max(initial=-1) for program in programs]
        self._width = 2 * (2 + int(max(latest, default=-1)))
        self._reducers = reducers
        self.first_sum = len(connections) * self._width
        self.sums = np.zeros(1 + max(reducers, default=-1), dtype=np.int64)
        for stage, ranks in reducers.items():
            self.sums[stage] = len(ranks)

    def of(self, actions: Actions) -> Table:
        """What each row starts, and ``~`` of what it waits for; the other rows are left out."""
        kind = actions.column("kind")
        chosen = np.flatnonzero(_IS_TRANSFER[kind])
        kind = kind[chosen]
        channel, index = (actions.column(n)[chosen] for n in ("channel", "micro_batch"))
        found = channel.astype(np.int64) * self._width + 2 * (index + 1) + _RECEIVES[kind]
        sums = np.flatnonzero(_SUMS[kind])
        found[sums] = self.first_sum + actions.column("stage")[chosen][sums]
        numbers: Table = np.where(_IS_WAIT[kind], ~found, found)
        return numbers

    def start(self, number: int, begun: Mapping[int, Table]) -> Start:
        """What a number means.

        Args:
            begun: rows that stopped ranks have executed.
        """
        if number < self.first_sum:
            channel, place = divmod(number, self._width)
            return int(_STARTS[place % 2]), channel, place // 2 - 1
        stage = number - self.first_sum
        late = (r for r in self._reducers[stage] if r in begun and number not in begun[r])
        return int(Kind.REDUCE_START), stage, next(late)


def _marks(kinds: Sequence[Kind]) -> npt.NDArray[np.bool_]:
    found = np.zeros(len(Kind), dtype=bool)
    found[list(kinds)] = True
    return found


_IS_TRANSFER, _IS_WAIT = _marks([*_STARTS, *_WAITS]), _marks(_WAITS)
_RECEIVES = _marks([Kind.RECEIVE_START, Kind.SEND_WAIT])
_SUMS = _marks([Kind.REDUCE_START, Kind.REDUCE_WAIT])


def _deadlock(connections: Sequence[Channel], waits: dict[int, Start]) -> ScheduleError:
    path = [min(waits)]
    while path[-1] in waits and path[-1] not in path[:-1]:
        path.append(_awaited_rank(connections, waits[path[-1]]))
    circle = path[path.index(path[-1]) : -1] or path[:-1]
    sentences = [_sentence(connections, rank, waits[rank]) for rank in circle]
    return ScheduleError(
        f"rank programs: deadlock: {'; '.join(sentences)}",
        cure="choose a warm_up that does not rise from a stage to the next",
    )


def _awaited_rank(connections: Sequence[Channel], start: Start) -> int:
    if start[0] == Kind.REDUCE_START:
        return start[2]
    channel = connections[start[1]]
    return channel.source_rank if start[0] == Kind.SEND_START else channel.target_rank


def _sentence(connections: Sequence[Channel], rank: int, start: Start) -> str:
    kind, index, micro_batch = start
    other = _awaited_rank(connections, start)
    if kind == Kind.REDUCE_START:
        return f"rank {rank} waits for rank {other} to sum the gradients of stage {index}"
    what = f"the {connections[index]}"
    if micro_batch >= 0:
        what += f", micro-batch {micro_batch}"
    if kind == Kind.SEND_START:
        return f"rank {rank} waits to receive {what}, from rank {other}"
    return f"rank {rank} waits for rank {other} to receive {what}"


Table = npt.NDArray[np.int64]


@compiled
def _execute(
    rows: Table, position: Table, ends: Table, started: Table, first_sum: int, reducers: Table
) -> None:
    """Go on with every rank until it waits for what has not started; moves ``position``.

    Args:
        rows: of all ranks: the number of what a row starts, or ``~`` of what it waits for.
        position, ends: of every rank, its next row and the one behind its last.
        started: of every number, how often it was started.
        first_sum: numbers from here on are started by several ranks.
        reducers: how many these are.
    """
    ranks = len(ends)
    able = np.arange(ranks)
    waiting = np.full(len(started), -1, np.int32)
    following = np.full(ranks, -1, np.int64)
    count = ranks
    while count:
        count -= 1
        rank = able[count]
        while position[rank] < ends[rank]:
            number = rows[position[rank]]
            if number < 0:
                number = ~number
                wanted = 1 if number < first_sum else reducers[number - first_sum]
                if started[number] < wanted:
                    following[rank] = waiting[number]
                    waiting[number] = rank
                    break
            else:
                started[number] += 1
                wanted = 1 if number < first_sum else reducers[number - first_sum]
                if started[number] == wanted:
                    other = np.int64(waiting[number])
                    waiting[number] = -1
                    while other >= 0:
                        able[count] = other
                        count += 1
                        other = following[other]
            position[rank] += 1
