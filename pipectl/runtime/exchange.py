"""Vectors between the replicas of a stage, moved by whatever moves the pipeline's messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.runtime.device import Device
from pipectl.runtime.transport import Progress
from pipectl.runtime.transport.transfer import Transfer, memory
from pipectl.runtime.waiting import gather_all


@dataclass
class Sent:
    """A vector on its way; holds its memory."""

    transfer: Transfer
    buffer: Tensor


@dataclass
class Received:
    """A vector that arrives in ``buffer``."""

    transfer: Transfer
    buffer: Tensor


class Exchange:
    """Point-to-point messages of one stage's replicas.

    Args:
        communicator: of these replicas alone, in their order.
    """

    def __init__(self, communicator: MPI.Comm, device: Device, progress: Progress) -> None:
        self._communicator = communicator
        self._device = device
        self._progress = progress
        self.replica = communicator.rank
        self.replicas = communicator.size

    @property
    def others(self) -> list[int]:
        """All other replicas, ascending."""
        return [index for index in range(self.replicas) if index != self.replica]

    def send(self, vector: Tensor, replica: int, tag: int) -> Sent:
        """Begin to send a contiguous vector, which must not change until it has left."""
        pieces, communicator = self._progress.pieces, self._communicator
        buffer = self._device.to_message(vector, pieces.size_bytes)

        def start(offset: int, size_bytes: int) -> MPI.Request | None:
            if not buffer.is_free(offset // pieces.size_bytes):
                return None
            return communicator.Isend(memory(buffer.vector, offset, size_bytes), replica, tag)

        size_bytes = buffer.vector.nbytes
        begun = self._progress.begin(lambda: Transfer.send(start, size_bytes, pieces))
        return Sent(begun, buffer.vector)

    def receive(self, count: int, dtype: torch.dtype, replica: int, tag: int) -> Received:
        """Begin to receive a vector."""
        pieces, communicator = self._progress.pieces, self._communicator
        buffer = self._device.message_buffer(count, dtype)

        def start(offset: int, size_bytes: int) -> MPI.Request | None:
            if not buffer.is_free(offset // pieces.size_bytes):
                return None
            return communicator.Irecv(memory(buffer.vector, offset, size_bytes), replica, tag)

        def what() -> str:
            return f"a sum of gradients, from replica {replica} of the stage to {self.replica},"

        total_bytes = buffer.vector.nbytes
        begun = self._progress.begin(lambda: Transfer.receive(start, total_bytes, pieces, what))
        return Received(begun, buffer.vector)

    def arrived(self, received: Received) -> Tensor:
        """A vector that has arrived, on the device."""
        return self._device.from_message(received.buffer)

    def are_complete(self, messages: Sequence[Sent | Received]) -> bool:
        """Whether messages were complete when all messages last advanced."""
        return all(message.transfer.done for message in messages)

    def wait(self, messages: Sequence[Sent | Received]) -> None:
        """Return when messages are complete."""
        self._progress.wait([message.transfer for message in messages])

    def agreed(self, names: Sequence[str]) -> set[str]:
        """What any replica names. Collective."""
        return set().union(*gather_all(self._communicator, list(names)))


def group_of(communicator: MPI.Comm, ranks: Sequence[int], tag: int) -> MPI.Comm:
    """A communicator of some ranks, in this order; collective among them."""
    assert isinstance(communicator, MPI.Intracomm)
    return communicator.Create_group(communicator.group.Incl(list(ranks)), tag)
