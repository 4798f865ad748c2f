"""Two ranks, of which the first sends a message that is damaged on purpose.

Started as ``mpiexec -n 2 python -m mpi4py damage.py KIND``; ends with 17 if nobody notices. With
``none``, messages are only sent, with long notes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from mpi4py import MPI

from pipectl.capture import Lane, Slot
from pipectl.graph import TransferKind
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.transport import Line, Posted, Transport

A = Slot("a")
LANE = Lane(TransferKind.ACTIVATION, 0, 1)


def damage_what_arrived() -> None:
    """Change it before it is looked at."""
    compare = Line._compare

    def damaged(self: Line, posted: Posted, buffers: Mapping[Slot, torch.Tensor]) -> None:
        if posted.micro_batch == 1 and buffers:
            buffers[A].view(-1)[3] = -1.0
        compare(self, posted, buffers)

    Line._compare = damaged  # type: ignore[method-assign]


def main(damage: str) -> None:
    world = MPI.COMM_WORLD
    if damage == "none":
        return send_and_go_on(world)
    if damage == "byte":
        damage_what_arrived()
    line = Transport(world.Dup(), CpuDevice(), {LANE: [A]}, check=True).line(LANE, 1 - world.rank)
    tensor = torch.arange(6.0).view(2, 3)
    for micro_batch in (0, 1):
        if world.rank == 1:
            line.finish_receive(line.start_receive(micro_batch, 2))
        else:
            wrong = micro_batch == 1 and damage == "micro-batch"
            sent = line.start_send(7 if wrong else micro_batch, 2, {A: tensor})
            if micro_batch == 1 and damage == "write":
                tensor[0, 0] = 5.0
            line.finish_send(sent)
    world.Barrier()
    sys.exit(17)


def send_and_go_on(world: MPI.Intracomm) -> None:
    """The second message has left before its receiver, which has posted its buffers, waits for it.

    Its note is far longer than it is.
    """
    slots = [Slot(f"{'long' * 50}-{index}") for index in range(2000)]
    line = Transport(world.Dup(), CpuDevice(), {LANE: slots}, check=True).line(LANE, 1 - world.rank)
    tensors: dict[Slot, torch.Tensor | None] = {**dict.fromkeys(slots), slots[7]: torch.ones(3)}
    for index in range(2):
        if world.rank:
            posted = line.start_receive(index, 2)
            if index == 1:
                world.Barrier()
            assert line.finish_receive(posted)[slots[7]] is not None
        else:
            line.finish_send(line.start_send(index, 2, tensors))
            if index == 1:
                world.Barrier()


if __name__ == "__main__":
    main(sys.argv[1])
