"""Several messages of a lane on their way at once: MPI tells them apart by their order alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.mpi
RANKS = Path(__file__).with_name("message_order.py")
WHOLE, PIECES = 1000, 16


@pytest.mark.parametrize("how", ["none", "none check"])
@pytest.mark.parametrize(
    "order",
    [
        "+0 +1 -0 +2 -1 -2",  # the first tells what they look like before the third starts
        "+0 +1 +2 -1 -0 -2",  # read in another order than sent
        "+0 -0 +1s +2 -1s -2",  # of a size that is not known, before one that is
    ],
)
def test_receives_that_start_before_layouts_are_known(launch: Any, order: str, how: str) -> None:
    check(launch, order, WHOLE, how)


def test_messages_are_checked_in_whatever_order_they_are_read(launch: Any) -> None:
    check(launch, "+0 -0 +1 +2 -2 -1", WHOLE, "none check")


@pytest.mark.parametrize("how", ["none", "poll", "thread", "thread check"])
def test_pieces_of_several_messages(launch: Any, how: str) -> None:
    """No piece of a message leaves before all of the one before it have."""
    check(launch, "+0 -0 +1 +2 +3s +4s -1 -2 -3s -4s", PIECES, how)


def check(launch: Any, order: str, piece_bytes: int, how: str) -> None:
    done = launch(2, RANKS, order, piece_bytes, *how.split())
    assert done.returncode == 0, done.stderr
