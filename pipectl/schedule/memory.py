"""How much memory a rank program holds, row by row; it follows from the order of rows alone.

Resident all the time: parameters, as much for their gradients, and optimizer state. A
micro-batch adds, from its forward to the end of its backward, the saved bytes of the stage; they
include what the stage received and what it sends, since a backward needs both. On top come
buffers: a received value from RECEIVE_START to the end of the action that reads it, and a
gradient to send from the backward that makes it to its SEND_WAIT.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from pipectl.graph import TransferKind
from pipectl.plan import Plan
from pipectl.schedule.actions import Actions, Kind, Program
from pipectl.schedule.channel import Channel, channels

Floats = npt.NDArray[np.float64]


def memory_bytes(plan: Plan, rank: int, program: Program) -> Floats:
    """Bytes a rank holds while it executes each row of ``program.body``; shape [rows].

    The process itself (interpreter, torch, MPI) is not included.
    """
    rows = program.body
    share = _shares(plan, rows)
    changes = _Changes(plan, rows)
    born, dead = changes.born * share, changes.dead * share
    before = np.concatenate([np.zeros(1), np.cumsum(born - dead)])[: len(rows)]
    return _resident_bytes(plan, rank) + before + born


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
    """Bytes born at the start and dead at the end of each row, for full micro-batches."""

    def __init__(self, plan: Plan, rows: Actions) -> None:
        self.rows, self.stages = rows, len(plan.stages)
        self.born, self.dead = np.zeros(len(rows)), np.zeros(len(rows))
        connections = channels(plan)
        gradients = [item for item in connections if item.kind is TransferKind.GRADIENT]
        activations = [
            item
            for item in connections
            if item.kind is TransferKind.ACTIVATION and not item.is_local
        ]
        saved = np.array([stage.cost.saved_bytes for stage in plan.stages], dtype=float)
        self._add(self.born, Kind.FORWARD, saved)
        self._add(self.dead, Kind.FORWARD, self._sums(activations, "target_stage"))
        self._add(self.born, Kind.BACKWARD, self._sums(gradients, "source_stage"))
        self._add(self.dead, Kind.BACKWARD, saved + self._sums(gradients, "target_stage"))
        sizes = [item.size_bytes for item in connections]
        self._add(self.born, Kind.RECEIVE_START, np.array(sizes, dtype=float), by="channel")
        sent = [item.size_bytes * (item.kind is TransferKind.GRADIENT) for item in connections]
        self._add(self.dead, Kind.SEND_WAIT, np.array(sent, dtype=float), by="channel")

    def _add(self, where: Floats, kind: Kind, amounts: Floats, *, by: str = "stage") -> None:
        chosen = self.rows.column("kind") == kind
        where[chosen] += amounts[self.rows.column(by)[chosen]]

    def _sums(self, connections: Iterable[Channel], end: str) -> Floats:
        """Bytes of all messages of one micro-batch by the stage at one end."""
        total = np.zeros(self.stages)
        for channel in connections:
            total[getattr(channel, end)] += channel.size_bytes
        return total


def _resident_bytes(plan: Plan, rank: int) -> int:
    costs = [plan.stages[stage].cost for stage in plan.stages_of_rank(rank)]
    return sum(2 * cost.parameter_bytes + cost.optimizer_bytes for cost in costs)


def _shares(plan: Plan, rows: Actions) -> Floats:
    """The size of each row's micro-batch relative to a full one."""
    micro_batch = rows.column("micro_batch")
    shares = np.ones(1 + micro_batch.max(initial=plan.micro_batches))
    shares[: plan.micro_batches] = plan.micro_batch_shares
    return shares[micro_batch]
