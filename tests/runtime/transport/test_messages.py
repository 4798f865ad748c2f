"""Messages arrive, whole and in pieces, and what is not what its receiver expects is named.

Started as ``mpiexec -n 2 python -m mpi4py test_messages.py FILE``, two ranks exchange messages in
all ways there are, and then some that are wrong. They end with the file if all was as it should be,
and else without it. They abort in any case, since wrong messages stay on their way.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from torch import Tensor

from pipectl.capture import Lane, Slot
from pipectl.errors import WorkerError
from pipectl.graph import TransferKind
from pipectl.runtime.device import CpuDevice, Message, Sizes
from pipectl.runtime.layout import Layout
from pipectl.runtime.transport import Line, Progress, Transport
from pipectl.runtime.transport.transfer import WHOLE, Pieces, PiecewiseTransfer, memory

OWN = MPI.COMM_SELF.Dup()
"""What stays unreceived here is nobody else's."""


class Counted:
    """A vector of bytes to this process that remembers the sizes of its pieces."""

    def __init__(self, count: int, fails_after: int = 1000) -> None:
        self.sent, self.received = torch.arange(count).byte(), torch.full((count,), 99).byte()
        self.sizes: list[int] = []
        self.fails_after = fails_after
        self.to_send = self.send, self.sent, 0, 5
        self.to_receive = OWN.Irecv, self.received, 0, 5

    def send(self, piece: Any, rank: int, tag: int) -> MPI.Request:
        """Synchronous: it does not end before it is received."""
        if len(self.sizes) == self.fails_after:
            raise RuntimeError("no further piece")
        self.sizes.append(piece[0].nbytes)
        return OWN.Issend(piece, rank, tag)


@pytest.mark.mpi
def test_messages_arrive_in_every_way_and_wrong_ones_are_named(launch: Any, tmp_path: Path) -> None:
    done = launch(2, __file__, tmp_path / "well")
    assert (tmp_path / "well").exists(), done.stderr


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=4))
def test_any_strides_survive(dims: list[tuple[int, int]]) -> None:
    sizes, strides = [size for size, _ in dims], [stride for _, stride in dims]
    tensor = torch.arange(64.0).as_strided(sizes, strides)
    layout = Layout.of(tensor)
    vector = layout.flatten(tensor)
    assert (vector.dim(), vector.is_contiguous(), vector.numel()) == (1, True, layout.count)
    assert layout.count <= tensor.numel()
    assert torch.equal(layout.unflatten(vector.clone()), tensor)


def test_dense_memory_is_sent_without_a_copy_and_other_memory_is_refused() -> None:
    dense = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    rows = torch.ones(1, 3).expand(4, 3)
    for tensor in (dense, dense.permute(2, 0, 1, 3), rows):
        assert Layout.of(tensor).flatten(tensor).data_ptr() == tensor.data_ptr()
    with pytest.raises(ValueError, match="expanded"):  # rows that differ are no expanded one
        Layout.of(rows).flatten(torch.arange(12.0).view(4, 3))
    with pytest.raises(ValueError, match=r"must be contiguous, not of strides \(1, 3\)"):
        memory(torch.ones(2, 3).t(), 0, 24)


def test_no_more_pieces_are_under_way_than_allowed() -> None:
    both = Counted(100)
    sending = PiecewiseTransfer(*both.to_send, Pieces(10, 2))
    assert not sending.advance()
    assert both.sizes == [10, 10]
    receiving = PiecewiseTransfer(*both.to_receive, Pieces(10, 2), lambda: "a message")
    while not (sending.advance() & receiving.advance()):
        pass
    assert both.sizes == [10] * 10


def test_a_helper_moves_a_message_while_nobody_calls() -> None:
    """A thread, which enters the device first, starts the later pieces; the rank only looks at what
    arrived."""
    both, entered = Counted(1000), list[str]()
    with Progress(
        "thread", Pieces(10, 1), lambda: entered.append(threading.current_thread().name)
    ) as progress:
        progress.begin(*both.to_send)
        progress.begin(*both.to_receive, lambda: "a message")
        deadline = time.monotonic() + 60
        while not torch.equal(both.sent, both.received) and time.monotonic() < deadline:
            torch.ones(300, 300) @ torch.ones(300, 300)
    assert len(both.sizes) == 100
    assert entered == ["progress"]


def test_what_fails_in_the_helper_is_raised_by_the_next_wait() -> None:
    both, pieces = Counted(20, fails_after=1), Pieces(10, 1)
    receiving = PiecewiseTransfer(*both.to_receive, pieces, lambda: "a message")
    with Progress("thread", pieces) as progress:
        transfer = progress.begin(*both.to_send)
        with pytest.raises(RuntimeError, match="no further piece"):
            progress.wait([transfer])
    OWN.Send(memory(both.sent, 10, 10), 0, 5)
    while not receiving.advance():
        pass


# The program of two ranks.

WORLD, RANK = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
A, KIB = Slot("a"), 1024
WAY = "from stage 3 (rank 0) to stage 5 (rank 1)"
ACTIVATION = "activation of micro-batch %d from stage 3 to 5"
SIZED = f"the activation of 'a' {WAY} has another size than planned"
DIFFERS = f"a message {WAY} is not what was sent: "
SAID = f"{DIFFERS}{ACTIVATION % 1}: sent was 'a', "
THERE, BACK = Lane(TransferKind.ACTIVATION, 3, 5), Lane(TransferKind.ACTIVATION, 5, 3)
WAYS = [("none", WHOLE), ("poll", Pieces(77, 3)), ("thread", Pieces(64, 2)), ("none", Pieces(4000))]
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
    """Sizes of a message in 4-byte elements, what happens to it, and how its error begins.

    Args:
        whole, pieces: behind ``SIZED``, by the sizes alone, of a message in one or several pieces.
        checked: if checks are on; by default either the size is seen first, or its description.
    """

    sent: int
    expected: int
    whole: str = ""
    pieces: str = ""
    checked: str | tuple[str, ...] = (SIZED, SAID)
    dtype: torch.dtype = torch.float32
    damage: str = ""


PIECE = " in a piece of it: expected 976 KiB, received more than 976 KiB"
ANOTHER = f"{SAID}int32 [6] with strides [1], arrived is 'a', float32 [6] with strides [1]"
OTHER = f"{DIFFERS}the sender sent the {ACTIVATION % 7}, the receiver expects the "
CHANGED = f"'a' changed while it was sent ({ACTIVATION % 1}"
WRONG = [
    Wrong(3, 6, ": expected 24 B, received 12 B"),
    Wrong(6, 3, ": expected 12 B, received more than 12 B"),
    Wrong(0, 6, ": expected 24 B, received 0 B"),
    Wrong(500 * KIB, 700 * KIB, ": expected 2.73 MiB, received 1.95 MiB"),
    Wrong(700 * KIB, 500 * KIB, ": expected 1.95 MiB, received more than 1.95 MiB", PIECE),
]
WRONG_IF_CHECKED = [
    # One whole piece of two: only checks tell it from a message whose second piece is late.
    Wrong(256 * KIB, 512 * KIB),
    Wrong(6, 6, checked=ANOTHER, dtype=torch.int32),
    Wrong(6, 6, checked=f"{SAID}float32 [6]", damage="byte"),
    Wrong(6, 6, checked=OTHER, damage="micro-batch"),
    Wrong(6, 6, checked=CHANGED, damage="write"),
]


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
    """Strided tensors go both ways at once, of a size that is known or not; the second ones lie
    otherwise than the first, and arrive as these."""
    lanes = (THERE, BACK)
    outgoing, incoming = (transport.line(lanes[i], 1 - RANK) for i in (RANK, 1 - RANK))
    for micro_batch, size in enumerate((4, 4, 1, 4, 1)):
        receiving = incoming.start_receive(micro_batch, size)
        assert (receiving.places is not None) is (micro_batch in (1, 3, 4))
        given = tensors(RANK, micro_batch, size)
        if micro_batch == 1:
            given |= {slot: given[slot].contiguous().clone() for slot in map(Slot, ELSEWHERE)}
        sent = outgoing.start_send(micro_batch, size, given)
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


ELSEWHERE = ("turned", "gaps", "images", "conjugate", "negative")


def tensors(rank: int, micro_batch: int, size: int) -> dict[Slot, Any]:
    base = torch.arange(float(size * 6)).view(size, 6) + 1000 * rank + 10000 * micro_batch
    cube = base.view(size, 2, 3)
    values = {
        "plain": base,
        "turned": base.t(),
        "gaps": base[:, 1::2],
        "rows": base[:, :1].expand(size, 5),
        "turned rows": base[:, :3].unsqueeze(1).contiguous().expand(size, 4, 3).permute(2, 0, 1),
        "odd stride of one row": base.as_strided((1, 3), (17, 1)),
        "images": cube.repeat(1, 2, 2).view(size, 2, 2, 6).to(memory_format=torch.channels_last),
        "none": None,
        "whole": base.to(torch.int64),
        "truth": base.t() > 2,
        "large": base.repeat(100, 50).bfloat16(),
        "dot": base.sum(),
        "empty": cube[:, :0],
        "conjugate": torch.complex(base, -base).conj(),  # memory holds the values before
        "negative": torch.complex(base, -base).conj().imag,
        "windows": base.unfold(1, 3, 1),
    }
    return {Slot(name): value for name, value in values.items()}


def assert_same(name: str, found: Tensor | None, sent: Tensor | None) -> None:
    assert (found is None) is (sent is None), name
    if sent is not None and found is not None:
        assert torch.equal(found, sent), name
        strides = sent.contiguous() if name == "windows" else sent
        assert (found.dtype, found.stride()) == (sent.dtype, strides.stride()), name


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


def main(file: str) -> None:
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
    for mode, check in product(("none", "poll", "thread"), (False, True)):
        for case in (*WRONG, *(WRONG_IF_CHECKED if check else ())):
            pieces = WHOLE if mode == "none" else Pieces(2**20, under_way=4)
            with Progress(mode, pieces) as progress:
                transport = Transport(WORLD.Dup(), CpuDevice(), {THERE: [A]}, progress, check=check)
                line, error = transport.line(THERE, 1 - RANK), ""
                kept.append((transport, line))
                try:
                    kept.append((receive_wrong if RANK else send_wrong)(line, case))
                except WorkerError as raised:
                    error = raised.message
                by_size = SIZED + (case.whole if mode == "none" else case.pieces)
                names_it = 0 if case.damage == "write" else 1
                if names_it == RANK:
                    assert error.startswith(case.checked if check else by_size), (mode, case, error)
                WORLD.Barrier()
    WORLD.Barrier()
    if RANK == 0:
        Path(file).touch()
    WORLD.Barrier()
    WORLD.Abort(7)


if __name__ == "__main__":
    main(sys.argv[1])
