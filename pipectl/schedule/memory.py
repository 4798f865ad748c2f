"""How much memory a rank program holds, row by row; it follows from the order of rows alone.

From step to step: parameters, buffers and optimizer state; where steps are not flushed, also older
versions of the parameters that a backward still uses. From the first backward of a stage to
UPDATE: the gradients of its parameters; while they are summed over replicas, their copies on the
way, and what other replicas send. A micro-batch adds, from its forward to the end of its
backward, what the stage keeps: its saved bytes, or under recomputation its inputs, and the rest
from RECOMPUTE on; of a stage in blocks the inputs of all, and the rest of the last. They include
what the stage received and what it sends, since a backward needs both. While they are offloaded,
they take the host's memory instead. Between the halves of a split backward, a micro-batch keeps
what its weight half needs.

On top come buffers of messages: from RECEIVE_START to the end of the action that reads a value,
or of RECEIVE_WAIT for weights, which are then the stage's; and, unless the sender keeps the value
anyway, from the action that makes it to SEND_WAIT. Where forward and backward of a stage have ranks
of their own, what it keeps is such a message.

While an action runs, it holds more than it leaves behind: see :class:`pipectl.plan.StagePeaks`.
Where these are not known, an action is taken to hold no temporary values.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from pipectl.arrays import Floats
from pipectl.graph import TransferKind
from pipectl.plan import Plan, Stage, StagePeaks
from pipectl.schedule.actions import Actions, Integers, Kind, Program
from pipectl.schedule.channel import Channel, channels, channels_of_rank, is_kept, messages
from pipectl.schedule.placement import Portion, is_apart, roles, shares
from pipectl.schedule.registry import is_unflushed


def memory_bytes(plan: Plan, rank: int, program: Program) -> Floats:
    """The most bytes a rank's device holds while it executes each row of a program.

    Shape [rows of prologue, body, epilogue]; more bodies between them hold as much. The process
    itself (interpreter, torch, MPI) is not included.
    """
    changes = Changes(plan, rank, program.unrolled(1, plan.micro_batches))
    return resident_bytes(plan, rank) + _before(changes.born - changes.dead) + changes.during


def host_bytes(plan: Plan, program: Program) -> Floats:
    """Bytes that its rank has offloaded while it executes each row; shape [rows]."""
    rows = program.unrolled(1, plan.micro_batches)
    kind = rows.column("kind")
    if not (kind == Kind.OFFLOAD_START).any():
        return np.zeros(len(rows))
    moved = plan.derived(kept_bytes)[rows.column("stage")] * shares(plan, rows)
    there: Floats = moved * (kind == Kind.OFFLOAD_START)
    return _before(there - moved * (kind == Kind.FETCH_WAIT)) + there


def peak_memory_bytes(
    plan: Plan, rank: int, program: Program, *, process_baseline_bytes: int = 0
) -> int:
    """The most a rank's device holds at once, the process included."""
    resident = resident_bytes(plan, rank)
    peak = memory_bytes(plan, rank, program).max(initial=resident)
    return process_baseline_bytes + round(float(peak))


def peak_host_bytes(plan: Plan, program: Program) -> int:
    """The most its rank has offloaded at once."""
    return round(float(host_bytes(plan, program).max(initial=0)))


def peak_in_flight(program: Program, stage: int, saved: int | None = None) -> int:
    """The most micro-batches that wait at once on a rank for their backward of a stage.

    Args:
        saved: channel of saved values, where the forward has another rank.
    """
    rows = program.unrolled(1, 0)
    mine, kind = rows.column("stage") == stage, rows.column("kind")
    begun = mine & (kind == Kind.FORWARD)
    if saved is not None:
        begun = (rows.column("channel") == saved) & (kind == Kind.RECEIVE_START)
    ended = mine & ((kind == Kind.BACKWARD) | (kind == Kind.BACKWARD_WEIGHT))
    return int(np.cumsum(begun.astype(int) - ended).max(initial=0))


def stage_peaks_in_flight(plan: Plan, programs: Sequence[Program]) -> tuple[int, ...]:
    """The same of every stage, on the replica with the most."""
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


def resident_bytes(plan: Plan, rank: int) -> int:
    """What a rank holds from step to step; optimizer state only where it updates."""
    costs = {role.stage: plan.stages[role.stage].cost for role in roles(plan, rank)}
    updated = {role.stage for role in roles(plan, rank) if role.kind is Kind.BACKWARD}
    return sum(
        cost.resident_bytes - (0 if stage in updated else cost.optimizer_bytes)
        for stage, cost in costs.items()
    )


def _before(changes: Floats) -> Floats:
    """The sum of all earlier rows."""
    return np.concatenate([np.zeros(1), np.cumsum(changes)])[: len(changes)]


def room_bytes(plan: Plan, rank: int, limit_bytes: float | None) -> int | None:
    """What a rank's copy of what it saves may take while a checkpoint is written.

    Ranks copy between two steps, when all that a step holds at its peak is still with the process.
    So the copy comes on top of the peak; without room for it, the rank writes from where it is.
    None if nothing limits the copy, or the peak is not known.

    Args:
        limit_bytes: of this rank, which may be less than that of the job.
    """
    if limit_bytes is None or limit_bytes == inf or plan.prediction is None:
        return None
    return max(0, int(limit_bytes) - plan.prediction.peak_memory_bytes[rank])


def copy_bytes(plan: Plan, rank: int, limit_bytes: float | None) -> int:
    """What it takes: parameters, buffers and optimizer state of the rank; 0 without room."""
    room, state = room_bytes(plan, rank, limit_bytes), resident_bytes(plan, rank)
    return state if room is None or state <= room else 0


class Changes:
    """Bytes by row of a program of one rank.

    Attributes:
        born, dead: at the start and at the end of the row.
        during: the most that is allocated at once in it.
    """

    def __init__(self, plan: Plan, rank: int, rows: Actions) -> None:
        self._plan, self._rank, self._rows = plan, rank, rows
        self._kind, self._stage = rows.column("kind"), rows.column("stage")
        self._share = shares(plan, rows)
        self._stages = plan.stages
        self._at = _Positions(rows)
        splits = bool((self._kind == Kind.BACKWARD_INPUT).any())
        self._backward = Kind.BACKWARD_INPUT if splits else Kind.BACKWARD
        self._first_backwards = self._found_first_backwards()
        self.born, self.dead = np.zeros(len(rows)), np.zeros(len(rows))
        self._add_kept()
        self._add_messages()
        self._add_gradients()
        self._add_sums()
        if is_unflushed(plan):
            self._add_versions()
        self.during = self.born.copy()
        self._set_peaks()

    def _add_kept(self) -> None:
        """What micro-batches leave for their backwards."""
        plan, kept = self._plan, self._plan.derived(kept_bytes)
        full = plan.derived(_saved)
        here = np.zeros(len(full))
        for role in roles(plan, self._rank):
            here[role.stage] = not is_apart(plan, role.stage, role.replica)
        self._add(self.born, Kind.FORWARD, kept * here)
        self._add(self.born, Kind.RECOMPUTE, full - kept)
        self._add(self.dead, Kind.BACKWARD, full - kept * (1 - here))
        self._add_between_halves(kept * (1 - here))
        self._add(self.dead, Kind.OFFLOAD_WAIT, kept)
        self._add(self.born, Kind.FETCH_START, kept)

    def _add_between_halves(self, received: Floats) -> None:
        """What the weight half of a backward needs.

        Args:
            received: of what the input half starts from, the part that is a message.
        """
        grown, freed, between = self._plan.derived(_between_halves)
        self._add(self.born, Kind.BACKWARD_INPUT, grown)
        self._add(self.dead, Kind.BACKWARD_INPUT, freed - received)
        self._add(self.dead, Kind.BACKWARD_WEIGHT, between)

    def _add_messages(self) -> None:
        """Buffers of what is received, and of what is sent and not kept."""
        micro_batches = 1 + int(self._rows.column("micro_batch").max(initial=-1))
        for index, channel in channels_of_rank(self._plan, self._rank):
            if channel.kind is TransferKind.WEIGHT:
                self._add_weights(index, channel)
                continue
            if channel.is_local:
                if channel.kind is TransferKind.GRADIENT:
                    self._add_local(channel, messages(self._plan, channel, micro_batches))
            elif channel.target_rank == self._rank:
                activation = channel.kind is TransferKind.ACTIVATION
                reader = Kind.FORWARD if activation else self._backward
                self._add_buffer(index, channel, Kind.RECEIVE_START, reader, channel.target_stage)
            if self._is_buffer(channel):
                gradient = channel.kind is TransferKind.GRADIENT
                maker = self._backward if gradient else Kind.FORWARD
                self._add_buffer(index, channel, Kind.SEND_WAIT, maker, channel.source_stage)

    def _add_weights(self, index: int, channel: Channel) -> None:
        """Buffers of weights that arrive; what is sent is held anyway."""
        mine = self._rows.column("channel") == index
        self.born[mine & (self._kind == Kind.RECEIVE_START)] += channel.size_bytes
        self.dead[mine & (self._kind == Kind.RECEIVE_WAIT)] += channel.size_bytes

    def _is_buffer(self, channel: Channel) -> bool:
        """Whether this rank sends it from memory that it keeps for nothing else."""
        if channel.is_local or channel.source_rank != self._rank:
            return False
        return not is_kept(self._plan, channel)

    def _add_buffer(
        self, index: int, channel: Channel, transfer: Kind, user: Kind, stage: int
    ) -> None:
        """A buffer that lives between a transfer's row and the row of its user."""
        rows = np.flatnonzero((self._rows.column("channel") == index) & (self._kind == transfer))
        amounts = channel.size_bytes * self._share[rows]
        users = self._at(user, stage, self._rows.column("micro_batch")[rows])
        received = transfer is Kind.RECEIVE_START
        born, dead = (rows, users) if received else (users, rows)
        np.add.at(self.born, born, amounts)
        np.add.at(self.dead, dead, amounts)

    def _add_local(self, channel: Channel, portion: Portion) -> None:
        """A gradient between two stages of this rank, from one backward to the other."""
        made = self._at(self._backward, channel.source_stage, portion.micro_batches)
        read = self._at(self._backward, channel.target_stage, portion.micro_batches)
        part = (portion.stop - portion.start) / self._plan.micro_batch_size
        whole = isinstance(portion.start, int)
        amounts = channel.size_bytes * (self._share[made] if whole else part)
        np.add.at(self.born, made, amounts)
        np.add.at(self.dead, read, amounts)

    def _add_gradients(self) -> None:
        """Gradients of parameters: of each stage from its first backward, of all to UPDATE."""
        for row, stage in self._first_backwards:
            cost = stage.cost
            self.born[row] += cost.accumulated_bytes
            self.dead[self._update_behind(row)] += cost.accumulated_bytes

    def _add_sums(self) -> None:
        """Gradients on their way between replicas."""
        moved = np.array([stage.reduction_bytes for stage in self._plan.stages], dtype=float)
        self._add(self.born, Kind.REDUCE_START, moved)
        self._add(self.dead, Kind.REDUCE_WAIT, moved)

    def _add_versions(self) -> None:
        """Versions of parameters beside the newest: from the UPDATE that outdates them to the last
        backward that uses them."""
        updates = np.flatnonzero(self._kind == Kind.UPDATE)
        backward = np.flatnonzero(self._kind == Kind.BACKWARD)
        age = self._rows.column("weight_version")[backward]
        last = dict(zip((np.searchsorted(updates, backward) - age).tolist(), backward, strict=True))
        for version, row in last.items():
            if version < len(updates) and row > updates[version]:
                size = self._stages[self._stage[row]].cost.parameter_bytes
                self.born[updates[version]] += size
                self.dead[row] += size

    def _set_peaks(self) -> None:
        for index in {role.stage for role in roles(self._plan, self._rank)}:
            stage, here = self._stages[index], self._stage == index
            peaks = stage.running.peaks
            if peaks is None:
                continue
            self.during[here & (self._kind == Kind.FORWARD)] = peaks.forward_bytes
            self.during[here & (self._kind == Kind.RECOMPUTE)] = stage.recompute_peak_bytes
            self.during[here & (self._kind == Kind.BACKWARD)] = peaks.backward_bytes
            for half, most in halves_peaks(stage, peaks):
                self.during[here & (self._kind == half)] = most
        for row, stage in self._first_backwards:
            peaks = stage.running.peaks
            if peaks is not None:
                self.during[self._update_behind(row)] += peaks.update_bytes
                more = stage.input_half_bytes if self._kind[row] == Kind.BACKWARD_INPUT else 0
                self.during[row] = peaks.first_backward_bytes + more

    def _found_first_backwards(self) -> list[tuple[int, Stage]]:
        """Rows of the first backward of each stage in each step, and that stage."""
        begins = (self._kind == Kind.BACKWARD) | (self._kind == Kind.BACKWARD_INPUT)
        backward = np.flatnonzero(begins)
        steps = np.cumsum(self._kind == Kind.UPDATE)[backward]
        stages = self._stage[backward]
        _, first = np.unique(steps * len(self._stages) + stages, return_index=True)
        return [(int(backward[index]), self._stages[stages[index]]) for index in first]

    def _update_behind(self, row: int) -> Integers:
        """The next UPDATE, if there is one."""
        updates = np.flatnonzero(self._kind == Kind.UPDATE)
        found: Integers = updates[np.searchsorted(updates, row) :][:1]
        return found

    def _add(self, where: Floats, kind: Kind, amounts: Floats) -> None:
        """Amounts by stage, for each row of a kind."""
        chosen = np.flatnonzero(self._kind == kind)
        where[chosen] += amounts[self._stage[chosen]] * self._share[chosen]


class _Positions:
    """Where the computations of a program are."""

    def __init__(self, rows: Actions) -> None:
        self._columns = rows.column("kind"), rows.column("stage"), rows.column("micro_batch")
        self._found: dict[tuple[Kind, int], Integers] = {}

    def __call__(self, kind: Kind, stage: int, micro_batches: Integers) -> Integers:
        """Rows of some micro-batches; each is there once."""
        if (kind, stage) not in self._found:
            kinds, stages, index = self._columns
            rows = np.flatnonzero((kinds == kind) & (stages == stage))
            table = np.full(1 + int(index.max(initial=-1)), -1)
            table[index[rows]] = rows
            self._found[kind, stage] = table
        found: Integers = self._found[kind, stage][micro_batches]
        return found


def halves_peaks(stage: Stage, peaks: StagePeaks) -> tuple[tuple[Kind, int], ...]:
    """The most bytes that the halves of a backward allocate.

    The input half holds what a whole backward does, and what it leaves; the weight half adds to
    gradients that are there, one operator's at a time.
    """
    return (
        (Kind.BACKWARD_INPUT, peaks.backward_bytes + stage.input_half_bytes),
        (Kind.BACKWARD_WEIGHT, min(peaks.backward_bytes, stage.cost.accumulated_bytes)),
    )


def kept_bytes(plan: Plan) -> Floats:
    """Kept by a full micro-batch from forward to backward, of every stage."""
    return np.array([stage.kept_bytes for stage in plan.stages], dtype=float)


def _saved(plan: Plan) -> Floats:
    """Held by it when its backward begins."""
    return np.array([stage.running.saved_bytes for stage in plan.stages], dtype=float)


def _between_halves(plan: Plan) -> Floats:
    """What a full micro-batch grows, frees and keeps between halves; shape [3, stages]."""
    costs = [stage.running for stage in plan.stages]
    rows = [(cost.grown_bytes, cost.freed_bytes, cost.between_bytes) for cost in costs]
    return np.array(rows, dtype=float).T
