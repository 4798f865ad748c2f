from collections.abc import Callable, Mapping

import pytest

from pipectl.cluster import Cluster, assumed_cluster
from pipectl.errors import InfeasibleError
from pipectl.plan import Plan, Prediction
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.explain.scaling import scaling
from pipectl.planner.request import Planner
from pipectl.profile import Profile

REQUEST = PlanRequest(name="test", batch_size=64)
ONE = assumed_cluster("test", [1], 1, None)


@pytest.fixture
def timed(chain: Callable[..., Profile]) -> Callable[[Mapping[int, float]], Planner]:
    """A planner that takes given times by number of nodes, and fits on no other number."""

    def planner_of(times_s: Mapping[int, float]) -> Planner:
        def planner(profile: Profile, cluster: Cluster, request: PlanRequest) -> Plan:
            nodes = len(cluster.nodes)
            if nodes not in times_s:
                raise InfeasibleError(f"{nodes} are too few")
            plan = make_plan(profile, cluster, request)
            prediction = Prediction(times_s[nodes], 0.25, (), ())
            return Plan(**{**vars(plan), "prediction": prediction})

        return planner

    return planner_of


def test_every_count_is_planned_once_in_rising_order(chain, timed):
    asked: list[int] = []
    planner = timed({1: 8.0, 2: 4.0, 4: 2.0})
    found = scaling(chain(4), ONE, REQUEST, [4, 1, 2, 2], planner, asked.append)
    assert asked == [1, 2, 4]
    assert [count.ranks for count in found.counts] == [1, 2, 4]
    assert [count.samples_per_s for count in found.counts] == [8.0, 16.0, 32.0]


def test_perfect_scaling_costs_the_same_on_every_count(chain, timed):
    found = scaling(chain(4), ONE, REQUEST, [1, 2, 4], timed({1: 7.2, 2: 3.6, 4: 1.8}))
    assert [found.efficiency(count) for count in found.counts] == [1.0, 1.0, 1.0]
    assert [count.node_hours for count in found.counts] == pytest.approx([2.0, 2.0, 2.0])
    assert found.pays_until is found.counts[-1]


@pytest.mark.parametrize(
    ("times_s", "pays"),
    [
        ({1: 8.0, 2: 5.0, 4: 2.5}, 4),  # 60 and 100 percent of the possible gain
        ({1: 8.0, 2: 5.33, 4: 5.0}, 2),  # 50 and 7 percent
        ({1: 8.0, 2: 6.0, 4: 1.0}, 1),  # 33 percent first: what comes later does not count
        ({1: 8.0, 2: 9.0}, 1),
        ({1: 8.0, 3: 4.0}, 3),  # 50 percent: three nodes could be three times as fast
        ({1: 8.0, 3: 4.1}, 1),
    ],
)
def test_scaling_pays_while_nodes_give_half_of_what_they_could(chain, timed, times_s, pays):
    found = scaling(chain(4), ONE, REQUEST, list(times_s), timed(times_s))
    assert found.pays_until is not None
    assert found.pays_until.nodes == pays


def test_efficiency_is_against_the_fewest_nodes_that_fit(chain, timed):
    found = scaling(chain(4), ONE, REQUEST, [1, 2, 4], timed({2: 4.0, 4: 2.5}))
    assert found.counts[0].plan is None
    assert found.counts[0].reason == "1 are too few"
    assert [found.efficiency(count) for count in found.counts] == [None, 1.0, 0.8]
    assert found.base is found.counts[1]


def test_a_model_that_fits_nowhere(chain, timed):
    found = scaling(chain(4), ONE, REQUEST, [1, 2], timed({}))
    assert (found.base, found.pays_until) == (None, None)


def test_steps_that_take_no_time_have_no_efficiency(chain, timed):
    found = scaling(chain(4), ONE, REQUEST, [1, 2], timed({1: 0.0, 2: 0.0}))
    assert [found.efficiency(count) for count in found.counts] == [None, None]
