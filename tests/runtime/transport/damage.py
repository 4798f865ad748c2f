"""Two ranks, of which the first sends a message that is damaged on purpose.

Started as ``mpiexec -n 2 python -m mpi4py damage.py KIND``; ends with 17 if nobody notices. With
``none``, messages are only sent, with long notes.
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
    if damage == "none":
        return send_and_go_on(world)
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


def send_and_go_on(world: MPI.Intracomm) -> None:
    """The second message has left before its receiver, which has posted its buffers, waits for it.

    Its note is far longer than it is.
    """
    slots = [Slot(f"{'long' * 50}-{index}") for index in range(2000)]
    transport = Transport(world.Dup(), CpuDevice(), {LANE: slots}, check=True)
    tensors: dict[Slot, torch.Tensor | None] = {**dict.fromkeys(slots), slots[7]: torch.ones(3)}
    for index in range(2):
        message = Message(LANE, index)
        if world.rank:
            posted = transport.start_receive(message, 2, 0)
            if index == 1:
                world.Barrier()
            assert transport.finish_receive(message, 0, posted)[slots[7]] is not None
        else:
            transport.finish_send(transport.start_send(message, 2, 1, tensors))
            if index == 1:
                world.Barrier()


if __name__ == "__main__":
    main(sys.argv[1])
