"""Actions and the integer columns that hold them.

A schedule says what each rank computes, in which order; lowering adds the messages. The program of
a rank that results is :class:`Actions`, rows of small integers. An :class:`Action` is a view of one
row, for people and tests: an object per row would dominate the planning of large models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Kind(IntEnum):
    """What an action does. ``START`` begins work in the background, ``WAIT`` ends it.

    ``REDUCE`` sums the gradients of a stage over its replicas; ``OFFLOAD`` moves what a
    micro-batch saved for its backward out of the device's memory, ``FETCH`` brings it back.
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
"""What timelines call every kind; the last is the wait for all other ranks before UPDATE."""
COMPUTE_KINDS = tuple(kind.name.lower() for kind in Kind if kind.is_compute)
"""Names of the timeline's events in which a rank computes; in all others it waits."""


class Action(NamedTuple):
    """One row.

    Args:
        stage: stage that computes; for transfers the local stage.
        micro_batch: index within the step; -1 for what belongs to all: UPDATE, reductions, and
            messages of weights. Where steps overlap, it counts through from step to step, and an
            UPDATE has that of the last backward before it.
        channel: index into the plan's channels for messages, else -1.
        start: first sample of the micro-batch that is computed or moved, with ``stop`` a
            half-open range; both -1 for all of it.
        weight_version: version of the weights that a computation uses, by its age in updates; 0
            is the newest.
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
        """Columns from action objects."""
        rows = np.array([tuple(a) for a in actions], dtype=np.int32)
        return cls(rows.reshape(-1, len(Action._fields)))

    def column(self, name: str) -> Columns:
        """One column by its :class:`Action` field name."""
        return self.rows[:, Action._fields.index(name)]

    def shifted(self, more: int) -> Actions:
        """The same for later micro-batches; what belongs to none stays."""
        rows = self.rows.copy()
        index = rows[:, Action._fields.index("micro_batch")]
        index += more * (index >= 0)
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
