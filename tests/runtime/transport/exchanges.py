"""Three ranks that exchange messages in all ways there are; a difference aborts all.

In a ring, each sends strided tensors to the next. Then the first has several messages of a lane on
their way to the second at once; they are sent in the order in which their receives start.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.capture import Lane, Slot
from pipectl.errors import WorkerError
from pipectl.graph import TransferKind
from pipectl.runtime.device import CpuDevice, Message, Staging
from pipectl.runtime.transport import Line, Progress, Transport
from pipectl.runtime.transport.transfer import Pieces

RINGS = [
    "none 1073741824 0",
    "poll 7 3",
    "thread 64 2 check",
    "thread 1000 2 staged",
    "none 4000 0 staged",
]
"""Mode, bytes of a piece, pieces that are under way at once."""
ORDERS = [
    "+0 +1 -0 +2 -1 -2",  # the first tells what they look like before the third starts
    "+0 +1 +2 -1 -0 -2",  # read in another order than sent
    "+0 -0 +1s +2 -1s -2",  # of a size that is not known, before one that is
]
"""What the second rank does: ``+0 -0`` starts and ends receiving message 0."""
MANY = "+0 -0 +1 +2 +3s +4s -1 -2 -3s -4s"
"""In pieces: none leaves before all of the message before it have."""
SLOTS = [
    Slot(name)
    for name in ("plain", "turned", "gaps", "rows", "none", "whole", "large", "dot", "empty")
]


class Copies(Staging):
    def outgoing(self, vector: Tensor, piece_bytes: int) -> Message:
        copy, free = super().outgoing(vector, piece_bytes)
        assert not vector.numel() or copy.data_ptr() != vector.data_ptr()
        return copy, free


class StagedCpu(CpuDevice):
    """Sends copies, as an accelerator does whose memory MPI cannot reach."""

    staged = True
    messages = Copies(torch.device("cpu"))


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
    for how in RINGS:
        mode, piece_bytes, under_way, *rest = how.split()
        device = StagedCpu() if "staged" in rest else CpuDevice()
        pieces = Pieces(int(piece_bytes), int(under_way) or None)
        go_round(world, mode, pieces, device, check="check" in rest)
    two = world.Split(world.rank // 2)
    if two.size == 2:
        for order, check in product(ORDERS, (False, True)):
            several(two, order, "none", 1000, check=check)
        several(two, "+0 -0 +1 +2 -2 -1", "none", 1000, check=True)
        for mode, check in (("none", 0), ("poll", 0), ("thread", 0), ("thread", 1)):
            several(two, MANY, mode, 16, check=bool(check))
        send_and_go_on(two)


def several(two: MPI.Intracomm, order: str, mode: str, piece_bytes: int, *, check: bool) -> None:
    lanes = {Lane(TransferKind.ACTIVATION, 0, 1): [SLOTS[0]]}
    with Progress(mode, Pieces(piece_bytes, under_way=2)) as progress:
        transport = Transport(two.Dup(), CpuDevice(), lanes, progress, check=check)
        line, steps = transport.line(*lanes, 1 - two.rank), order.split()
        if two.rank == 0:
            names = [step[1:] for step in steps if step.startswith("+")]
            sent = [line.start_send(int(n[0]), size_of(n), {SLOTS[0]: filled(n)}) for n in names]
            for posted in sent:
                line.finish_send(posted)
        else:
            receive(line, steps)
        two.Barrier()


def send_and_go_on(two: MPI.Intracomm) -> None:
    """The second message has left before its receiver, which has posted its buffers, waits for it.

    Its note is far longer than it is.
    """
    slots = [Slot(f"{'long' * 50}-{index}") for index in range(2000)]
    lanes = {Lane(TransferKind.ACTIVATION, 0, 1): slots}
    line = Transport(two.Dup(), CpuDevice(), lanes, check=True).line(*lanes, 1 - two.rank)
    message: dict[Slot, Tensor | None] = {**dict.fromkeys(slots), slots[7]: torch.ones(3)}
    for index in range(2):
        if two.rank:
            posted = line.start_receive(index, 2)
            if index == 1:
                two.Barrier()
            assert line.finish_receive(posted)[slots[7]] is not None
        else:
            line.finish_send(line.start_send(index, 2, message))
            if index == 1:
                two.Barrier()


def size_of(name: str) -> int:
    """Samples of a message, which are fewer if an s follows its number."""
    return 1 if name.endswith("s") else 2


def filled(name: str) -> Tensor:
    return torch.full((size_of(name), 30), float(name[0]))


def receive(line: Line, steps: list[str]) -> None:
    started = {}
    for step in steps:
        name = step[1:]
        if step.startswith("+"):
            started[name] = line.start_receive(int(name[0]), size_of(name))
        else:
            arrived = line.finish_receive(started.pop(name))[SLOTS[0]]
            assert arrived is not None
            assert torch.equal(arrived, filled(name)), (steps, step, arrived)


def go_round(
    world: MPI.Intracomm, mode: str, pieces: Pieces, device: CpuDevice, *, check: bool
) -> None:
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    lanes = {
        Lane(TransferKind.ACTIVATION, r, (r + 1) % world.size): SLOTS for r in range(world.size)
    }
    with Progress(mode, pieces) as progress:
        transport = Transport(world.Dup(), device, lanes, progress, check=check)
        pass_on(world, transport, before, after)
        world.Barrier()


def pass_on(world: MPI.Comm, transport: Transport, before: int, after: int) -> None:
    outgoing = transport.line(Lane(TransferKind.ACTIVATION, world.rank, after), after)
    incoming = transport.line(Lane(TransferKind.ACTIVATION, before, world.rank), before)
    for micro_batch, size in enumerate((4, 4, 1, 4, 1)):
        known = micro_batch in (1, 3, 4)
        receiving = incoming.start_receive(micro_batch, size)
        assert (receiving.places is not None) is known
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
        SLOTS[0]: "should be float32 [4, 6] with strides [6, 1], but is float32 [3, 6] with",
        absent: "should be nothing, but is float32 [3, 6] with",
    }.items():
        wrong = {**tensors(0, 0, 4), slot: torch.zeros(3, 6)}
        with pytest.raises(WorkerError) as raised:
            line.start_send(0, 4, wrong)
        assert words in raised.value.message


if __name__ == "__main__":
    main()
