"""Plans for a user's own schedule."""

import pytest

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import InvalidInputError
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan
from pipectl.schedule.listed import Listed

FAST = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e11)
FOLDED = "0F0,0F1,3F0,3F1,3B0,3B1,0B0,0B1\n1F0,1F1,2F0,2F1,2B0,2B1,1B0,1B1\n"
ONE_EACH = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def cluster_of(ranks):
    return Cluster("c", "test", (Node("n", ranks, ranks, Device("cpu", 1.0)),), FAST, FAST)


def request(text, **more):
    return PlanRequest("job", 8, listed=Listed.read(text, "my.csv"), **more)


def test_its_bound_is_that_of_its_own_step(chain) -> None:
    plan = make_plan(chain(8), cluster_of(2), request(FOLDED))
    assert plan.search.step_lower_bound_s <= plan.predicted_step_s
    assert plan.search.gap == plan.predicted_step_s / plan.search.step_lower_bound_s - 1


def test_backwards_are_where_the_lists_say(chain) -> None:
    plan = make_plan(chain(8), cluster_of(4), request(ONE_EACH, backward_apart=None))
    assert [(stage.ranks, stage.backward_ranks) for stage in plan.stages] == [
        ((0,), ()),
        ((1,), ()),
    ]
    with pytest.raises(InvalidInputError, match=r"'my\.csv' cannot have backwards on other ranks"):
        request(ONE_EACH, backward_apart=True)


def test_stages_have_one_replica(chain) -> None:
    plan = make_plan(chain(8), cluster_of(4), request(ONE_EACH, replicas=None))
    assert [stage.replicas for stage in plan.stages] == [1, 1]
    with pytest.raises(InvalidInputError, match=r"replicas: schedule 'my\.csv' allows only one"):
        request(ONE_EACH, replicas=2)


def test_time_that_is_up_gives_an_even_cut(chain) -> None:
    plan = make_plan(chain(8), cluster_of(2), request(FOLDED), lambda: True)
    assert not plan.search.finished


def test_stages_recompute_where_nothing_else_fits(chain) -> None:
    saved = chain(8, saved=(("x", 10**6),))
    limit = 1_500_000
    plan = make_plan(saved, cluster_of(2), request(FOLDED, recompute=None))
    assert max(plan.prediction.peak_memory_bytes) > limit
    assert not any(stage.recompute for stage in plan.stages)
    asked = request(FOLDED, recompute=None, memory_limit_bytes=limit)
    plan = make_plan(saved, cluster_of(2), asked)
    assert max(plan.prediction.peak_memory_bytes) <= limit
    assert any(stage.recompute for stage in plan.stages)


@pytest.mark.parametrize("speeds", [(3.0, 1.0), (1.0, 3.0)])
def test_stages_suit_the_devices_they_lie_on(chain, speeds) -> None:
    nodes = tuple(Node(f"n{speed}", 1, 1, Device("cpu", speed)) for speed in speeds)
    plan = make_plan(chain(16), Cluster("c", "test", nodes, FAST, FAST), request(FOLDED))
    held = [sum(len(s.nodes) for s in plan.stages if s.ranks == (rank,)) for rank in range(2)]
    assert sorted(held) == [held[speeds.index(1.0)], held[speeds.index(3.0)]]
    assert max(held) >= 2 * min(held)
