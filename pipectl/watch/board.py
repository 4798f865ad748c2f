"""What a rank does now, in memory shared with the watcher of its node.

Writing takes about a microsecond. The last value stays readable after the rank has ended.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from typing import Annotated, NamedTuple


class Activity(NamedTuple):
    """What a rank does.

    Args:
        moves: number of actions that have begun; it does not change while the rank hangs.
        step: current step; 0 before the first.
        stage: stage of the action, or -1.
        peer: rank that must send or receive before the action can go on, or -1.
        in_program: whether the action is in the rank's program, not a phase such as saving.
        waiting: whether the rank is waiting for other ranks.
        pace_s: time of the last step of this process; 0 before its end.
        action: ``FORWARD micro-batch 4``, or a phase.
        awaited: the awaited message, such as ``activation 5 of stage 2 from rank 2``.
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


_NUMBERS = struct.Struct("qqd?")
"""Moves, step, time of the last step, and whether the rank waits; each is aligned."""
_INTEGER, _FLOAT, _FLAG = struct.Struct("q"), struct.Struct("d"), struct.Struct("?")
_WAIT, _ACTION = struct.Struct("96sq"), struct.Struct("qq?96s")
"""The awaited message and its peer; and the peer, stage, ``in_program`` and text of an action."""
_STEP_AT, _PACE_AT, _WAITING_AT, _WAIT_AT = 8, 16, 24, 32
_ACTION_AT = _WAIT_AT + 96  # both contain the peer
SIZE = _ACTION_AT + _ACTION.size
"""Size of a board in bytes."""


def action_record(action: str, stage: int, *, in_program: bool = True) -> bytes:
    """Encode an action for :meth:`Board.begin`."""
    return _ACTION.pack(-1, stage, in_program, action.encode(errors="replace"))


def row_record(kind: str, stage: int, micro_batch: int) -> bytes:
    """Pack a row of the program; micro-batch -1 stands for all of them."""
    return action_record(kind if micro_batch < 0 else f"{kind} micro-batch {micro_batch}", stage)


def wait_record(awaited: str, peer: int) -> bytes:
    """Encode a wait for :meth:`Board.awaits`."""
    return _WAIT.pack(awaited.encode(errors="replace"), peer)


class Board:
    """The memory to which a rank writes its activity.

    Attributes:
        handle: file descriptor of the memory, which has no name; -1 if it cannot be shared.
        on_step: called whenever a step begins.
    """

    def __init__(self) -> None:
        try:
            self.handle = os.memfd_create("pipectl-board")
            os.ftruncate(self.handle, SIZE)
        except OSError:
            self.handle = -1
        self._shared = mmap.mmap(self.handle, SIZE)
        self._moves = 0
        self.on_step: Callable[[], None] | None = None
        self.phase("")

    def begin(self, action: bytes) -> None:
        """Begin an action; see :func:`action_record`."""
        self._shared[_ACTION_AT:] = action
        self._moves += 1
        _INTEGER.pack_into(self._shared, 0, self._moves)

    def row(self, kind: str, stage: int, micro_batch: int) -> None:
        """Begin a row of the program; see :func:`row_record`."""
        self.begin(row_record(kind, stage, micro_batch))

    def phase(self, text: str) -> None:
        """Begin a phase outside the program."""
        self.return_to(Activity(action=text))

    def return_to(self, activity: Activity) -> None:
        """Continue an activity that a phase had interrupted."""
        stage, in_program = activity.stage, activity.in_program
        self.begin(action_record(activity.action, stage, in_program=in_program))

    def awaits(self, wait: bytes) -> None:
        """Record what the current action waits for; see :func:`wait_record`."""
        self._shared[_WAIT_AT : _WAIT_AT + _WAIT.size] = wait

    def step(self, number: int) -> None:
        """Begin a step."""
        _INTEGER.pack_into(self._shared, _STEP_AT, number)
        if self.on_step is not None:
            self.on_step()

    def waits(self, waiting: bool) -> None:
        """Begin or end a wait for other ranks."""
        _FLAG.pack_into(self._shared, _WAITING_AT, waiting)

    def pace(self, seconds: float) -> None:
        """Record the time of the last step."""
        _FLOAT.pack_into(self._shared, _PACE_AT, seconds)

    def read(self) -> Activity:
        """Return what the rank does now."""
        return read_activity(self._shared)


def read_activity(shared: mmap.mmap) -> Activity:
    """Read the board of another process."""
    moves, step, pace_s, waiting = _NUMBERS.unpack_from(shared)
    awaited, _ = _WAIT.unpack_from(shared, _WAIT_AT)
    peer, stage, in_program, action = _ACTION.unpack_from(shared, _ACTION_AT)
    action, awaited = (
        text.partition(b"\0")[0].decode(errors="replace") for text in (action, awaited)
    )
    return Activity(moves, step, stage, peer, in_program, waiting, pace_s, action, awaited)
