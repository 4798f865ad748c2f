import pytest

from pipectl.cluster import assumed_cluster
from pipectl.planner.costs.devices import placements, pools


@pytest.mark.parametrize(
    ("ranks", "cores", "stages", "expected"),
    [
        ([4], 4, 2, [(0, 1)]),
        ([2, 2], 1, 2, [(0, 1), (0, 2)]),
        ([2, 2], 2, 4, [(0, 1, 2, 3)]),
        ([2, 2], 1, 3, [(0, 1, 2)]),
        ([1, 3], 2, 3, [(0, 1, 2)]),
        ([3, 3, 3], 4, 4, [(0, 1, 2, 3), (0, 1, 3, 6)]),
    ],
)
def test_node_by_node_and_spread(ranks, cores, stages, expected) -> None:
    cluster = assumed_cluster("c", ranks, cores, None)
    assert placements(cluster, pools(cluster), [0] * stages) == expected
