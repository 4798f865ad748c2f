"""Actions and the integer columns that hold them.

A schedule says what each rank computes, in which order; lowering adds the messages. Both are
rows of the same small integer columns: an :class:`Action` is a view of one row, for people and
tests, because building a Python object per row would dominate large plans.
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


_MICRO_BATCH = Action._fields.index("micro_batch")
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

    @classmethod
    def of_columns(cls, **columns: Integers) -> Actions:
        """Columns by :class:`Action` field name, all equally long; the others get its defaults.

        ``kind`` and ``stage`` have no default.
        """
        rows = np.empty((len(columns["kind"]), len(Action._fields)), dtype=np.int32)
        for position, name in enumerate(Action._fields):
            rows[:, position] = columns[name] if name in columns else Action._field_defaults[name]
        return cls(rows)

    def column(self, name: str) -> Columns:
        """One column by its :class:`Action` field name."""
        return self.rows[:, Action._fields.index(name)]

    def shifted(self, more: int) -> Actions:
        """The same for later micro-batches; what belongs to none stays."""
        if not more:
            return self
        rows = self.rows.copy()
        rows[:, _MICRO_BATCH] += more * (rows[:, _MICRO_BATCH] >= 0)
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


@dataclass(frozen=True)
class Program:
    """What one rank does: once at the start, every optimizer step, once at the end.

    Flushed (synchronous) schedules have only a body. In others micro-batches are counted through,
    as if there were one body; see :meth:`parts`.
    """

    body: Actions
    prologue: Actions = EMPTY
    epilogue: Actions = EMPTY

    def parts(self, bodies: int, micro_batches: int) -> Iterator[tuple[Actions, int]]:
        """All rows in order, each part with what is to be added to its micro-batches.

        Args:
            bodies: how often the body is executed, at least once.
            micro_batches: of a step, by which one body is ahead of the one before.
        """
        yield self.prologue, 0
        for number in range(bodies):
            yield self.body, number * micro_batches
        yield self.epilogue, (bodies - 1) * micro_batches

    def unrolled(self, bodies: int, micro_batches: int) -> Actions:
        """:meth:`parts` as one sequence."""
        if bodies == 1 and not len(self.prologue) and not len(self.epilogue):
            return self.body
        parts = (rows.shifted(more) for rows, more in self.parts(bodies, micro_batches))
        return Actions(np.concatenate([part.rows for part in parts]))
