import numpy as np
import pytest

from pipectl.runtime.clock import CommonClock, agree, estimate


def test_the_fastest_trip_tells_offset_and_error():
    # the other clock is 5 s ahead; one way 1 s, the other 1, 3 and 2 s
    trips = np.array([[0.0, 6.0, 2.0], [10.0, 18.0, 14.0], [20.0, 26.5, 23.0]])
    assert estimate(trips) == (5.0, 1.0)


def test_an_offset_moves_the_clock():
    here, there = CommonClock(), CommonClock(100.0)
    assert there() - here() == pytest.approx(100.0, abs=1.0)


@pytest.mark.mpi
def test_ranks_of_one_machine_read_the_same_clock():
    from mpi4py import MPI

    assert agree(MPI.COMM_SELF.Dup()) == CommonClock(0.0, 0.0)
