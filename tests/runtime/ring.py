"""Three ranks in a ring: each sends strided tensors to the next and checks what it receives.

Started as ``mpiexec -n 3 python -m mpi4py ring.py MODE PIECE_BYTES UNDER_WAY [staged] [check]``; a
difference aborts all.
"""

from __future__ import annotations

import sys

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.capture import Lane, Slot
from pipectl.errors import WorkerError
from pipectl.graph import TransferKind
from pipectl.runtime.device import CpuDevice, MessageBuffer, Staging
from pipectl.runtime.transport import Line, Progress, Transport
from pipectl.runtime.transport.transfer import Pieces

SLOTS = [
    Slot(name)
    for name in ("plain", "turned", "gaps", "rows", "none", "whole", "large", "dot", "empty")
]


class StagedCpu(CpuDevice):
    """Sends copies, as an accelerator does whose memory MPI cannot reach."""

    staged = True

    def __init__(self) -> None:
        self.staging = Staging(torch.device("cpu"))

    def to_message(self, vector: Tensor, piece_bytes: int) -> MessageBuffer:
        outgoing = self.staging.outgoing(vector, piece_bytes)
        assert not vector.numel() or outgoing.vector.data_ptr() != vector.data_ptr()
        return outgoing

    def from_message(self, buffer: Tensor) -> Tensor:
        return self.staging.incoming(buffer)


def tensors(rank: int, micro_batch: int, size: int) -> dict[Slot, Tensor | None]:
    base = torch.arange(float(size * 6)).view(size, 6) + 1000 * rank + 10000 * micro_batch
    values = (
        base,
        base.t(),
        base[:, 1::2],
        base[:, :1].expand(size, 5),
        None,
        base.to(torch.int64),
        base.repeat(100, 50).bfloat16(),
        base.sum(),
        base[:0],
    )
    return dict(zip(SLOTS, values, strict=True))


def main() -> None:
    world = MPI.COMM_WORLD
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    lanes = {
        Lane(TransferKind.ACTIVATION, r, (r + 1) % world.size): SLOTS for r in range(world.size)
    }
    mode, piece_bytes, under_way = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    device = StagedCpu() if "staged" in sys.argv else CpuDevice()
    with Progress(mode, Pieces(piece_bytes, under_way or None)) as progress:
        transport = Transport(world.Dup(), device, lanes, progress, check="check" in sys.argv)
        go_round(world, transport, before, after)
        world.Barrier()


def go_round(world: MPI.Comm, transport: Transport, before: int, after: int) -> None:
    outgoing = transport.line(Lane(TransferKind.ACTIVATION, world.rank, after), after)
    incoming = transport.line(Lane(TransferKind.ACTIVATION, before, world.rank), before)
    for micro_batch, size in enumerate((4, 4, 1, 4, 1)):
        known = micro_batch in (1, 3, 4)
        receiving = incoming.start_receive(micro_batch, size)
        assert (receiving.layouts is not None) is known
        sent = outgoing.start_send(micro_batch, size, tensors(world.rank, micro_batch, size))
        found = incoming.finish_receive(receiving)
        outgoing.finish_send(sent)
        compare(found, tensors(before, micro_batch, size))
    refuse(outgoing)


def compare(found: dict[Slot, Tensor | None], expected: dict[Slot, Tensor | None]) -> None:
    assert list(found) == list(expected)
    for slot, tensor in expected.items():
        received = found[slot]
        assert (received is None) is (tensor is None), slot
        if tensor is not None and received is not None:
            assert torch.equal(received, tensor), slot
            assert received.dtype == tensor.dtype
            assert slot.value == "gaps" or received.stride() == tensor.stride(), slot


def refuse(line: Line) -> None:
    """What was not announced as such is not sent."""
    absent = next(slot for slot, tensor in tensors(0, 0, 4).items() if tensor is None)
    for slot, words in {
        SLOTS[0]: "should be torch.float32 [4, 6], but is torch.float32 [3, 6]",
        absent: "should be nothing, but is torch.float32 [3, 6]",
    }.items():
        wrong = {**tensors(0, 0, 4), slot: torch.zeros(3, 6)}
        with pytest.raises(WorkerError) as raised:
            line.start_send(0, 4, wrong)
        assert words in raised.value.message


if __name__ == "__main__":
    main()
