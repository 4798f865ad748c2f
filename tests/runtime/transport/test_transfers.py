"""Messages in pieces, from this process to itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from pipectl.capture import Lane, Slot
from pipectl.graph import TransferKind
from pipectl.runtime.device import CpuDevice, Message, Sizes
from pipectl.runtime.transport import Transport
from pipectl.runtime.transport.transfer import Call, Pieces, PiecewiseTransfer, Progress, memory


@cache
def own() -> MPI.Intracomm:
    """What stays unreceived here is nobody else's."""
    return MPI.COMM_SELF.Dup()


def a_message() -> str:
    return "a message"


class Counted:
    """Starts messages to this process and remembers their sizes."""

    def __init__(self, sent: Tensor, received: Tensor) -> None:
        self.sent, self.received = sent, received
        self.sizes: list[int] = []

    @property
    def to_send(self) -> tuple[Call, Tensor, int, int]:
        return self.send, self.sent, 0, 5

    @property
    def to_receive(self) -> tuple[Call, Tensor, int, int]:
        return own().Irecv, self.received, 0, 5

    def send(self, piece: Any, rank: int, tag: int) -> MPI.Request:
        self.sizes.append(piece[0].nbytes)
        return own().Issend(piece, rank, tag)


def pair(count: int, dtype: torch.dtype) -> Counted:
    numbers = torch.arange(count).to(dtype)
    return Counted(numbers, torch.full_like(numbers, 99))


def test_no_more_pieces_are_under_way_than_allowed() -> None:
    both = pair(100, torch.uint8)
    sending = PiecewiseTransfer(*both.to_send, Pieces(10, 2))
    assert not sending.advance()
    assert both.sizes == [10, 10]  # synchronous sends: none ends before it is received
    receiving = PiecewiseTransfer(*both.to_receive, Pieces(10, 2), a_message)
    while not (sending.advance() & receiving.advance()):
        pass
    assert both.sizes == [10] * 10


def test_strided_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be contiguous, not of strides \(1, 3\)"):
        memory(torch.ones(2, 3).t(), 0, 24)
    with pytest.raises(ValueError, match="contiguous"):
        memory(torch.ones(6)[::2], 0, 12)


def test_a_helper_moves_a_message_while_nobody_calls() -> None:
    """A thread starts the later pieces; the rank only looks at what arrived."""
    both = pair(1000, torch.uint8)
    pieces = Pieces(10, 1)
    with Progress("thread", pieces) as progress:
        progress.begin(*both.to_send)
        progress.begin(*both.to_receive, a_message)
        for _ in range(2000):
            if torch.equal(both.sent, both.received):
                break
            torch.ones(300, 300) @ torch.ones(300, 300)
    assert len(both.sizes) == 100


def test_what_fails_in_the_helper_is_raised_by_the_next_wait() -> None:
    both = pair(20, torch.uint8)
    pieces = Pieces(10, 1)

    def broken(piece: Any, rank: int, tag: int) -> MPI.Request:
        if both.sizes:
            raise RuntimeError("no second piece")
        return both.send(piece, rank, tag)

    receiving = PiecewiseTransfer(*both.to_receive, pieces, a_message)
    with Progress("thread", pieces) as progress:
        transfer = progress.begin(broken, both.sent, 0, 5)
        with pytest.raises(RuntimeError, match="no second piece"):
            progress.wait([transfer])
    both.send(memory(both.sent, 10, 10), 0, 5)
    while not receiving.advance():
        pass


class LateDevice(CpuDevice):
    """Copies what is sent piece by piece, and only when it is let; MPI uses no buffer before."""

    def __init__(self) -> None:
        self.lets = False
        self.messages: Any = self

    def buffer(self, sizes: Sizes, dtype: torch.dtype) -> Message:
        return torch.zeros(sizes, dtype=dtype), [self.event(lambda: None)]

    def incoming(self, buffer: Tensor) -> Tensor:
        return buffer

    def outgoing(self, vector: Tensor, piece_bytes: int) -> Message:
        source, copy = vector.view(torch.uint8), torch.zeros_like(vector)
        pieces = zip(source.split(piece_bytes), copy.view(torch.uint8).split(piece_bytes))  # noqa: B905
        return copy, [self.event(lambda s=s, c=c: c.copy_(s)) for s, c in pieces]

    def event(self, act: Any) -> Any:
        device = self

        class Event:
            def query(self) -> bool:
                if device.lets:
                    act()
                return device.lets

            def synchronize(self) -> None:
                raise AssertionError("nobody waits for the device")

        return Event()


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("mode", ["none", "thread"])
def test_a_send_that_the_device_is_not_ready_for_waits_in_the_queue(mode: str, check: bool) -> None:
    """It starts at once, leaves in the order of the sends, and no check takes it for damaged."""
    lane, slot, device = Lane(TransferKind.ACTIVATION, 0, 1), Slot("note"), LateDevice()
    with Progress(mode, Pieces(16, 2)) as progress:
        line = Transport(own(), device, {lane: [slot]}, progress, check=check).line(lane, 0)
        values = [torch.arange(10.0) + 100 * index for index in range(3)]
        sent = [line.start_send(index, 1, {slot: value}) for index, value in enumerate(values)]
        received = [line.start_receive(index, 1) for index in range(3)]
        progress.advance()
        assert not any(transfer.done for message in sent for transfer in message.transfers)
        device.lets = True
        for index in (1, 0, 2):
            found = line.finish_receive(received[index])[slot]
            assert found is not None
            assert torch.equal(found, values[index])
            line.finish_send(sent[index])
        progress.advance()  # headers and notes, for which no send waits
