"""Waits that sleep, and say that they wait."""

from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from pipectl.runtime import waiting
from pipectl.runtime.waiting import WorkMeter, poll, spin_if_alone, tell_of_waits

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
    ("node", "mine", "others", "spins"),
    [
        ("a", {0, 1}, {2, 3}, True),
        ("a", {0, 1}, {1, 2}, False),
        ("b", {0, 1}, {0, 1}, True),
        ("b", {0}, {0}, False),
    ],
)
def test_a_rank_spins_if_it_has_cores_of_its_own(
    node: str, mine: set[int], others: set[int], spins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: mine)
    monkeypatch.setattr(waiting._waited, "spins", False)
    spin_if_alone(World(node, others), "a")  # type: ignore[arg-type]
    assert waiting._waited.spins == spins
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    looks = iter(range(2000))
    poll(lambda: next(looks) == 1999, lambda _: False)
    assert bool(slept) != spins


SEEN = """
import sys, threading, time
from pathlib import Path
from mpi4py import MPI
from pipectl.runtime.process import Doing
from pipectl.runtime.waiting import broadcast, gather_all, waiting

world, folder = MPI.COMM_WORLD, Path(sys.argv[1])
doing = Doing()
doing.action = "capturing the model"

def raw():
    with waiting():
        return world.allgather(world.rank)

def look(file):
    while not doing.board.read().waiting:
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
    assert not doing.board.read().waiting
    assert doing.action == "capturing the model"
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
