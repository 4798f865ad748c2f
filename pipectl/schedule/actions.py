"""Actions: the rows of a rank's program.

A schedule says what each rank computes and in which order; lowering adds the messages. The result
is :class:`Actions`, rows of small integers. An :class:`Action` is a view of one row, for people and
tests; an object per row would dominate the planning time of large models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Kind(IntEnum):
    """Kind of an action. ``START`` begins a background operation, ``WAIT`` ends it.

    ``REDUCE`` sums the gradients of a stage over its replicas. ``OFFLOAD`` moves what a micro-batch
    saved for its backward out of the device's memory, ``FETCH`` moves it back.
    """

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    RECOMPUTE = 4
    UPDATE = 5
    EVALUATE = 6
    SEND_START = 7
    SEND_WAIT = 8
    RECEIVE_START = 9
    RECEIVE_WAIT = 10
    REDUCE_START = 11
    REDUCE_WAIT = 12
    OFFLOAD_START = 13
    OFFLOAD_WAIT = 14
    FETCH_START = 15
    FETCH_WAIT = 16

    @property
    def is_compute(self) -> bool:
        """Whether the action occupies the rank's device."""
        return self <= Kind.EVALUATE


EVENT_NAMES = (*(kind.name.lower() for kind in Kind), "update_wait")
"""Name of each kind in timelines; the last one is the wait for all other ranks before UPDATE."""
COMPUTE_KINDS = tuple(kind.name.lower() for kind in Kind if kind.is_compute)
"""Names of the timeline events in which a rank computes; in all others it waits."""


class Action(NamedTuple):
    """One row of a program.

    Args:
        stage: stage that computes; for transfers, the local stage.
        micro_batch: index within the step; -1 for UPDATE, reductions and messages of weights. If
            steps overlap, indices continue from step to step, also of UPDATE.
        channel: index of a message's channel among the plan's channels; otherwise -1.
        start, stop: half-open range of samples that are computed or moved; both -1 for all.
        weight_version: age, in updates, of the weights that a computation uses; 0 is the newest.
    """

    kind: Kind
    stage: int
    micro_batch: int = -1
    channel: int = -1
    start: int = -1
    stop: int = -1
    weight_version: int = 0


Columns = npt.NDArray[np.int32]
Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Actions:
    """A sequence of actions as a read-only array of shape [actions, fields of Action]."""

    rows: Columns

    def __post_init__(self) -> None:
        self.rows.setflags(write=False)

    @classmethod
    def of(cls, actions: Iterable[Action]) -> Actions:
        """Make an array of action objects."""
        rows = np.array([tuple(a) for a in actions], dtype=np.int32)
        return cls(rows.reshape(-1, len(Action._fields)))

    def column(self, name: str) -> Columns:
        """Return one column by its :class:`Action` field name."""
        return self.rows[:, Action._fields.index(name)]

    def shifted(self, more: int) -> Actions:
        """Return the actions with ``more`` added to their micro-batches, except to -1."""
        rows = self.rows.copy()
        index = rows[:, Action._fields.index("micro_batch")]
        index += more * (index >= 0)
        return Actions(rows)

    def renumbered(self, numbers: Integers) -> Actions:
        """Return the actions with other micro-batches in the place of 0, 1, ...; not of -1."""
        rows = self.rows.copy()
        index = rows[:, Action._fields.index("micro_batch")]
        index[:] = np.append(numbers, -1)[index]
        return Actions(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Action]:
        for kind, *rest in self.rows.tolist():
            yield Action(Kind(kind), *rest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Actions) and np.array_equal(self.rows, other.rows)

    def __hash__(self) -> int:
        return hash(self.rows.tobytes())


EMPTY = Actions.of(())
