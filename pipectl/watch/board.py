"""What a rank does at this moment, in shared memory that the node's watcher reads.

Writing takes about a microsecond, and the last value stays readable whatever becomes of the rank.
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
        moves: number of actions that it has begun; of a rank that hangs it stays the same.
        step: current step; 0 before the first.
        stage: stage of the action; -1 for none.
        peer: rank for whose message, or part in a message, the action waits; -1 for none.
        in_program: whether the action is in the rank's program, not a phase such as saving.
        waiting: whether it waits for other ranks now.
        pace_s: time of its last step.
        action: ``FORWARD micro-batch 4``, or a phase.
        awaited: what it waits for, such as ``activation 5 of stage 2 from rank 2``.
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
    """An activity as bytes in memory."""

    _fields_: ClassVar = [
        (name, _KINDS[type(default)]) for name, default in Activity._field_defaults.items()
    ]


SIZE = ctypes.sizeof(_Memory)
"""Bytes of a board."""


class Board:
    """The memory to which one rank writes its activity.

    Attributes:
        handle: file descriptor of the memory, which has no name; -1 if it cannot be shared.
    """

    def __init__(self) -> None:
        try:
            self.handle = os.memfd_create("pipectl-board")
            os.ftruncate(self.handle, SIZE)
        except OSError:
            self.handle = -1
        self._shared = mmap.mmap(self.handle, SIZE)
        self._memory = _Memory.from_buffer(self._shared)
        self.phase("")

    def row(self, kind: str, stage: int, micro_batch: int) -> None:
        """An action of the program begins; -1 stands for all micro-batches."""
        text = kind if micro_batch < 0 else f"{kind} micro-batch {micro_batch}"
        self.program_row(text.encode(), stage)

    def program_row(self, text: bytes, stage: int) -> None:
        """As :meth:`row`, with a text that was encoded before."""
        memory = self._memory
        memory.peer, memory.stage, memory.in_program = -1, stage, True
        memory.action = text[:_TEXT]
        memory.moves += 1

    def phase(self, text: str) -> None:
        """A phase begins, which is not in the program."""
        self.return_to(Activity(action=text))

    def return_to(self, activity: Activity) -> None:
        """The activity that a phase has interrupted goes on."""
        memory = self._memory
        memory.peer, memory.stage, memory.in_program = -1, activity.stage, activity.in_program
        memory.action = activity.action.encode(errors="replace")[:_TEXT]
        memory.moves += 1

    def awaits(self, peer: int, awaited: bytes) -> None:
        """The current action waits for a rank; ``awaited`` says for what, encoded."""
        self._memory.peer, self._memory.awaited = peer, awaited[:_TEXT]

    def step(self, number: int) -> None:
        """A step begins."""
        self._memory.step = number

    def waits(self, waiting: bool) -> None:
        """A wait for other ranks begins or ends."""
        self._memory.waiting = waiting

    def pace(self, seconds: float) -> None:
        """The last step took this time."""
        self._memory.pace_s = seconds

    def read(self) -> Activity:
        """What the rank does now."""
        return read_activity(self._shared)


def read_activity(shared: mmap.mmap) -> Activity:
    """What is on a board that another process writes."""
    memory = _Memory.from_buffer_copy(shared)
    values = (getattr(memory, name) for name in Activity._fields)
    return Activity._make(
        value.decode(errors="replace") if isinstance(value, bytes) else value for value in values
    )
