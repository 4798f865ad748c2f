"""Two ranks that exchange messages in all ways there are, and then some that are wrong.

Started as ``mpiexec -n 2 python -m mpi4py messages.py FILE HOW...``, each ``MODE`` or ``MODE
check``. Where something else arrives than was sent, all ranks abort. Of each wrong message, a line
of the file has the errors of both ranks, as JSON. (What ranks print might be lost as they abort.)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.capture import Lane, Slot
from pipectl.errors import WorkerError
from pipectl.graph import TransferKind
from pipectl.runtime.device import CpuDevice, Message, Sizes
from pipectl.runtime.layout import Layout
from pipectl.runtime.transport import Line, Progress, Transport
from pipectl.runtime.transport.transfer import WHOLE, Pieces

WORLD, RANK = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
A, KIB = Slot("a"), 1024
THERE, BACK = Lane(TransferKind.ACTIVATION, 3, 5), Lane(TransferKind.ACTIVATION, 5, 3)
WAYS = [("none", WHOLE), ("poll", Pieces(7, 3)), ("thread", Pieces(64, 2)), ("none", Pieces(4000))]
ORDERS = [
    ("none", 1000, "+0 +1 -0 +2 -1 -2"),  # the first tells the layout before the third starts
    ("none", 1000, "+0 +1 +2 -1 -0 -2"),  # read in another order than sent
    ("none", 1000, "+0 -0 +1s +2 -1s -2"),  # of a size that is not known, before one that is
    *((mode, 16, "+0 -0 +1 +2 +3s +4s -1 -2 -3s -4s") for mode in ("none", "poll", "thread")),
]
"""Mode, bytes of a piece (none leaves before all of the message before it have), and what the
receiver does: ``+0 -0`` starts and ends receiving message 0, ``1s`` has fewer samples."""


@dataclass(frozen=True)
class Wrong:
    """Sizes of a message in 4-byte elements, and what happens to it."""

    sent: int
    expected: int
    dtype: torch.dtype = torch.float32
    damage: str = ""


WRONG = {
    "short": Wrong(3, 6),
    "long": Wrong(6, 3),
    "nothing": Wrong(0, 6),
    "short, large": Wrong(500 * KIB, 700 * KIB),
    "long, large": Wrong(700 * KIB, 500 * KIB),
    "another type": Wrong(6, 6, torch.int32),
}
WRONG_IF_CHECKED = {
    # One whole piece of two: only checks tell it from a message whose second piece is late.
    "fewer pieces": Wrong(256 * KIB, 512 * KIB),
    "another byte": Wrong(6, 6, damage="byte"),
    "another micro-batch": Wrong(6, 6, damage="micro-batch"),
    "written meanwhile": Wrong(6, 6, damage="write"),
}


class LateDevice(CpuDevice):
    """Copies what is sent, piece by piece and only after a while; MPI uses no buffer before."""

    def __init__(self) -> None:
        self.messages: Any = self

    def buffer(self, sizes: Sizes, dtype: torch.dtype) -> Message:
        return torch.zeros(sizes, dtype=dtype), [Later(lambda: None)]

    def incoming(self, buffer: Tensor) -> Tensor:
        return buffer

    def outgoing(self, vector: Tensor, piece_bytes: int) -> Message:
        source, copy = vector.view(-1).view(torch.uint8), torch.zeros_like(vector)
        target = copy.view(-1).view(torch.uint8)
        pieces = zip(source.split(piece_bytes), target.split(piece_bytes), strict=True)
        return copy, [Later(partial(to.copy_, piece)) for piece, to in pieces]


class Later:
    """Acts when it is asked the third time whether it has; nobody waits for the device."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act, self._asked = act, 0

    def query(self) -> bool:
        self._asked += 1
        if self._asked == 3:
            self._act()
        return self._asked >= 3


def exchange(transport: Transport) -> None:
    """Strided tensors go both ways at once, of a size that is known or not."""
    lanes = (THERE, BACK)
    outgoing, incoming = (transport.line(lanes[i], 1 - RANK) for i in (RANK, 1 - RANK))
    for micro_batch, size in enumerate((4, 4, 1, 4, 1)):
        receiving = incoming.start_receive(micro_batch, size)
        assert (receiving.places is not None) is (micro_batch in (1, 3, 4))
        sent = outgoing.start_send(micro_batch, size, tensors(RANK, micro_batch, size))
        found = incoming.finish_receive(receiving)
        outgoing.finish_send(sent)
        expected = tensors(1 - RANK, micro_batch, size)
        assert list(found) == list(expected)
        for slot, tensor in expected.items():
            assert_same(slot.value, found[slot], tensor)
    for slot, words in {
        Slot("plain"): "should be float32 [4, 6] with strides [6, 1], but is float32 [3, 6] with",
        Slot("none"): "should be nothing, but is float32 [3, 6] with",
    }.items():
        with pytest.raises(WorkerError) as raised:
            outgoing.start_send(0, 4, {**tensors(0, 0, 4), slot: torch.zeros(3, 6)})
        assert words in raised.value.message
    WORLD.Barrier()


def tensors(rank: int, micro_batch: int, size: int) -> dict[Slot, Tensor | None]:
    base = torch.arange(float(size * 6)).view(size, 6) + 1000 * rank + 10000 * micro_batch
    values = {
        "plain": base,
        "turned": base.t(),
        "gaps": base[:, 1::2],
        "rows": base[:, :1].expand(size, 5),
        "none": None,
        "whole": base.to(torch.int64),
        "large": base.repeat(100, 50).bfloat16(),
        "dot": base.sum(),
        "empty": base[:0],
    }
    return {Slot(name): value for name, value in values.items()}


def assert_same(name: str, found: Tensor | None, sent: Tensor | None) -> None:
    assert (found is None) is (sent is None), name
    if sent is not None and found is not None:
        assert torch.equal(found, sent), name
        assert found.dtype == sent.dtype
        assert name == "gaps" or found.stride() == sent.stride(), name


def several(transport: Transport, order: str) -> None:
    """Messages of a lane on their way at once, sent in the order in which their receives start."""

    def size_of(name: str) -> int:
        return 1 if name.endswith("s") else 2

    def filled(name: str) -> Tensor:
        return torch.full((size_of(name), 30), float(name[0]))

    line, posted = transport.line(THERE, 1 - RANK), {}
    for step in order.split():
        sign, name = step[0], step[1:]
        if RANK and sign == "+":
            posted[name] = line.start_receive(int(name[0]), size_of(name))
        elif RANK:
            assert_same(order, line.finish_receive(posted[name])[A], filled(name))
        elif sign == "+":
            posted[name] = line.start_send(int(name[0]), size_of(name), {A: filled(name)})
    for sent in posted.values() if RANK == 0 else ():
        line.finish_send(sent)
    WORLD.Barrier()


def send_and_go_on() -> None:
    """The second message has left before its receiver, which has posted its buffers, waits for it.

    Its note is far longer than it is.
    """
    slots = [Slot(f"{'long' * 50}-{index}") for index in range(2000)]
    line = Transport(WORLD.Dup(), CpuDevice(), {THERE: slots}, check=True).line(THERE, 1 - RANK)
    message: dict[Slot, Tensor | None] = {**dict.fromkeys(slots), slots[7]: torch.ones(3)}
    for index in range(2):
        posted = line.start_receive(index, 2) if RANK else line.start_send(index, 2, message)
        if RANK == 0:
            line.finish_send(posted)
        if index == 1:
            WORLD.Barrier()
        if RANK:
            assert line.finish_receive(posted)[slots[7]] is not None


def send_wrong(line: Line, case: Wrong) -> Any:
    """The first message announces the size; before the second, it changes on one side."""
    line.finish_send(line.start_send(0, 2, {A: torch.zeros(case.expected)}))
    tensor = torch.ones(case.sent, dtype=case.dtype)
    line._places[2] = line._places_of([Layout.of(tensor)])
    sent = line.start_send(7 if case.damage == "micro-batch" else 1, 2, {A: tensor})
    if case.damage == "write":
        tensor[0] = 5.0
        line.finish_send(sent)
    return sent


def receive_wrong(line: Line, case: Wrong) -> None:
    line.finish_receive(line.start_receive(0, 2))
    compare = Line._compare

    def damaged(self: Line, posted: Any, buffers: Any = ()) -> None:
        if case.damage == "byte" and buffers:
            buffers[0].view(-1)[3] = -1.0
        compare(self, posted, buffers)

    with mock.patch.object(Line, "_compare", damaged):
        line.finish_receive(line.start_receive(1, 2))


def main(file: str, *hows: str) -> None:
    every = list(tensors(0, 0, 1))
    devices = CpuDevice(), LateDevice()
    for (mode, pieces), device, check in product(WAYS, devices, (False, True)):
        with Progress(mode, pieces) as progress:
            lanes = {THERE: every, BACK: every}
            exchange(Transport(WORLD.Dup(), device, lanes, progress, check=check))
    for (mode, size, order), device, check in product(ORDERS, devices, (False, True)):
        with Progress(mode, Pieces(size, under_way=2)) as progress:
            several(Transport(WORLD.Dup(), device, {THERE: [A]}, progress, check=check), order)
    send_and_go_on()
    kept: list[Any] = []  # what was not received is on its way until the end
    for how in hows:
        mode, check = how.split()[0], "check" in how
        pieces = WHOLE if mode == "none" else Pieces(2**20, under_way=4)
        for name, case in {**WRONG, **(WRONG_IF_CHECKED if check else {})}.items():
            with Progress(mode, pieces) as progress:
                transport = Transport(WORLD.Dup(), CpuDevice(), {THERE: [A]}, progress, check=check)
                line, error = transport.line(THERE, 1 - RANK), None
                kept.append((transport, line))
                try:
                    kept.append((receive_wrong if RANK else send_wrong)(line, case))
                except WorkerError as raised:
                    error = raised.message
                errors = WORLD.gather(error)
                if errors is not None:
                    with Path(file).open("a") as lines:
                        lines.write(json.dumps([how, name, errors]) + "\n")
    WORLD.Barrier()
    WORLD.Abort(7)


if __name__ == "__main__":
    main(*sys.argv[1:])
