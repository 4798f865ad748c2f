"""Two ranks, of which the first sends a message that is damaged on purpose.

Started as ``mpiexec -n 2 python -m mpi4py damage.py KIND``; ends with 17 if nobody notices.
"""

from __future__ import annotations

import sys

import torch
from mpi4py import MPI

from pipectl.capture import Lane, Slot
from pipectl.graph import TransferKind
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.transport import Message, Transport
from pipectl.runtime.transport.checks import Note
from pipectl.runtime.transport.lanes import Posted

A = Slot("a")
LANE = Lane(TransferKind.ACTIVATION, 0, 1)


class Damaged(Transport):
    """Changes what arrived before it is looked at."""

    def _compare(self, said: Note, message: Message, rank: int, posted: Posted) -> None:
        if message.micro_batch == 1 and "byte" in sys.argv:
            posted.buffers[A][3] = -1.0
        super()._compare(said, message, rank, posted)


def main(damage: str) -> None:
    world = MPI.COMM_WORLD
    transport = Damaged(world.Dup(), CpuDevice(), {LANE: [A]}, check=True)
    tensor = torch.arange(6.0).view(2, 3)
    for micro_batch in (0, 1):
        if world.rank == 1:
            posted = transport.start_receive(Message(LANE, micro_batch), 2, 0)
            transport.finish_receive(Message(LANE, micro_batch), 0, posted)
        else:
            wrong = micro_batch == 1 and damage == "micro-batch"
            message = Message(LANE, 7 if wrong else micro_batch)
            sent = transport.start_send(message, 2, 1, {A: tensor})
            if micro_batch == 1 and damage == "write":
                tensor[0, 0] = 5.0
            transport.finish_send(sent)
    world.Barrier()
    sys.exit(17)


if __name__ == "__main__":
    main(sys.argv[1])
