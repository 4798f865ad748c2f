"""How much memory a rank program holds, row by row; it follows from the order of rows alone.

From step to step: parameters, buffers and optimizer state. From the first backward of a stage to
UPDATE: the gradients of its parameters. A micro-batch adds, from its forward to the end of its
backward, the saved bytes of the stage; they include what the stage received and what it sends,
since a backward needs both. On top come buffers: a received value from RECEIVE_START to the end of
the action that reads it, and a gradient to send from the backward that makes it to its SEND_WAIT.

While an action runs, it holds more than it leaves behind: see :class:`pipectl.plan.StagePeaks`.
Where these are not known, an action is taken to hold no temporary values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pipectl.graph import TransferKind
from pipectl.plan import Plan, StageCost
from pipectl.schedule.actions import Actions, Kind, Program
from pipectl.schedule.channel import Channel, channels

Floats = npt.NDArray[np.float64]


def memory_bytes(plan: Plan, rank: int, program: Program) -> Floats:
    """The most bytes a rank holds while it executes each row of ``program.body``; shape [rows].

    The process itself (interpreter, torch, MPI) is not included.
    """
    changes = _Changes(plan, rank, program.body)
    after = np.cumsum(changes.born - changes.dead)
    before = np.concatenate([np.zeros(1), after])[: len(program.body)]
    return _resident_bytes(plan, rank) + before + changes.during


def peak_memory_bytes(
    plan: Plan, rank: int, program: Program, *, process_baseline_bytes: int = 0
) -> int:
    """The most a rank holds at once, the process included."""
    resident = _resident_bytes(plan, rank)
    peak = memory_bytes(plan, rank, program).max(initial=resident)
    return process_baseline_bytes + round(float(peak))


def peak_in_flight(program: Program, stage: int) -> int:
    """The most micro-batches of a stage that are between forward and backward at once."""
    rows = program.body
    mine = rows.column("stage") == stage
    forward = mine & (rows.column("kind") == Kind.FORWARD)
    backward = mine & (rows.column("kind") == Kind.BACKWARD)
    return int(np.cumsum(forward.astype(int) - backward).max(initial=0))


class _Changes:
    """Bytes by row.

    Attributes:
        born, dead: at the start and at the end of the row.
        during: the most that is allocated at once in it.
    """

    def __init__(self, plan: Plan, rank: int, rows: Actions) -> None:
        self._rows = rows
        self._costs = [stage.cost for stage in plan.stages]
        self.born, self.dead = np.zeros(len(rows)), np.zeros(len(rows))
        self._add_micro_batches(channels(plan))
        share = _shares(plan, rows)
        self.born *= share
        self.dead *= share
        self._add_gradients()
        self.during = self.born.copy()
        self._set_peaks(plan.stages_of_rank(rank))

    def _add_micro_batches(self, connections: Sequence[Channel]) -> None:
        gradients = [item for item in connections if item.kind is TransferKind.GRADIENT]
        activations = [
            item
            for item in connections
            if item.kind is TransferKind.ACTIVATION and not item.is_local
        ]
        saved = np.array([cost.saved_bytes for cost in self._costs], dtype=float)
        self._add(self.born, Kind.FORWARD, saved)
        self._add(self.dead, Kind.FORWARD, self._sums(activations, "target_stage"))
        self._add(self.born, Kind.BACKWARD, self._sums(gradients, "source_stage"))
        self._add(self.dead, Kind.BACKWARD, saved + self._sums(gradients, "target_stage"))
        sizes = [item.size_bytes for item in connections]
        self._add(self.born, Kind.RECEIVE_START, np.array(sizes, dtype=float), by="channel")
        sent = [item.size_bytes * (item.kind is TransferKind.GRADIENT) for item in connections]
        self._add(self.dead, Kind.SEND_WAIT, np.array(sent, dtype=float), by="channel")

    def _add_gradients(self) -> None:
        """Gradients of parameters: of each stage from its first backward, of all to UPDATE."""
        sizes = np.zeros(len(self._rows))
        for row, cost in self._first_backwards():
            sizes[row] = cost.accumulated_bytes
        self.born += sizes
        self.dead += np.where(self._rows.column("kind") == Kind.UPDATE, sizes.sum(), 0)

    def _set_peaks(self, mine: Iterable[int]) -> None:
        kinds, stages = self._rows.column("kind"), self._rows.column("stage")
        first = {int(stages[row]): row for row, _ in self._first_backwards()}
        for stage in mine:
            peaks = self._costs[stage].peaks
            if peaks is not None:
                here = stages == stage
                self.during[here & (kinds == Kind.FORWARD)] = peaks.forward_bytes
                self.during[here & (kinds == Kind.BACKWARD)] = peaks.backward_bytes
                self.during[kinds == Kind.UPDATE] += peaks.update_bytes
                self.during[first[stage]] = peaks.first_backward_bytes

    def _first_backwards(self) -> list[tuple[int, StageCost]]:
        """Row of the first backward of each stage, and what the stage costs."""
        backward = np.flatnonzero(self._rows.column("kind") == Kind.BACKWARD)
        stages, first = np.unique(self._rows.column("stage")[backward], return_index=True)
        rows = backward[first].tolist()
        return [(row, self._costs[stage]) for row, stage in zip(rows, stages, strict=True)]

    def _add(self, where: Floats, kind: Kind, amounts: Floats, *, by: str = "stage") -> None:
        chosen = self._rows.column("kind") == kind
        where[chosen] += amounts[self._rows.column(by)[chosen]]

    def _sums(self, connections: Iterable[Channel], end: str) -> Floats:
        """Bytes of all messages of one micro-batch by the stage at one end."""
        total = np.zeros(len(self._costs))
        for channel in connections:
            total[getattr(channel, end)] += channel.size_bytes
        return total


def _resident_bytes(plan: Plan, rank: int) -> int:
    return sum(plan.stages[stage].cost.resident_bytes for stage in plan.stages_of_rank(rank))


def _shares(plan: Plan, rows: Actions) -> Floats:
    """The size of each row's micro-batch relative to a full one."""
    micro_batch = rows.column("micro_batch")
    shares = np.ones(1 + micro_batch.max(initial=plan.micro_batches))
    shares[: plan.micro_batches] = plan.micro_batch_shares
    return shares[micro_batch]
