"""What a rank does at this moment, in memory that the node's watcher reads.

A rank writes it into shared memory, which takes about a microsecond; the newest is there whatever
becomes of the rank.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Annotated, Any, ClassVar, NamedTuple

_TEXT = 96


class Activity(NamedTuple):
    """What a rank does.

    Args:
        moves: actions that it has begun; the number of a rank that hangs stays the same.
        step: under way; 0 before the first.
        stage: -1 if the action belongs to none.
        peer: the rank for whose message, or for whose part in one, the action waits; -1 for none.
        in_program: whether the action is one of the rank's program, not a phase such as saving.
        waiting: whether it waits for other ranks right now.
        pace_s: how long its last step took.
        action: ``FORWARD micro-batch 4``, or a phase.
        awaited: of the peer, such as ``activation 5 of stage 2 from rank 2``.
    """

    moves: int = 0
    step: int = 0
    stage: Annotated[int, int] = -1
    peer: Annotated[int, int] = -1
    in_program: bool = False
    waiting: bool = False
    pace_s: float = 0.0
    action: str = ""
    awaited: str = ""


_KINDS: dict[type, Any] = {
    int: ctypes.c_int64,
    bool: ctypes.c_bool,
    float: ctypes.c_double,
    str: ctypes.c_char * _TEXT,
}


class _Memory(ctypes.Structure):
    """An activity as it lies in memory."""

    _fields_: ClassVar = [
        (name, _KINDS[type(default)]) for name, default in Activity._field_defaults.items()
    ]


SIZE = ctypes.sizeof(_Memory)
"""Bytes of a board."""


class Board:
    """Written by one rank.

    Attributes:
        handle: file descriptor of the memory, which has no name; -1 if nobody else can see it.
    """

    def __init__(self) -> None:
        try:
            self.handle = os.memfd_create("pipectl-board")
            os.ftruncate(self.handle, SIZE)
        except OSError:
            self.handle = -1
        self._memory = _Memory.from_buffer(mmap.mmap(self.handle, SIZE))
        self.phase("")

    def row(self, kind: str, stage: int, micro_batch: int) -> None:
        """An action of the program begins; those of all micro-batches have the number -1."""
        text = kind if micro_batch < 0 else f"{kind} micro-batch {micro_batch}"
        self._begin(text, stage, in_program=True)

    def program_row(self, text: bytes, stage: int) -> None:
        """The same, in encoded words that were made before."""
        memory = self._memory
        memory.peer, memory.stage, memory.in_program = -1, stage, True
        memory.action = text[:_TEXT]
        memory.moves += 1

    def phase(self, text: str) -> None:
        """Something begins that is not in the program."""
        self._begin(text, -1, in_program=False)

    def return_to(self, activity: Activity) -> None:
        """What was interrupted by a phase goes on."""
        self._begin(activity.action, activity.stage, in_program=activity.in_program)

    def awaits(self, peer: int, awaited: bytes) -> None:
        """The action under way depends on a rank; encoded words say what for."""
        self._memory.peer, self._memory.awaited = peer, awaited[:_TEXT]

    def step(self, number: int) -> None:
        """A step begins."""
        self._memory.step = number

    def waits(self, waiting: bool) -> None:
        """A wait for other ranks begins or ends."""
        self._memory.waiting = waiting

    def pace(self, seconds: float) -> None:
        """A step took so long."""
        self._memory.pace_s = seconds

    def read(self) -> Activity:
        """What the rank does now."""
        return _to_activity(self._memory)

    def _begin(self, action: str, stage: int, *, in_program: bool) -> None:
        memory = self._memory
        memory.peer, memory.stage, memory.in_program = -1, stage, in_program
        memory.action = action.encode(errors="replace")[:_TEXT]
        memory.moves += 1


def read_activity(memory: mmap.mmap) -> Activity:
    """What is on a board that another process writes."""
    return _to_activity(_Memory.from_buffer_copy(memory))


def _to_activity(memory: _Memory) -> Activity:
    values = (getattr(memory, name) for name in Activity._fields)
    return Activity._make(
        value.decode(errors="replace") if isinstance(value, bytes) else value for value in values
    )
