"""What a rank does at this moment, in memory that the node's watcher reads.

A rank packs a few integers into shared memory, which takes well under a microsecond; the newest are
there whatever becomes of the rank.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

_ROW, _STEP, _WAITING, _PACE = map(struct.Struct, ("<7q", "<q", "<?", "<d"))
_ALL = struct.Struct("<7qq?d128s")
_STEP_AT, _WAITING_AT, _PACE_AT, _PHASE_AT = 56, 64, 65, 73
SIZE = _ALL.size
"""Bytes of a board."""
NO_ROW = -1


class Activity(NamedTuple):
    """What a rank does.

    Args:
        moves: rows and phases that it has begun; the number of a rank that hangs stays the same.
        kind: of the row under way; ``NO_ROW`` outside of the training program.
        stage: -1 if the row belongs to none, as for the micro-batch.
        peer: the rank at the other end of the message that the row waits for; -1 for none.
        peer_stage: the stage there.
        lane: what the message holds, as an index.
        step: under way; 0 before the first.
        waiting: whether it waits for other ranks right now.
        pace_s: how long its last step took.
        phase: what it does outside of the training program, in words.
    """

    moves: int = 0
    kind: int = NO_ROW
    stage: int = -1
    micro_batch: int = -1
    peer: int = -1
    peer_stage: int = -1
    lane: int = -1
    step: int = 0
    waiting: bool = False
    pace_s: float = 0.0
    phase: str = ""


class Board:
    """Written by one rank.

    Args:
        memory: of ``SIZE`` bytes; None for some that nobody else sees.
    """

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._memory = bytearray(SIZE) if memory is None else memory
        self._moves = 0
        if memory is None:
            self.phase("")

    def move_to(self, memory: mmap.mmap) -> None:
        """Go on in other memory."""
        memory[:SIZE] = bytes(self._memory[:SIZE])
        self._memory = memory

    def row(self, kind: int, stage: int, micro_batch: int) -> None:
        """A row of the program begins."""
        self._moves += 1
        _ROW.pack_into(self._memory, 0, self._moves, kind, stage, micro_batch, -1, -1, -1)

    def awaits(self, rank: int, stage: int, lane: int) -> None:
        """The row under way depends on a rank."""
        row = _ROW.unpack_from(self._memory, 0)[:4]
        _ROW.pack_into(self._memory, 0, *row, rank, stage, lane)

    def phase(self, text: str) -> None:
        """Something begins that is no row."""
        words = text.encode(errors="replace")[: SIZE - _PHASE_AT]
        self._memory[_PHASE_AT:SIZE] = words.ljust(SIZE - _PHASE_AT, b"\0")
        self.row(NO_ROW, -1, -1)

    def step(self, number: int) -> None:
        """A step begins."""
        _STEP.pack_into(self._memory, _STEP_AT, number)

    def waits(self, waiting: bool) -> None:
        """A wait for other ranks begins or ends."""
        _WAITING.pack_into(self._memory, _WAITING_AT, waiting)

    def pace(self, seconds: float) -> None:
        """Note how long a step took."""
        _PACE.pack_into(self._memory, _PACE_AT, seconds)

    def read(self) -> Activity:
        """What the rank does now."""
        *fields, phase = _ALL.unpack_from(self._memory, 0)
        return Activity._make([*fields, phase.rstrip(b"\0").decode(errors="replace")])


def create_memory(path: Path) -> mmap.mmap:
    """Memory for a board in a new file of the owner's.

    Its pages are allocated now: one that a full disk refuses later would end the rank (SIGBUS).

    Raises:
        OSError: there is no room.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    handle = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(handle, 0, SIZE)
        return mmap.mmap(handle, SIZE)
    finally:
        os.close(handle)


def open_board(handle: int) -> Board:
    """The board in a file that :func:`create_memory` made, to be read; an empty one if it is -1."""
    if handle < 0:
        return Board()
    return Board(mmap.mmap(handle, SIZE, prot=mmap.PROT_READ))
