"""Plans with replicas against trying everything, and what their search rests on."""

from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.plan import Replication
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.costs.links import Links, shares
from pipectl.planner.graph.blocks import condense
from pipectl.planner.partition.layout import (
    Choice,
    Layout,
    consecutive,
)
from pipectl.planner.problem import Problem
from pipectl.schedule.one_f_one_b import policy_a, policy_b
from pipectl.simulate import simulate


def cluster_of(machines, speeds=None, memory_bytes=None, **between):
    nodes = tuple(
        Node(f"node{i}", ranks, ranks, Device("cpu", (speeds or [1.0] * 9)[i], memory_bytes))
        for i, ranks in enumerate(machines)
    )
    return Cluster("test", "test", nodes, Link(1e-5, 1e8), Link(1e-4, 1e6, **between))


def problem_of(profile, cluster, batch=64, **asked):
    request = PlanRequest("job", batch, replicas=None, **asked)
    return Problem(profile, cluster, request, condense(profile))


def splits(ranks, stages):
    """Ways to give stages their numbers of replicas, with ranks to spare."""
    if stages == 0:
        yield ()
        return
    for count in range(1, ranks - stages + 2):
        for rest in splits(ranks - count, stages - 1):
            yield (count, *rest)


def layouts_of(problem, stages, partitions_of):
    """All stages with any numbers of replicas, on ranks in rising order."""
    return [
        Layout(partition, consecutive(counts))
        for partition in partitions_of(problem.graph, stages)
        for counts in splits(problem.cluster.ranks, stages)
        if max(counts) <= 8
    ]


def simulated_s(problem, layout, warm_up):
    choice = Choice(layout, 8, "1f1b", warm_up, Replication.SPLIT)
    return simulate(problem.plan(choice), problem.cluster).step_time_s


@settings(max_examples=20, derandomize=True, deadline=None)
@given(data=st.data())
def test_no_plan_of_small_graphs_is_much_better(data, profiles, partitions_of) -> None:
    """A search by proposals and moves: nearly always the best plan, never far from it."""
    profile = data.draw(profiles(6))
    machines = data.draw(st.sampled_from([[4], [2, 2], [1, 1, 1], [3, 1]]))
    cluster = cluster_of(machines, data.draw(st.sampled_from([None, [1.0, 3.0, 2.0]])))
    batch = data.draw(st.sampled_from([8, 24, 48]))
    way = Replication.SPLIT
    problem = problem_of(profile, cluster, batch, micro_batches=batch // 8, replication=way)
    found = make_plan(profile, cluster, problem.request)
    for stages in range(1, min(cluster.ranks, len(problem.graph)) + 1):
        given = stages, problem.micro_batches(8)
        if layouts := layouts_of(problem, stages, partitions_of):
            depths = [policy_a(*given), policy_b(*given)]
            steps_s = problem.estimator.steps_s(layouts, 8, depths)
            best, order = divmod(int(steps_s.argmin()), 2)
            step_s = simulated_s(problem, layouts[best], depths[order])
            assert found.predicted_step_s <= step_s * 1.15


@settings(max_examples=25, derandomize=True, deadline=None)
@given(data=st.data(), batch=st.sampled_from([8, 24, 44]), stages=st.integers(1, 4))
def test_estimates_are_what_is_simulated_if_messages_are_short(
    data, batch, stages, profiles, partitions_of
) -> None:
    """On nodes with links of their own, for replicas that split micro-batches."""
    node = Node("n", 4, 4, Device("cpu"))
    cluster = Cluster("test", "test", (node,), Link(1e-6, 1e12), Link(1e-6, 1e12))
    problem = problem_of(data.draw(profiles(5)), cluster, batch)
    if layouts := layouts_of(problem, stages, partitions_of):
        layout = data.draw(st.sampled_from(layouts))
        given = stages, problem.micro_batches(8)
        for warm_up in (policy_a(*given), policy_b(*given)):
            ((step_s,),) = problem.estimator.steps_s([layout], 8, [warm_up])
            simulated = simulated_s(problem, layout, warm_up)
            assert simulated == pytest.approx(step_s, rel=1e-3, abs=2e-5)


def test_a_search_that_is_cut_short_returns_its_best(chain) -> None:
    """Of those with replicas, too; the more time there is, the better."""
    cluster, request = cluster_of([2, 2]), PlanRequest("job", 64, replicas=None)
    steps = []
    for most in (1, 10, 100, 1000, 10_000):
        looks = iter(range(most))
        plan = make_plan(chain(9), cluster, request, lambda looks=looks: next(looks, -1) < 0)
        steps.append(plan.predicted_step_s)
    assert plan.search.finished
    assert steps[-1] <= min(steps) * (1 + 1e-3)
    assert steps[0] > steps[-1]


def test_sums_take_what_they_take_in_the_simulator() -> None:
    """Of the messages between four replicas on two nodes, four share the link at a time."""
    assert Links(cluster_of([1])).reduce_s(1e6, [0]) == 0.0
    assert Links(cluster_of([2])).reduce_s(1e6, [0, 1]) == pytest.approx(2 * (1e-5 + 5e-3))
    four = Links(cluster_of([2, 2], shared=True)).reduce_s(1e6, range(4))
    assert four == pytest.approx(2 * (1e-4 + 4 * 0.25))


def test_messages_that_share_a_link_follow_each_other() -> None:
    """Two halves over one link between nodes take as long as the whole; over two, half of it."""
    links = Links(cluster_of([2, 2], shared=True))
    assert links.transfer_s(1e6, [0, 1], [2, 3]) == pytest.approx((1.0, 1e-4))
    assert links.transfer_s(1e6, [0], [1]) == pytest.approx((1e-2, 1e-5))
    apart = Links(cluster_of([2, 2], shared=False))
    assert apart.transfer_s(1e6, [0, 1], [2, 3]) == pytest.approx((0.5, 1e-4))
    assert links.transfer_s(1e6, [0], [0]) == (0.0, 0.0)


@pytest.mark.parametrize(("left", "right"), [(1, 1), (1, 3), (2, 3), (4, 2), (5, 3)])
def test_messages_between_replicas_carry_the_micro_batch_once(left, right) -> None:
    found = list(shares(range(left), range(right)))
    assert sum(share for *_, share in found) == pytest.approx(1.0)
    assert len(found) == left + right - gcd(left, right)
    for sender in range(left):
        assert np.isclose(sum(s for a, _, s in found if a == sender), 1 / left)
