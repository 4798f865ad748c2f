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
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from torch import Tensor

from pipectl.capture import Slot
from pipectl.errors import WorkerError
from pipectl.lanes import Lane, TransferKind
from pipectl.runtime.device import CpuDevice
from pipectl.runtime.layout import Layout
from pipectl.runtime.staging import Message, Sizes
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
THERE, BACK = Lane(TransferKind.ACTIVATION, 3, 5), Lane(TransferKind.ACTIVATION, 5, 3)
WAYS = [("none", WHOLE), ("none", Pieces(77, 3)), ("thread", Pieces(64, 2)), ("none", Pieces(4000))]


class Wrong(NamedTuple):
    """Sizes of a message in 4-byte elements, what its error says, and what happens to it.

    Args:
        in_pieces: what its error says if it travels in several.
    """

    sent: int
    expected: int
    words: str
    in_pieces: str = ""
    dtype: torch.dtype = torch.float32
    damage: str = ""


SHORT = "in a piece of it: expected 1.00 MiB, received 976 KiB"
LONG = "in a piece of it: expected 976 KiB, received more than 976 KiB"
INTEGERS = "'a', int32 [6] with strides [1], arrived is 'a', float32 [6] with strides [1]"
OTHER = "the activation of micro-batch 7 from stage 3 to 5, the receiver expects the activation of"
WRONG = [
    Wrong(3, 6, "expected 24 B, received 12 B"),
    Wrong(6, 3, "expected 12 B, received more than 12 B"),
    Wrong(0, 6, "expected 24 B, received 0 B"),
    Wrong(6, 6, "has 1 tensors there and 2 here", damage="another slot"),
    Wrong(500 * KIB, 700 * KIB, "expected 2.73 MiB, received 1.95 MiB", SHORT),
    Wrong(700 * KIB, 500 * KIB, "expected 1.95 MiB, received more than 1.95 MiB", LONG),
]
"""With checks, either the size is seen first, or the description."""
WRONG_IF_CHECKED = [
    # One whole piece of two: only checks tell it from a message whose second piece is late.
    Wrong(256 * KIB, 512 * KIB, ""),
    Wrong(6, 6, INTEGERS, dtype=torch.int32),
    Wrong(6, 6, "'a', float32 [6] with strides [1], checksum ", damage="byte"),
    Wrong(6, 6, f"the sender sent {OTHER}", damage="micro-batch"),
    Wrong(6, 6, "'a' changed while it was sent (activation of micro-batch 1", damage="write"),
]


class LateDevice(CpuDevice):
    """Copies what is sent, piece by piece and only after a while; MPI uses no buffer before."""

    def __init__(self) -> None:
        self.messages: Any = self

    def buffer(self, sizes: Sizes, dtype: torch.dtype) -> Message:
        late: Any = [Later(lambda: None)]
        return Message(torch.zeros(sizes, dtype=dtype), late)

    def outgoing(self, vector: Tensor, piece_bytes: int) -> Message:
        source, copy = vector.view(-1).view(torch.uint8), torch.zeros_like(vector)
        target = copy.view(-1).view(torch.uint8)
        pieces = zip(source.split(piece_bytes), target.split(piece_bytes), strict=True)
        late: Any = [Later(partial(to.copy_, piece)) for piece, to in pieces]
        return Message(copy, late)


class Later:
    """Acts when it is asked the third time whether it has; nobody waits for the device."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act, self._asked = act, 0

    def query(self) -> bool:
        self._asked += 1
        if self._asked == 3:
            self._act()
        return self._asked >= 3


def converse(transport: Transport, random_: Random) -> None:
    """Strided tensors go both ways, of sizes that are known or not; several messages are under way
    at once, and end in any order. Some lie otherwise than the first, and arrive as it does."""
    lanes = (THERE, BACK)
    outgoing, incoming = (transport.line(lanes[i], 1 - RANK) for i in (RANK, 1 - RANK))
    sizes = [random_.choice((1, 4)) for _ in range(MESSAGES)]
    received: list[Any] = []
    under_way: list[tuple[int, Any, Any]] = []
    for micro_batch, size in enumerate(sizes):
        is_known = size in sizes[:micro_batch]
        given = tensors(RANK, micro_batch, size)
        if is_known and random_.random() < 0.5:
            given |= {slot: given[slot].contiguous().clone() for slot in map(Slot, ELSEWHERE)}
        receiving = incoming.start_receive(micro_batch, size)
        all_have_layouts = None not in [each.layouts for each in received]
        assert (receiving.layouts is not None) is (is_known and all_have_layouts)
        received.append(receiving)
        under_way.append((micro_batch, receiving, outgoing.start_send(micro_batch, size, given)))
        random_.shuffle(under_way)
        while under_way and (random_.random() < 0.5 or micro_batch == MESSAGES - 1):
            number, receiving, sent = under_way.pop()
            found = incoming.finish_receive(receiving)
            outgoing.finish_send(sent)
            expected = tensors(1 - RANK, number, sizes[number])
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


MESSAGES = 8
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
        "large": base.repeat(50, 25).bfloat16(),
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
    line._layouts[2] = line._layouts_of([Layout.of(tensor)])
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
    every, random_ = list(tensors(0, 0, 1)), Random(1)
    for (mode, pieces), device, check in product(WAYS, (CpuDevice(), LateDevice()), (False, True)):
        with Progress(mode, pieces) as progress:
            lanes = {THERE: every, BACK: every}
            converse(Transport(WORLD.Dup(), device, lanes, progress, check=check), random_)
    send_and_go_on()
    kept: list[Any] = []  # what was not received is on its way until the end
    for mode, check in product(("none", "thread"), (False, True)):
        for case in (*WRONG, *(WRONG_IF_CHECKED if check else ())):
            pieces = WHOLE if mode == "none" else Pieces(2**20, under_way=4)
            with Progress(mode, pieces) as progress:
                slots = [A, Slot("b")] if RANK and case.damage == "another slot" else [A]
                lanes = {THERE: slots}
                transport = Transport(WORLD.Dup(), CpuDevice(), lanes, progress, check=check)
                line, error = transport.line(THERE, 1 - RANK), ""
                kept.append((transport, line))
                try:
                    kept.append((receive_wrong if RANK else send_wrong)(line, case))
                except WorkerError as raised:
                    error = raised.message
                words = (case.in_pieces if mode != "none" else "") or case.words
                if case.damage == "write":
                    assert (words in error) is (RANK == 0), (mode, case, error)
                elif RANK:
                    assert WAY in error, (mode, case, error)
                    assert words in error or (check and case in WRONG), (mode, case, error)
                WORLD.Barrier()
    WORLD.Barrier()
    if RANK == 0:
        Path(file).touch()
    WORLD.Barrier()
    WORLD.Abort(7)


if __name__ == "__main__":
    main(sys.argv[1])
