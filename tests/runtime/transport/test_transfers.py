"""Messages in pieces, from this process to itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mpi4py import MPI

from pipectl.runtime.transport.transfer import Pieces, PiecewiseTransfer, Progress, memory

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


def test_no_more_pieces_are_under_way_than_allowed() -> None:
    both = Counted(100)
    sending = PiecewiseTransfer(*both.to_send, Pieces(10, 2))
    assert not sending.advance()
    assert both.sizes == [10, 10]
    receiving = PiecewiseTransfer(*both.to_receive, Pieces(10, 2), lambda: "a message")
    while not (sending.advance() & receiving.advance()):
        pass
    assert both.sizes == [10] * 10


def test_strided_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be contiguous, not of strides \(1, 3\)"):
        memory(torch.ones(2, 3).t(), 0, 24)


def test_a_helper_moves_a_message_while_nobody_calls() -> None:
    """A thread starts the later pieces; the rank only looks at what arrived."""
    both = Counted(1000)
    with Progress("thread", Pieces(10, 1)) as progress:
        progress.begin(*both.to_send)
        progress.begin(*both.to_receive, lambda: "a message")
        for _ in range(2000):
            if torch.equal(both.sent, both.received):
                break
            torch.ones(300, 300) @ torch.ones(300, 300)
    assert len(both.sizes) == 100


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
