"""Transfers of bytes between ranks, in pieces, and what moves them while ranks compute.

A message travels in pieces, one MPI message each, in order: a message may exceed 2 GiB, which not
every MPI accepts, and one that is copied through host memory can leave piece by piece. Over TCP,
the answer to the other side's message is queued after all messages that were started before it:
unless few pieces are under way, two ranks that send to each other take turns. MPI tells pieces
apart by their order alone, so a message starts after the last piece of an earlier one with the same
tag. Every piece must have the expected size: any other means that the two ranks run different
programs.

Many MPIs advance a large message only within calls of the two ranks that share it. What makes such
calls during the computation:

- ``none``: nothing, because the library or the hardware makes progress by itself, or MPI allows
  calls from one thread only; messages advance between actions;
- ``thread``: a thread that works in bursts. A burst lasts while its calls move data, one
  fragment each, and ends when they move none, so that the thread takes little time from a core that
  computes. While an expected message does not arrive, the pauses grow.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.errors import WorkerError
from pipectl.runtime.device import Device
from pipectl.runtime.objects import ArrivingObject, begin_receive
from pipectl.runtime.pages import MessagePages
from pipectl.runtime.staging import DeviceMemory, Landing, Sizes, Staging
from pipectl.runtime.waiting import WorkMeter, poll
from pipectl.units import format_bytes

LARGEST_BYTES = 2**30
"""Of one MPI message: some libraries count bytes in signed 32-bit integers."""

Call = Callable[..., MPI.Request]
"""``Isend`` or ``Irecv`` of a communicator."""
Words = Callable[[], str]
"""Names a message, for errors."""


@dataclass(frozen=True)
class Pieces:
    """How messages are cut into pieces; the same on both sides of a message.

    Args:
        size_bytes: of a piece.
        under_way: pieces of one message that are sent at the same time; None for all.
    """

    size_bytes: int = LARGEST_BYTES
    under_way: int | None = None


WHOLE = Pieces()


class Transfer:
    """Bytes that are sent or received as one MPI message.

    Args:
        call: sends or receives it.
        buffer: contiguous.
        rank, tag: of the other side.
        what: name of what is received; None for a send.

    Attributes:
        buffer: the memory that MPI reads or writes.
        landing, source: of its message; see :class:`~pipectl.runtime.staging.Message`.
        unstarted: pieces that are not yet posted to MPI.
        done: whether all bytes have left or arrived; only ``advance`` updates it.
    """

    __slots__ = ("_request", "_what", "buffer", "done", "landing", "source", "unstarted")
    landing: Landing | None
    source: Tensor | None

    def __init__(
        self, call: Call, buffer: Tensor, rank: int, tag: int, what: Words | None = None
    ) -> None:
        self.buffer, self._what = buffer, what
        self.landing = self.source = None
        self.unstarted = 0
        self._request = call(memory(buffer, 0, buffer.nbytes), rank, tag)
        # Small messages usually leave at once.
        self.done = what is None and self._request.Test()

    def advance(self) -> bool:
        """Let MPI make progress, and start the next pieces; returns whether all is done.

        Raises:
            WorkerError: a piece has another size than expected.
        """
        if not self.done:
            self.done = self._is_complete(self._request, self.buffer.nbytes)
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

    def _wrong(self, expected: int, received: str) -> WorkerError:
        assert self._what is not None
        part = " in a piece of it" if expected != self.buffer.nbytes else ""
        return WorkerError(
            f"{self._what()} has another size than planned{part}: expected "
            f"{format_bytes(expected)}, received {received}",
            hint="the two ranks run different programs: make sure that all nodes have the same "
            "versions and files; PIPECTL_CHECK_MESSAGES: 1 in environment.variables names the "
            "first message that differs",
        )


class PiecewiseTransfer(Transfer):
    """The same in pieces, after an earlier message of the same rank and tag.

    All pieces to receive are posted at once, so that none is unexpected.

    Args:
        after: the message whose pieces must all start before this one's.
        free: events after which MPI may use each piece, or one for all; none if it may now.
    """

    __slots__ = (
        "_after",
        "_arrived_bytes",
        "_call",
        "_free",
        "_offset",
        "_pieces",
        "_rank",
        "_tag",
        "_under_way",
    )

    def __init__(
        self,
        call: Call,
        buffer: Tensor,
        rank: int,
        tag: int,
        pieces: Pieces = WHOLE,
        what: Words | None = None,
        after: Transfer | None = None,
        free: Sequence[torch.Event] = (),
    ) -> None:
        self._call, self._rank, self._tag = call, rank, tag
        self.buffer, self._free = buffer, free
        self._pieces, self._offset = pieces, 0
        self._what, self._after = what, after
        self.landing = self.source = None
        self._arrived_bytes = 0
        self.unstarted = max(1, -(-self.buffer.nbytes // pieces.size_bytes))  # at least one
        self._under_way: deque[tuple[MPI.Request, int]] = deque()
        self.done = False
        self._start_next()

    def advance(self) -> bool:
        """See :meth:`Transfer.advance`."""
        if self.unstarted:
            self._start_next()
        while self._under_way and self._is_complete(*self._under_way[0]):
            _, size_bytes = self._under_way.popleft()
            self._arrived_bytes += size_bytes
            if self.landing is not None:
                self.landing.take(self._arrived_bytes)
            if self.unstarted:
                self._start_next()
        self.done = not self.unstarted and not self._under_way
        return self.done

    def _start_next(self) -> None:
        if self._after is not None and self._after.unstarted:
            return
        self._after, piece_bytes = None, self._pieces.size_bytes
        room = self._pieces.under_way if self._what is None else None
        while self.unstarted and (room is None or len(self._under_way) < room):
            index = min(self._offset // piece_bytes, len(self._free) - 1)
            if self._free and not self._free[index].query():
                return
            size_bytes = min(piece_bytes, self.buffer.nbytes - self._offset)
            piece = memory(self.buffer, self._offset, size_bytes)
            self._under_way.append((self._call(piece, self._rank, self._tag), size_bytes))
            self._offset += size_bytes
            self.unstarted -= 1


def memory(vector: Tensor, offset: int, size_bytes: int) -> tuple[MPI.memory, MPI.Datatype]:
    """Bytes of a contiguous tensor as an MPI buffer; far faster than passing the tensor.

    Raises:
        ValueError: the tensor is not contiguous.
    """
    if not vector.is_contiguous():
        raise ValueError(f"a message must be contiguous, not of strides {vector.stride()}")
    return MPI.memory.fromaddress(vector.data_ptr() + offset, size_bytes), MPI.BYTE


_BURST_S = 0.2e-3
_QUIET_CALLS = 3
"""A burst ends after this many calls that moved nothing."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.5e-3, 2e-3


class Progress:
    """All transfers of a rank that are under way, and the thread that advances them, if any.

    Only the holder of the lock, the rank's own thread or the helper thread, touches transfers.

    Args:
        mode: ``none`` or ``thread``; the same on all ranks.
        pieces: how messages are cut; the same on all ranks.
        enter_thread: called first in the helper thread, if there is one.
    """

    def __init__(
        self,
        mode: str = "none",
        pieces: Pieces = WHOLE,
        enter_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self.mode = mode
        self.pieces = pieces
        self._enter_thread = enter_thread
        self._lock = threading.Lock()
        self._meter, self._helpers_meter = WorkMeter(), WorkMeter()
        self._transfers: list[Transfer] = []
        # The last transfer by (call, rank, tag), if not all of its pieces are posted to MPI.
        self._unstarted: dict[tuple[Call, int, int], Transfer] = {}
        self._has_work = threading.Event()
        self._waiting = self._closed = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if mode == "thread":
            self._thread = threading.Thread(target=self._help, name="progress", daemon=True)
            self._thread.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(
        self,
        call: Call,
        buffer: Tensor,
        rank: int,
        tag: int,
        what: Words | None = None,
        free: Sequence[torch.Event] = (),
        landing: Landing | None = None,
    ) -> Transfer:
        """Start a transfer (see its arguments); later calls advance it until it is done."""
        after = None
        with self._lock:
            if self._unstarted:
                after = self._unstarted.pop((call, rank, tag), None)
            if after or free or buffer.nbytes > self.pieces.size_bytes:
                transfer: Transfer = PiecewiseTransfer(
                    call, buffer, rank, tag, self.pieces, what, after, free
                )
                if transfer.unstarted:
                    self._unstarted[call, rank, tag] = transfer
            else:
                transfer = Transfer(call, buffer, rank, tag, what)
            transfer.landing = landing
            if not transfer.done:
                self._transfers.append(transfer)
        if self._thread is not None and not transfer.done:
            self._has_work.set()
        return transfer

    def wait(self, transfers: Collection[Transfer]) -> None:
        """Return when these transfers are complete; all others advance meanwhile."""
        for transfer in transfers:
            if not transfer.done:
                break
        else:
            return
        self.advance()  # which usually completes transfers that a schedule gave enough time
        pending = [transfer for transfer in transfers if not transfer.done]
        if pending:
            self._waiting = True
            try:
                self.until(lambda: all(transfer.done for transfer in pending))
            finally:
                self._waiting = False

    def until(self, done: Callable[[], bool]) -> None:
        """Return when ``done`` returns True; all transfers advance meanwhile."""

        def is_over() -> bool:
            self.advance()
            return done()

        poll(is_over, self._worked)

    def advance(self) -> None:
        """Advance every transfer once; raise an error of the helper thread."""
        if not self._transfers and self._failure is None:
            return
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._advance()

    def close(self) -> None:
        """End the helper thread; must be called before MPI ends."""
        self._closed = True
        self._has_work.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _worked(self, cpu_s: float) -> bool:
        return self._meter.worked(cpu_s / max(1, len(self._transfers)))

    def _advance(self) -> None:
        self._transfers = [item for item in self._transfers if not item.advance()]
        if self._unstarted:
            waiting = self._unstarted.items()
            self._unstarted = {key: each for key, each in waiting if each.unstarted}

    def _help(self) -> None:
        pause_s = _PAUSE_S
        try:
            self._enter_thread()
            while not self._closed:
                self._has_work.wait()
                pause_s = _PAUSE_S if self._burst() else min(2 * pause_s, _LONGEST_PAUSE_S)
                time.sleep(pause_s)
        except BaseException as error:  # the rank's own thread raises it at its next wait
            self._failure = error

    def _burst(self) -> bool:
        """Advance while calls move data; returns whether any did."""
        end, quiet, worked = time.perf_counter() + _BURST_S, 0, False
        while quiet < _QUIET_CALLS and time.perf_counter() < end:
            if self._waiting or not self._lock.acquire(blocking=False):
                return True
            try:
                count = len(self._transfers)
                if not count:
                    self._has_work.clear()
                    return worked
                before_s = time.thread_time()
                self._advance()
                moved = self._helpers_meter.worked((time.thread_time() - before_s) / count)
            finally:
                self._lock.release()
            worked |= moved
            quiet = 0 if moved else quiet + 1
        return worked


class Wire:
    """Sends and receives of one communicator.

    Args:
        communicator: used for nothing else, so that no other message can match.
        progress: advances messages; by default they do not advance while the rank computes.
        pages: for large messages that arrive in host memory; by default they are in the heap.

    Attributes:
        send: starts sending a contiguous tensor on the device to a rank, with a tag; it must not
            change until it has left.
        wait: returns when the given transfers have left or arrived.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        device: Device,
        progress: Progress | None = None,
        pages: MessagePages | None = None,
    ) -> None:
        self._communicator, self._messages = communicator, device.messages
        self._empty = torch.empty if pages is None else pages.take
        self._send, self._receive = communicator.Isend, communicator.Irecv
        self.progress = progress or Progress()
        self._begin, self.wait = self.progress.begin, self.progress.wait
        self.send: Callable[[Tensor, int, int], Transfer] = partial(self._begin, self._send)
        if device.messages is not None:
            self.send = partial(self._send_from, device.messages)
        self.rank, self.size = communicator.rank, communicator.size
        self._objects: list[MPI.Request] = []

    @property
    def others(self) -> list[int]:
        """All other ranks, ascending."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def receive(
        self, sizes: Sizes, dtype: torch.dtype, rank: int, tag: int, what: Words
    ) -> Transfer:
        """Start receiving a contiguous tensor.

        Args:
            sizes: of its dimensions, or the elements of a vector.
            what: its name, for errors.
        """
        if self._messages is None:
            return self._begin(self._receive, self._empty(sizes, dtype=dtype), rank, tag, what)
        message = self._messages.buffer(sizes, dtype)
        return self._begin(
            self._receive, message.buffer, rank, tag, what, message.free, message.landing
        )

    def arrived(self, transfer: Transfer) -> Tensor:
        """The received tensor, on the device."""
        return transfer.buffer if transfer.landing is None else transfer.landing.finish()

    def send_object(self, value: object, rank: int, tag: int) -> None:
        """Start sending any other object; it leaves at the latest when its receiver asks for it."""
        self._objects = [sending for sending in self._objects if not sending.Test()]
        self._objects.append(self._communicator.isend(value, rank, tag))

    def receive_object(self, rank: int, tag: int) -> Any:
        """Wait for the next such object."""
        arriving: ArrivingObject | None = None

        def is_there() -> bool:
            nonlocal arriving
            arriving = arriving or begin_receive(self._communicator, tag, rank)
            return arriving is not None and arriving.is_there()

        self.progress.until(is_there)
        assert arriving is not None
        return arriving.value()

    def _send_from(
        self, messages: Staging | DeviceMemory, vector: Tensor, rank: int, tag: int
    ) -> Transfer:
        message = messages.outgoing(vector, self.progress.pieces.size_bytes)
        transfer = self._begin(self._send, message.buffer, rank, tag, None, message.free)
        transfer.source = message.source
        return transfer
