"""Waits that sleep, and say that they wait."""

from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from pipectl.runtime import waiting
from pipectl.runtime.waiting import WorkMeter, choose_spin, poll, tell_of_waits

LOOK_S = 1.5e-6
"""Processor time of a call that finds nothing to do."""


@pytest.fixture
def told():
    """What a wait said of itself."""
    found: list[bool] = []
    tell_of_waits(found.append)
    yield found
    tell_of_waits(lambda _: None)


@pytest.mark.parametrize("works", [False, True])
def test_a_long_wait_is_told_whether_or_not_data_moves(told, works):
    poll(lambda: told == [True], lambda _: works)
    assert told == [True, False]


def test_a_short_wait_is_not_told(told):
    poll(lambda: True, lambda _: False)
    assert told == []


def test_a_clock_that_was_wrong_once_does_not_make_waits_spin_for_ever():
    meter = WorkMeter()
    meter.worked(0.0)
    assert sum(meter.worked(LOOK_S) for _ in range(20000)) < 5000


class World:
    """Two ranks, of which the other has said where it is and which cores it may use."""

    rank = 0

    def __init__(self, node: str, cores: set[int]) -> None:
        self._other = node, frozenset(cores)

    def Ibarrier(self) -> MPI.Request:  # noqa: N802
        return MPI.REQUEST_NULL

    def allgather(self, mine: Any) -> list[Any]:
        return [mine, self._other]


@pytest.mark.parametrize(
    ("node", "mine", "others", "looks"),
    [
        ("a", {0, 1}, {2, 3}, None),  # cores of its own: no pause
        ("b", {0, 1}, {0, 1}, None),
        ("a", {0, 1}, {1, 2}, 100),  # shared cores, enough for both ranks: pauses after a while
        ("b", {0}, {0}, 100),
        ("a", {0}, {0}, 2),  # fewer cores than ranks: at once
    ],
)
def test_a_rank_spins_as_long_as_its_cores_allow(
    node: str,
    mine: set[int],
    others: set[int],
    looks: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: mine)
    monkeypatch.setattr(waiting, "_waited", waiting._Waited())
    choose_spin(World(node, others), "a")  # type: ignore[arg-type]
    now, looked, first_pause = [0.0], [0], list[int]()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda _: first_pause.append(looked[0]))

    def done() -> bool:
        looked[0] += 1
        now[0] += 1e-6
        return looked[0] == 2000

    poll(done, lambda _: False)
    assert (first_pause[0] if first_pause else None) == pytest.approx(looks, abs=3)


SEEN = """
import sys, threading, time
from pathlib import Path
from mpi4py import MPI
from pipectl.watch.board import Board
from pipectl.runtime.waiting import broadcast, gather_all, tell_of_waits, waiting

world, folder = MPI.COMM_WORLD, Path(sys.argv[1])
board = Board()
board.phase("capturing the model")
tell_of_waits(board.waits)

def raw():
    with waiting():
        return world.allgather(world.rank)

def look(file):
    while not board.read().waiting:
        time.sleep(0.001)
    file.touch()

for name, meet in (
    ("gather", lambda: gather_all(world, world.rank)),
    ("broadcast", lambda: broadcast(world, [0, 1])),
    ("raw", raw),
):
    file = folder / name
    if world.rank:
        while not file.exists():
            time.sleep(0.001)
    else:
        watcher = threading.Thread(target=look, args=(file,))
        watcher.start()
    assert meet() == [0, 1], name
    if not world.rank:
        watcher.join()
    assert not board.read().waiting
    assert board.read().action == "capturing the model"
"""


@pytest.mark.mpi
def test_before_the_first_step_a_rank_that_waits_for_another_says_so(
    launch, tmp_path: Path
) -> None:
    """The second rank comes only when somebody has seen that the first one waits."""
    script = tmp_path / "seen.py"
    script.write_text(SEEN)
    done = launch(2, script, tmp_path)
    assert done.returncode == 0, done.stderr
