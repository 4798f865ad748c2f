"""What a rank writes is read by another process; messages of others are dropped."""

from __future__ import annotations

import os
import time

from pipectl.watch import machine
from pipectl.watch.board import Board, Sight, mapped, shared_memory
from pipectl.watch.wire import Address, Wire, listen, resolve


def test_another_mapping_sees_what_is_written() -> None:
    board = Board()
    board.phase("capturing the model")
    memory, handle = shared_memory()
    board.move_to(memory)
    other = mapped(handle)
    os.close(handle)
    assert other.read() == Sight(2, phase="capturing the model")
    board.step(7)
    board.row(3, 1, 5)
    board.awaits(2, 6, 1)
    board.waits(True)
    board.pace(0.5)
    seen = other.read()
    assert seen[:9] == (3, 3, 1, 5, 2, 6, 1, 7, True)
    assert seen.pace_s == 0.5
    board.row(4, 1, 5)
    assert other.read().peer == -1


def test_a_long_phase_is_cut() -> None:
    board = Board()
    board.phase("ä" * 200)
    assert board.read().phase.startswith("ä" * 60)


def test_messages_arrive_if_they_bear_the_secret() -> None:
    one, own, foreign = Wire(listen(), "s"), Wire(listen(), "s"), Wire(listen(), "t")
    target = resolve(
        Address(["no.such.host.invalid", "localhost"], own.socket.getsockname()[1], "")
    )
    assert target is not None
    foreign.send(target, {"says": "end"})
    foreign.socket.sendto(b"\xff{", target)
    one.send(target, {"says": "beat", "words": "Fatal Python error" + "x" * 10**6})
    deadline = time.monotonic() + 10
    found = own.receive()
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)
        found = own.receive()
    assert [content["says"] for content, _ in found] == ["beat"]
    assert found[0][0]["words"].startswith("Fatal Python error")
    assert len(found[0][0]["words"]) < 10**4
    assert resolve(Address(["no.such.host.invalid"], 1, "")) is None
    one.send(None, {"says": "beat"})


def test_processes_are_told_apart_by_when_they_started() -> None:
    me = machine.process_state(os.getpid())
    assert me is not None
    assert me.letter in "RS"
    assert me.parent == os.getppid()
    assert machine.process_state(2**22 + 1) is None
    assert machine.killed_for_memory() >= 0
    assert machine.shared_files(2**22 + 1) == set()
