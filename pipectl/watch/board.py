"""What a rank does at this moment, in shared memory that the node's watcher reads.

Writing takes about a microsecond, and the last value stays readable whatever becomes of the rank.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
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


_ACTION_FIELDS, _WAIT_FIELDS = ("stage", "in_program", "action"), ("awaited", "peer")
"""Written at once, each with the peer: they are side by side in memory."""


class _Memory(ctypes.Structure):
    """An activity as bytes in memory."""

    _fields_: ClassVar = [
        (name, _KINDS[type(Activity._field_defaults[name])])
        for name in ("moves", "step", "waiting", "pace_s", *_WAIT_FIELDS, *_ACTION_FIELDS)
    ]


SIZE = ctypes.sizeof(_Memory)
"""Bytes of a board."""
_ACTION, _WAIT = struct.Struct(f"=qq?{_TEXT}s"), struct.Struct(f"={_TEXT}sq")
_ACTION_PLACE = slice(_Memory.peer.offset, _Memory.peer.offset + _ACTION.size)
_WAIT_PLACE = slice(_Memory.awaited.offset, _Memory.awaited.offset + _WAIT.size)


def action_record(action: str, stage: int, *, in_program: bool = True) -> bytes:
    """What :meth:`Board.begin` writes for an action."""
    return _ACTION.pack(-1, stage, in_program, action.encode(errors="replace"))


def wait_record(awaited: str, peer: int) -> bytes:
    """What :meth:`Board.awaits` writes for a wait."""
    return _WAIT.pack(awaited.encode(errors="replace"), peer)


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
        self._moves = 0
        self.phase("")

    def begin(self, action: bytes) -> None:
        """An action begins; see :func:`action_record`."""
        self._shared[_ACTION_PLACE] = action
        self._moves += 1
        self._memory.moves = self._moves

    def row(self, kind: str, stage: int, micro_batch: int) -> None:
        """An action of the program begins; -1 stands for all micro-batches."""
        text = kind if micro_batch < 0 else f"{kind} micro-batch {micro_batch}"
        self.begin(action_record(text, stage))

    def phase(self, text: str) -> None:
        """A phase begins, which is not in the program."""
        self.return_to(Activity(action=text))

    def return_to(self, activity: Activity) -> None:
        """The activity that a phase has interrupted goes on."""
        stage, in_program = activity.stage, activity.in_program
        self.begin(action_record(activity.action, stage, in_program=in_program))

    def awaits(self, wait: bytes) -> None:
        """The current action waits for a rank; see :func:`wait_record`."""
        self._shared[_WAIT_PLACE] = wait

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
