"""Two ranks, of which the first has several messages of a lane on their way to the second at once.

Started as ``mpiexec -n 2 python -m mpi4py message_order.py ORDER PIECE_BYTES MODE [check]``, where
ORDER is what the second rank does: ``+0 -0`` starts and ends receiving message 0. Messages are sent
in the order in which their receives start; one that takes the place of another aborts both ranks.
"""

from __future__ import annotations

import sys

import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.capture import Lane, Slot
from pipectl.graph import TransferKind
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.transport import Line, Progress, Transport
from pipectl.runtime.transport.transfer import Pieces

A = Slot("a")
LANE = Lane(TransferKind.ACTIVATION, 0, 1)


def size_of(name: str) -> int:
    """Samples of a message, which are fewer where an s stands behind its number."""
    return 1 if name.endswith("s") else 2


def tensor(name: str) -> Tensor:
    return torch.full((size_of(name), 30), float(name[0]))


def main(order: list[str], piece_bytes: int, mode: str) -> None:
    world = MPI.COMM_WORLD
    with Progress(mode, Pieces(piece_bytes, under_way=2)) as progress:
        transport = Transport(
            world.Dup(), CpuDevice(), {LANE: [A]}, progress, check="check" in sys.argv
        )
        line = transport.line(LANE, 1 - world.rank)
        if world.rank == 0:
            send(line, [step[1:] for step in order if step.startswith("+")])
        else:
            receive(line, order)
        world.Barrier()


def send(line: Line, names: list[str]) -> None:
    """All of them at once."""
    sent = [line.start_send(int(name[0]), size_of(name), {A: tensor(name)}) for name in names]
    for posted in sent:
        line.finish_send(posted)


def receive(line: Line, order: list[str]) -> None:
    started = {}
    for step in order:
        name = step[1:]
        if step.startswith("+"):
            started[name] = line.start_receive(int(name[0]), size_of(name))
        else:
            found = line.finish_receive(started.pop(name))[A]
            assert found is not None
            assert torch.equal(found, tensor(name)), (step, found)


if __name__ == "__main__":
    main(sys.argv[1].split(), int(sys.argv[2]), sys.argv[3])
