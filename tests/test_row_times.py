"""Times of rows: between measured sizes, and in the files that hold them."""

import dataclasses

import pytest

from pipectl.cluster import Cluster, assumed_cluster
from pipectl.errors import DataFileError
from pipectl.jobs.job_files import UNKNOWN_ROWS, join_rows
from pipectl.link import RowTimes, seconds_of
from pipectl.profile import Profile

ROWS = RowTimes(
    send_start=((100, 1e-5), (300, 3e-5)),
    send_wait=((100, 1e-6),),
    compute=2e-5,
    begin=1e-4,
    end=2e-4,
    agree=3e-4,
)


@pytest.mark.parametrize(
    ("size", "seconds"), [(0, 1e-5), (100, 1e-5), (200, 2e-5), (300, 3e-5), (500, 5e-5)]
)
def test_times_are_linear_between_sizes_and_beyond_the_largest(size, seconds):
    assert seconds_of(ROWS.send_start, size) == pytest.approx(seconds)


def test_of_one_size_or_none_there_is_one_time():
    assert seconds_of(ROWS.send_wait, 10**6) == 1e-6
    assert seconds_of(ROWS.receive_wait, 10**6) == 0.0


def test_times_that_fall_with_the_size_do_not_become_negative():
    assert seconds_of(((1, 3e-5), (2, 1e-5)), 100) == 0.0


def test_a_cluster_keeps_the_rows_of_its_devices():
    cluster = assumed_cluster("c", [2, 2], 2, None).with_rows(ROWS)
    assert [node.device.rows for node in cluster.nodes] == [ROWS, ROWS]
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_rows_of_a_profile_replace_none_that_a_device_has():
    cluster = assumed_cluster("c", [2, 2], 2, None).with_rows(ROWS)
    other = dataclasses.replace(ROWS, compute=1.0)
    assert cluster.with_rows(other) is cluster
    assert cluster.with_rows(None) is cluster


def test_rows_of_a_cluster_end_what_a_profile_assumes_of_them():
    profile = Profile("p", "test", 1, (), (), assumptions=(f"{UNKNOWN_ROWS} (why)", "other"))
    cluster = assumed_cluster("c", [2], 2, None)
    assert join_rows(profile, cluster) == (profile, cluster)
    known = cluster.with_rows(ROWS)
    joined, same = join_rows(profile, known)
    assert (joined.assumptions, same) == (("other",), known)


def test_a_table_of_falling_sizes_is_refused():
    document = assumed_cluster("c", [2], 2, None).with_rows(ROWS).to_json()
    document["nodes"][0]["device"]["rows"]["send_start"] = [[300, 1e-5], [100, 1e-5]]
    with pytest.raises(DataFileError, match="rising sizes"):
        Cluster.from_json(document)
