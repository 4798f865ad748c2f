from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipectl.cluster import Cluster, assumed_cluster
from pipectl.link import Link
from pipectl.plan import Plan, StageCost
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.explain.bottleneck import StepParts, step_parts
from pipectl.profile import Profile
from pipectl.simulate import simulate

COST = StageCost(1.0, 2.0, 0.5, 0, 0, 0)


def cluster(*ranks: int, bandwidth: float = 1e9, **link: bool) -> Cluster:
    found = assumed_cluster("test", ranks, max(ranks), None)
    slow = Link(0.0, bandwidth, **link)
    return replace(found, within_node=slow, between_nodes=slow)


def parts(plan: Plan, machines: Cluster) -> StepParts:
    return step_parts(plan, machines, simulate(plan, machines))


def test_one_rank_only_computes(pipeline: Callable[..., Plan]):
    found = parts(pipeline(1, 4, costs=[COST]), cluster(1))
    assert (found.compute_s, found.update_s, found.step_s) == pytest.approx((12.0, 0.5, 12.5))
    assert (found.communication_s, found.bubble_s) == pytest.approx((0.0, 0.0))


def test_filling_and_draining_is_what_free_messages_leave(pipeline: Callable[..., Plan]):
    found = parts(pipeline(2, 4, node_of_rank=(0, 1)), cluster(1, 1))
    assert (found.rank, found.stages) == (0, (0,))
    assert (found.step_s, found.compute_s, found.bubble_s) == pytest.approx((15.0, 12.0, 3.0))


def test_messages_cost_what_they_delay(pipeline: Callable[..., Plan]):
    slow = cluster(1, 1, bandwidth=1.0)
    found = parts(pipeline(2, 1, size_bytes=7, node_of_rank=(0, 1)), slow)
    assert found.communication_s == pytest.approx(14.0)
    assert found.bubble_s == pytest.approx(3.0)


@given(
    costs=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    micro_batches=st.integers(1, 6),
    size_bytes=st.integers(0, 10),
)
def test_the_parts_add_up_to_the_step(
    pipeline: Callable[..., Plan], costs: Sequence[int], micro_batches: int, size_bytes: int
):
    stages = [replace(COST, forward_s=float(cost)) for cost in costs]
    nodes = range(len(costs))
    plan = pipeline(
        len(costs), micro_batches, costs=stages, size_bytes=size_bytes, node_of_rank=nodes
    )
    found = parts(plan, cluster(*[1] * len(costs), bandwidth=2.0))
    times = (found.busy_s, found.reduction_s, found.offload_s, found.communication_s)
    assert sum(times) + found.bubble_s == pytest.approx(found.step_s)
    assert min(*times, found.bubble_s) >= 0


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_of_steps_that_overlap_one_counts(chain: Callable[..., Profile], schedule: str):
    machines = cluster(1, 1)
    plan = make_plan(chain(8), machines, PlanRequest("job", 32, schedule=schedule))
    found = parts(plan, machines)
    assert found.busy_s == pytest.approx(max(plan.prediction.utilisation) * found.step_s)
    assert found.busy_s + found.communication_s + found.bubble_s == pytest.approx(found.step_s)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_step_without_work_has_no_parts(chain: Callable[..., Profile], schedule: str):
    machines, idle = cluster(1, 1), chain(8, forward_s=0.0, backward_s=0.0)
    idle = replace(idle, optimizer=None)
    found = parts(make_plan(idle, machines, PlanRequest("job", 32, schedule=schedule)), machines)
    assert found.busy_s == 0
