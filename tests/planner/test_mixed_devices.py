"""Clusters whose nodes differ in speed and memory."""

from dataclasses import replace

import pytest
from checked_plans import planned

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.costs.devices import exchanges
from pipectl.simulate import simulate

LINK = Link(1e-5, 1e9)
SLOW, FAST = Device("slow", 1.0, 10**9), Device("fast", 3.0, 10**8)


def cluster_of(*devices, ranks=2):
    nodes = tuple(Node(f"n{i}", ranks, ranks, device) for i, device in enumerate(devices))
    return Cluster("c", "test", nodes, LINK, LINK)


def test_faster_devices_get_more_work(chain) -> None:
    plan = planned(chain(16), cluster_of(SLOW, FAST), 128, micro_batches=16, stages=4)
    sizes = {stage.ranks[0]: len(stage.nodes) for stage in plan.stages}
    assert min(sizes[2], sizes[3]) >= 6
    assert max(sizes[0], sizes[1]) <= 2


def test_what_plans_for_equal_devices_lose_is_gained(chain) -> None:
    """The best plan that takes all devices for equal, on the devices as they are."""
    mixed = cluster_of(SLOW, FAST)
    equal = cluster_of(SLOW, replace(SLOW, kind="fast"))
    request = PlanRequest("job", 128, micro_batches=16)
    naive_s = simulate(make_plan(chain(16), equal, request), mixed).step_time_s
    assert make_plan(chain(16), mixed, request).prediction.step_time_s < 0.75 * naive_s


def test_slow_devices_that_only_delay_stay_idle(chain) -> None:
    crawling = replace(SLOW, speed=0.01)
    plan = planned(chain(8), cluster_of(crawling, FAST), micro_batches=8)
    assert sorted(stage.ranks[0] for stage in plan.stages) == [2, 3]


def test_large_parts_go_where_memory_is(make_operator, make_profile) -> None:
    """The first operator fits only a slow device."""
    large = (("p0", 3 * 10**7),)
    operators = [make_operator(i, **({"parameters": large} if i == 0 else {})) for i in range(8)]
    profile = make_profile(operators, [(i, i + 1) for i in range(7)])
    plan = planned(profile, cluster_of(SLOW, FAST), micro_batches=8)
    assert plan.stages[0].ranks[0] in (0, 1)
    assert {2, 3} & {stage.ranks[0] for stage in plan.stages}


@pytest.mark.parametrize(
    ("devices", "ranks", "expected"),
    [
        ((SLOW,), 4, []),
        ((SLOW, SLOW, SLOW, SLOW), 1, []),
        ((SLOW, SLOW), 2, [(2, 1, 0, 3), (3, 1, 2, 0)]),
        ((FAST, SLOW), 2, [(2, 1, 0, 3), (3, 1, 2, 0), (0, 2, 1, 3), (0, 3, 2, 1)]),
        ((FAST, SLOW, SLOW, SLOW), 1, [(1, 0, 2, 3), (2, 1, 0, 3), (3, 1, 2, 0)]),
    ],
    ids=["one node", "equal nodes", "pairs", "unequal pairs", "one fast node"],
)
def test_stages_exchange_ranks_only_if_that_makes_a_difference(devices, ranks, expected) -> None:
    assert exchanges((0, 1, 2, 3), cluster_of(*devices, ranks=ranks)) == expected
