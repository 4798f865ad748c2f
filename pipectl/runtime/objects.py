"""Python objects that arrive as messages.

They are received without matched probes (``improbe``, and mpi4py's own ``recv``): with some
providers of libfabric, Open MPI 4.1 finds messages by these that it then cannot receive.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI


class ArrivingObject:
    """An object whose message is being received.

    Attributes:
        rank: that sent it.
    """

    def __init__(self, communicator: MPI.Comm, status: MPI.Status) -> None:
        self.rank = status.source
        self._content = bytearray(status.Get_count(MPI.BYTE))
        buffer = [self._content, MPI.BYTE]
        self._request = communicator.Irecv(buffer, status.source, status.tag)

    def is_there(self) -> bool:
        """Return whether all of it has arrived."""
        return self._request.Test()

    def value(self) -> Any:
        """Return the object, once it is there."""
        return MPI.pickle.loads(self._content)


def begin_receive(
    communicator: MPI.Comm, tag: int, rank: int = MPI.ANY_SOURCE
) -> ArrivingObject | None:
    """Start receiving the next object if its message has been announced.

    No other thread may receive messages with this tag.
    """
    status = MPI.Status()
    if not communicator.Iprobe(rank, tag, status):
        return None
    return ArrivingObject(communicator, status)
