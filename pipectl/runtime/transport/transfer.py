"""One run of bytes on its way, in pieces: one MPI message a piece, in order.

Pieces serve three ends. A message may exceed 2 GiB, which not every MPI takes. A message that is
copied through host memory leaves piece by piece. And over TCP the answer to the other side's
message waits behind all that was started before it: unless only few pieces are under way, two
ranks that send to each other take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mpi4py import MPI
from torch import Tensor

LARGEST_BYTES = 2**30
"""Of one MPI message: some libraries count bytes in 32 bits with a sign."""

Start = Callable[[int, int], MPI.Request]
"""Starts the piece of so many bytes at an offset."""


@dataclass(frozen=True)
class Pieces:
    """How messages are cut; the same on both sides of a message.

    Args:
        size_bytes: of a piece.
        under_way: pieces of one message that are sent at the same time; None for all.
    """

    size_bytes: int = LARGEST_BYTES
    under_way: int | None = None


WHOLE = Pieces()


class Transfer:
    """Bytes that are being sent or received.

    Args:
        start: starts a piece, in the order of the pieces.
        size_bytes: of all.
        piece_bytes: of a piece.
        under_way: most pieces at the same time; None for all.
    """

    def __init__(
        self, start: Start, size_bytes: int, piece_bytes: int, under_way: int | None
    ) -> None:
        self._start = start
        self._size_bytes = size_bytes
        self._piece_bytes = piece_bytes
        self._offset = 0
        self._under_way: deque[MPI.Request] = deque()
        self._room = under_way or -(-size_bytes // piece_bytes) + 1
        self._start_next(first=True)

    @classmethod
    def send(cls, start: Start, size_bytes: int, pieces: Pieces = WHOLE) -> Transfer:
        """Begin to send."""
        return cls(start, size_bytes, pieces.size_bytes, pieces.under_way)

    @classmethod
    def receive(cls, start: Start, size_bytes: int, pieces: Pieces = WHOLE) -> Transfer:
        """Begin to receive; all pieces are posted at once, so that none is unexpected."""
        return cls(start, size_bytes, pieces.size_bytes, None)

    def advance(self) -> bool:
        """Let MPI work, and start what may follow; whether all is done."""
        while self._under_way and self._under_way[0].Test():
            self._under_way.popleft()
            self._start_next()
        return not self._under_way

    def _start_next(self, *, first: bool = False) -> None:
        """Start pieces while there is room. A message without bytes is a piece, too."""
        while len(self._under_way) < self._room and (first or self._offset < self._size_bytes):
            size_bytes = min(self._piece_bytes, self._size_bytes - self._offset)
            self._under_way.append(self._start(self._offset, size_bytes))
            self._offset += size_bytes
            first = False


def memory(vector: Tensor, offset: int, size_bytes: int) -> tuple[MPI.memory, MPI.Datatype]:
    """Bytes of a contiguous tensor as an MPI buffer; far cheaper than passing the tensor.

    Raises:
        ValueError: the tensor is not contiguous, so that its memory is not its elements.
    """
    if not vector.is_contiguous():
        raise ValueError(f"a message must be contiguous, not of strides {vector.stride()}")
    return MPI.memory.fromaddress(vector.data_ptr() + offset, size_bytes), MPI.BYTE
