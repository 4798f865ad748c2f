"""One run of bytes on its way, in pieces: one MPI message a piece, in order.

Pieces serve three ends. A message may exceed 2 GiB, which not every MPI takes. A message that is
copied through host memory leaves piece by piece. And over TCP the answer to the other side's
message waits behind all that was started before it: unless only few pieces are under way, two
ranks that send to each other take turns.

MPI tells pieces apart by their order alone. So a message with the tag of an earlier one starts
after the last piece of that one.

Nothing says how long a message is but its pieces, so every piece that arrives must have the size
that was expected: anything else means that the two ranks run different programs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mpi4py import MPI
from torch import Tensor

from pipectl.errors import WorkerError
from pipectl.units import format_bytes

LARGEST_BYTES = 2**30
"""Of one MPI message: some libraries count bytes in 32 bits with a sign."""

Start = Callable[[int, int], MPI.Request | None]
"""Starts the piece of so many bytes at an offset; None if MPI may not use its memory yet."""
Words = Callable[[], str]
"""Names a message, for errors."""


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
    """Bytes that are being sent or received, after an earlier message of the same rank and tag.

    All pieces that are received are posted at once, so that none is unexpected.

    Args:
        start: starts a piece, in the order of the pieces.
        what: is received; None for what is sent.
        after: starts all its pieces before this starts any.

    Attributes:
        done: whether all bytes have left or arrived; found out by ``advance`` alone.
    """

    def __init__(
        self,
        start: Start,
        size_bytes: int,
        pieces: Pieces = WHOLE,
        what: Words | None = None,
        after: Transfer | None = None,
    ) -> None:
        self._start = start
        self._size_bytes = size_bytes
        self._piece_bytes = pieces.size_bytes
        self._offset = 0
        self._what = what
        self._after = after
        self._unstarted = max(1, -(-size_bytes // self._piece_bytes))  # no bytes are a piece, too
        self._under_way: deque[tuple[MPI.Request, int]] = deque()
        self._room = (pieces.under_way if what is None else None) or self._unstarted
        self.done = False
        self._start_next()

    def advance(self) -> bool:
        """Let MPI work, and start what may follow; whether all is done.

        Raises:
            WorkerError: what arrives has another size than expected.
        """
        if self._unstarted:
            self._start_next()
        while self._under_way and self._is_complete(*self._under_way[0]):
            self._under_way.popleft()
            if self._unstarted:
                self._start_next()
        if not self._unstarted and not self._under_way:
            self.done, self._start = True, _start_nothing  # which held the memory
        return self.done

    def _is_complete(self, request: MPI.Request, size_bytes: int) -> bool:
        if self._what is None:
            return bool(request.Test())
        status = MPI.Status()
        try:
            is_complete = bool(request.Test(status))
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            raise self._wrong(size_bytes, f"more than {format_bytes(size_bytes)}") from None
        if is_complete and status.Get_count(MPI.BYTE) != size_bytes:
            raise self._wrong(size_bytes, format_bytes(status.Get_count(MPI.BYTE)))
        return is_complete

    def _wrong(self, expected: int, found: str) -> WorkerError:
        assert self._what is not None
        part = " in a piece of it" if expected != self._size_bytes else ""
        return WorkerError(
            f"{self._what()} has another size than planned{part}: expected "
            f"{format_bytes(expected)}, received {found}",
            cure="the two ranks run different programs: see that all nodes have the same versions "
            "and files; PIPECTL_CHECK_MESSAGES: 1 in environment.variables names the first "
            "message that differs",
        )

    def _start_next(self) -> None:
        if self._after is not None and self._after._unstarted:
            return
        self._after = None
        while self._unstarted and len(self._under_way) < self._room:
            size_bytes = min(self._piece_bytes, self._size_bytes - self._offset)
            request = self._start(self._offset, size_bytes)
            if request is None:
                return
            self._under_way.append((request, size_bytes))
            self._offset += size_bytes
            self._unstarted -= 1


def _start_nothing(_offset: int, _size_bytes: int) -> None:
    """Of a transfer that is over."""


def memory(vector: Tensor, offset: int, size_bytes: int) -> tuple[MPI.memory, MPI.Datatype]:
    """Bytes of a contiguous tensor as an MPI buffer; far cheaper than passing the tensor.

    Raises:
        ValueError: the tensor is not contiguous, so that its memory is not its elements.
    """
    if not vector.is_contiguous():
        raise ValueError(f"a message must be contiguous, not of strides {vector.stride()}")
    return MPI.memory.fromaddress(vector.data_ptr() + offset, size_bytes), MPI.BYTE
