"""What limits a plan, by hand: time of the busiest rank, and the link that works longest."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node, assumed_cluster
from pipectl.link import Link
from pipectl.plan import Plan, Replication, StageCost
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.explain.bottleneck import StepParts, busiest_link, step_parts
from pipectl.profile import Profile
from pipectl.simulate import simulate

COST = StageCost(1.0, 2.0, 0.5, 0, 0, 0)


def cluster(*ranks: int, bandwidth: float = 1e9, **link: bool) -> Cluster:
    found = assumed_cluster("test", ranks, max(ranks), None)
    slow = Link(0.0, bandwidth, **link)
    return replace(found, within_node=slow, between_nodes=slow)


def parts(plan: Plan, machines: Cluster) -> StepParts:
    return step_parts(plan, machines, simulate(plan, machines))


def test_a_step_is_work_messages_and_what_these_leave_idle(pipeline: Callable[..., Plan]):
    alone = parts(pipeline(1, 4, costs=[COST]), cluster(1))
    assert (alone.compute_s, alone.update_s, alone.step_s) == pytest.approx((12.0, 0.5, 12.5))
    assert (alone.communication_s, alone.bubble_s) == pytest.approx((0.0, 0.0))
    free = parts(pipeline(2, 4, node_of_rank=(0, 1)), cluster(1, 1))
    assert (free.rank, free.stages) == (0, (0,))
    assert (free.step_s, free.compute_s, free.bubble_s) == pytest.approx((15.0, 12.0, 3.0))
    slow = pipeline(2, 1, size_bytes=7, node_of_rank=(0, 1))
    found = parts(slow, cluster(1, 1, bandwidth=1.0))
    assert (found.communication_s, found.bubble_s) == pytest.approx((14.0, 3.0))


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


def test_no_messages_no_link(pipeline: Callable[..., Plan]):
    assert busiest_link(pipeline(1, 4), cluster(1)) is None


@pytest.mark.parametrize(("shared", "messages"), [(True, 2), (False, 1)])
def test_ranks_of_two_nodes_share_a_link_or_have_their_own(
    pipeline: Callable[..., Plan], shared: bool, messages: int
):
    skips = [(0, (2,), True), (1, (3,), True)]
    plan = pipeline(4, 8, size_bytes=1000, skips=skips, node_of_rank=(0, 0, 1, 1))
    plan = replace(plan, transfers=tuple(t for t in plan.transfers if abs(t.source - t.target) > 1))
    found = busiest_link(plan, cluster(2, 2, shared=shared))
    assert found is not None
    assert found.between == ("node" if shared else "rank")
    assert found.bytes_per_step == messages * 8000
    assert found.busy_s == pytest.approx(messages * 8e-6)


def test_a_half_duplex_link_carries_both_directions(pipeline: Callable[..., Plan]):
    plan = pipeline(2, 8, size_bytes=1000, node_of_rank=(0, 1))
    found = busiest_link(plan, cluster(1, 1, duplex=False))
    assert found is not None
    assert found.bytes_per_step == 16000


def replicated(pipeline: Callable[..., Plan], *ranks: tuple[int, ...], way: Replication) -> Plan:
    nodes = (0, 0, 1, 1)
    plan = pipeline(2, 8, size_bytes=1000, node_of_rank=nodes, micro_batch_size=2)
    stages = zip(plan.stages, ranks, strict=True)
    return replace(
        plan, stages=tuple(replace(stage, ranks=held) for stage, held in stages), replication=way
    )


def test_copies_one_behind_the_other_send_nothing_from_node_to_node(
    pipeline: Callable[..., Plan],
):
    plan = replicated(pipeline, (0, 2), (1, 3), way=Replication.WHOLE)
    found = busiest_link(plan, cluster(2, 2))
    assert found is not None
    assert (found.between, found.source, found.target) == ("rank", 0, 1)
    assert found.bytes_per_step == 4000


def test_replicas_that_split_send_their_parts(pipeline: Callable[..., Plan]):
    plan = replicated(pipeline, (0, 1), (2, 3), way=Replication.SPLIT)
    found = busiest_link(plan, cluster(2, 2))
    assert found is not None
    assert (found.between, found.source, found.target) == ("node", 0, 1)
    assert found.bytes_per_step == 8000


def test_saved_values_and_weights_are_messages(pipeline: Callable[..., Plan]):
    cost = replace(COST, saved_bytes=50_000, parameter_bytes=300)
    plan = pipeline(1, 8, costs=[cost], ranks=[0], node_of_rank=(0, 1))
    apart = replace(plan, stages=(replace(plan.stages[0], backward_ranks=(1,)),))
    found = busiest_link(apart, cluster(1, 1))
    assert found is not None
    assert (found.source, found.target) == (0, 1)
    assert found.bytes_per_step == 8 * apart.stages[0].kept_bytes


def test_all_that_leaves_a_node_shares_its_interface(pipeline: Callable[..., Plan]):
    both = [(0, (1, 2), True)]
    plan = pipeline(3, 8, size_bytes=1000, skips=both, node_of_rank=(0, 1, 2))
    plan = replace(plan, transfers=tuple(t for t in plan.transfers if t.source == 0))
    found = busiest_link(plan, cluster(1, 1, 1, interface=True))
    assert found is not None
    assert (found.between, found.source, found.target) == ("node", 0, None)
    assert found.bytes_per_step == sum(8 * item.size_bytes for item in plan.transfers)


def test_the_way_between_switches_can_be_the_busiest(pipeline: Callable[..., Plan]):
    nodes = tuple(Node(name, 1, 1, Device("cpu"), switch=name) for name in "ab")
    far = replace(cluster(1, 1), nodes=nodes, between_switches=Link(0.0, 1e6))
    found = busiest_link(pipeline(2, 8, size_bytes=1000, node_of_rank=(0, 1)), far)
    assert found is not None
    assert (found.between, found.source, found.target) == ("switch", "a", "b")
    assert found.busy_s == pytest.approx(8e-3)
