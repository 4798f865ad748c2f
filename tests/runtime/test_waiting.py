"""Waits that sleep, and say that they wait."""

import pytest
from mpi4py import MPI

from pipectl.runtime import waiting
from pipectl.runtime.waiting import WorkMeter, choose_spin, poll, tell_of_waits

LOOK_S = 1.5e-6
"""Processor time of a call that finds nothing to do."""


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_waited", waiting._Waited())


def test_a_long_wait_is_told_whether_or_not_data_moves_and_a_short_one_is_not() -> None:
    told: list[bool] = []
    tell_of_waits(told.append)
    poll(lambda: True)
    assert told == []
    for works in (False, True):
        poll(lambda: told[-1:] == [True], lambda _, works=works: works)
    with waiting.waiting():
        assert told == [True, False, True, False, True]
    assert told == [True, False] * 3


def test_a_clock_that_was_wrong_once_does_not_make_waits_spin_for_ever() -> None:
    meter = WorkMeter()
    meter.worked(0.0)
    assert sum(meter.worked(LOOK_S) for _ in range(20000)) < 5000


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
def test_a_rank_spins_as_long_as_its_cores_allow(monkeypatch, node, mine, others, looks) -> None:
    """It is on node a; the other rank has said where it is and which cores it may use."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: mine)
    other = (node, frozenset(others))
    monkeypatch.setattr(waiting, "gather_all", lambda _, own: [own, other])
    choose_spin(MPI.COMM_SELF, "a")
    now, looked, pauses = [0.0], [0], list[int]()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda _: pauses.append(looked[0]))

    def done() -> bool:
        looked[0] += 1
        now[0] += 1e-6
        return looked[0] == 2000

    poll(done)
    assert (pauses[0] if pauses else None) == pytest.approx(looks, abs=3)
