import numpy as np
import pytest

from pipectl.runtime import clock
from pipectl.runtime.clock import CommonClock, estimate


def test_the_fastest_trip_tells_offset_and_error():
    # the other clock is 5 s ahead; one way 1 s, the other 1, 3 and 2 s
    trips = np.array([[0.0, 6.0, 2.0], [10.0, 18.0, 14.0], [20.0, 26.5, 23.0]])
    assert estimate(trips) == (5.0, 1.0)


def test_an_offset_moves_the_clock():
    here, there = CommonClock(), CommonClock(100.0)
    assert there() - here() == pytest.approx(100.0, abs=1.0)


@pytest.mark.parametrize("what", ["_BOOT", "_NAMESPACE"])
def test_machines_and_namespaces_of_clocks_are_told_apart(monkeypatch, tmp_path, what):
    for name in ("_BOOT", "_NAMESPACE"):
        (tmp_path / name).symlink_to(__file__)
        monkeypatch.setattr(clock, name, tmp_path / name)
    here = clock._machine()
    assert clock._machine() == here
    (tmp_path / "other").write_text("other")
    (tmp_path / what).unlink()
    (tmp_path / what).symlink_to(tmp_path / "other")
    assert clock._machine() != here


AGREEING = """
from mpi4py import MPI
from pipectl.runtime.clock import CommonClock, agree
assert agree(MPI.COMM_WORLD.Dup()) == CommonClock(0.0, 0.0)
"""


@pytest.mark.mpi
def test_ranks_of_one_machine_read_the_same_clock(launch, tmp_path):
    script = tmp_path / "agreeing.py"
    script.write_text(AGREEING)
    done = launch(2, script)
    assert done.returncode == 0, done.stderr
