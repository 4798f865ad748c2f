"""Vectors between the ranks of one communicator, in the pieces that progress asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.runtime.device import Device, MessageBuffer
from pipectl.runtime.transport.progress import Progress
from pipectl.runtime.transport.transfer import Start, Transfer, Words, memory


class Flight(NamedTuple):
    """A vector under way, with the memory that MPI reads or writes."""

    transfer: Transfer
    buffer: Tensor


class Wire:
    """Sends and receives of one communicator.

    Args:
        communicator: of its own, so that no other message can match.
        progress: keeps messages moving; by default nobody does while the rank computes.
    """

    def __init__(
        self, communicator: MPI.Comm, device: Device, progress: Progress | None = None
    ) -> None:
        self._communicator, self._device = communicator, device
        self.progress = progress or Progress()
        self.rank, self.size = communicator.rank, communicator.size
        self._objects: list[MPI.Request] = []

    @property
    def others(self) -> list[int]:
        """All other ranks, ascending."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def send(self, vector: Tensor, rank: int, tag: int, after: Transfer | None = None) -> Flight:
        """Begin to send a contiguous vector on the device, which must not change until it has left.

        Args:
            after: the earlier message of this rank and tag, if it may be under way.
        """
        buffer = self._device.to_message(vector, self.progress.pieces.size_bytes)
        start = self._start(self._communicator.Isend, buffer, rank, tag)
        return Flight(self.progress.begin(start, vector.nbytes, None, after), buffer.vector)

    def receive(
        self,
        count: int,
        dtype: torch.dtype,
        rank: int,
        tag: int,
        what: Words,
        after: Transfer | None = None,
    ) -> Flight:
        """Begin to receive a vector of ``count`` elements.

        Args:
            what: names it, for errors.
            after: see :meth:`send`.
        """
        buffer = self._device.message_buffer(count, dtype)
        vector, start = buffer.vector, self._start(self._communicator.Irecv, buffer, rank, tag)
        return Flight(self.progress.begin(start, vector.nbytes, what, after), vector)

    def _start(
        self, call: Callable[..., MPI.Request], buffer: MessageBuffer, rank: int, tag: int
    ) -> Start:
        """A function that begins to send or receive a piece of a buffer, once that is free."""
        piece_bytes = self.progress.pieces.size_bytes

        def start(offset: int, size_bytes: int) -> MPI.Request | None:
            if not buffer.is_free(offset // piece_bytes):
                return None
            return call(memory(buffer.vector, offset, size_bytes), rank, tag)

        return start

    def wait(self, flights: Iterable[Flight]) -> None:
        """Return when vectors have left or arrived."""
        self.progress.wait([flight.transfer for flight in flights])

    def arrived(self, flight: Flight) -> Tensor:
        """A vector that has arrived, on the device."""
        return self._device.from_message(flight.buffer)

    def send_object(self, value: object, rank: int, tag: int) -> None:
        """Begin to send what is no tensor; it leaves, at the latest, when its receiver asks."""
        self._objects = [sending for sending in self._objects if not sending.Test()]
        self._objects.append(self._communicator.isend(value, rank, tag))

    def receive_object(self, rank: int, tag: int) -> Any:
        """Wait for the next such value."""
        messages: list[MPI.Message] = []

        def is_there() -> bool:
            message = self._communicator.improbe(rank, tag)
            if message is not None:
                messages.append(message)
            return message is not None

        self.progress.until(is_there)
        return messages[0].recv()
