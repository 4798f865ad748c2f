"""Which accelerator a rank takes, whatever its launcher shows it."""

from __future__ import annotations

import threading

import pytest
import torch
from mpi4py import MPI

from pipectl.errors import MismatchError
from pipectl.runtime import device
from pipectl.runtime.agreement import accelerators_of, sharing_ranks
from pipectl.runtime.transport import Progress


@pytest.mark.parametrize(
    ("asked", "seen", "taken"),
    [
        (4, 4, [0, 1, 2, 3]),
        (2, 2, [0, 1, 0, 1]),
        (8, 8, [0, 1, 2, 3]),
        (4, 1, [0, 0, 0, 0]),  # each rank is shown its own, always under the number 0
        (2, 4, [0, 1, 0, 1]),
    ],
)
def test_ranks_of_a_node_take_turns(
    monkeypatch: pytest.MonkeyPatch, asked: int, seen: int, taken: list[int]
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: seen)
    monkeypatch.setattr(device, "AcceleratorDevice", lambda index, in_place: index)
    assert [device.choose_device(asked, local) for local in range(4)] == taken


def test_a_job_for_accelerators_does_not_fall_back_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(MismatchError, match="torch finds none on"):  # where it is profiled
        device.choose_device(1, 0)
    with pytest.raises(MismatchError, match="no rank sees an accelerator"):
        accelerators_of(MPI.COMM_SELF)


def test_the_first_ranks_that_share_an_accelerator_are_named() -> None:
    places = [("a", "x"), None, ("a", "y"), ("b", "x"), None, ("a", "y"), ("a", "x")]
    assert sharing_ranks(places) == (2, 5)
    assert sharing_ranks(places[:5]) is None


def test_the_thread_that_moves_messages_enters_the_device_first() -> None:
    entered: list[str] = []
    done = threading.Event()

    def enter() -> None:
        entered.append(threading.current_thread().name)
        done.set()

    with Progress("thread", enter_thread=enter):
        assert done.wait(10)
    assert entered == ["progress"]
