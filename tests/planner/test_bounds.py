"""Bounds and estimates of steps, against what is simulated."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipectl.link import Link, RowTimes
from pipectl.plan import Replication
from pipectl.planner import PlanRequest
from pipectl.planner.bounds import least_step_s
from pipectl.planner.choices import open_orders
from pipectl.planner.costs.devices import one_each
from pipectl.planner.graph.blocks import condense
from pipectl.planner.partition.layout import Choice, Layout, consecutive
from pipectl.planner.plans import plan_of
from pipectl.planner.problem import Problem
from pipectl.profile_parts import OptimizerCost
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B, policy_a, policy_b
from pipectl.simulate import simulate
from tests.planner.gate.checked_plans import cluster_of
from tests.planner.gate.graphs import chain, partitions_of, profiles

UPDATES = st.sampled_from([0.0, 1e-6, 1e-5]).map(lambda update_s: OptimizerCost(0.0, update_s))
TIMED = Link(1e-3, 1e6, shared=False, timings=((1, 1e-3), (2000, 5e-3)))
CLUSTERS = st.builds(
    lambda ranks, **more: cluster_of(*ranks, within=Link(1e-4, 1e7), **more),
    st.sampled_from([(4,), (2, 2), (1, 3)]),
    cores=st.sampled_from([1, 2, 4]),
    speeds=st.sampled_from([(1.0,), (2.0,)]),
    rows=st.sampled_from([None, RowTimes(compute=2e-4, begin=1e-3, end=1e-3)]),
    between=st.sampled_from([Link(1e-3, 1e6), TIMED]),
)


def some_partition(data, problem, stages):
    partitions = list(partitions_of(problem.graph, stages))
    assume(partitions)
    return data.draw(st.sampled_from(partitions))


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    cluster=CLUSTERS,
    stages=st.integers(1, 4),
    batch=st.integers(1, 20),
    size=st.integers(1, 8),
    together=st.booleans(),
)
def test_nothing_is_simulated_below_the_bounds(
    data, cluster, stages, batch, size, together
) -> None:
    profile = replace(data.draw(profiles(most=5, caches=True)), optimizer=data.draw(UPDATES))
    request = PlanRequest("job", batch, updates_together=together)
    problem = Problem(profile, cluster, request, condense(profile))
    partition, size = some_partition(data, problem, stages), min(size, batch)
    recompute = data.draw(st.one_of(st.just(()), st.tuples(*[st.booleans()] * stages)))
    layout = Layout(partition, one_each(tuple(range(stages))), recompute)
    orders = open_orders(problem.request, stages, problem.micro_batches(size))
    order = data.draw(st.sampled_from(orders))
    plan = plan_of(problem, Choice(layout, size, *order))
    found = simulate(plan, cluster, process_baseline_bytes=problem.baseline_bytes)
    ((bound_s,),) = problem.estimator.steps_s([layout], size, [order[1]])
    assert bound_s <= found.step_time_s * (1 + 1e-12)
    assert least_step_s(plan, cluster) <= found.step_time_s * (1 + 1e-12)
    limited = replace(problem.request, memory_limit_bytes=max(found.peak_memory_bytes))
    tight = Problem(profile, cluster, limited, problem.graph)
    excess = tight.estimator.excess([layout], size, [order[1]])
    assert excess[0, 0] <= 1e-9, "what fits is never left out"


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("latency_s", [0.0, 1e-4])
@pytest.mark.parametrize("batch", [1, 12, 500])
def test_estimates_are_what_is_simulated_if_messages_are_short(batch, latency_s, together) -> None:
    """Also where the steady state is skipped."""
    profile = replace(chain(9), optimizer=OptimizerCost(0.0, 1e-6))
    cluster = cluster_of(4, within=Link(latency_s, 1e12))
    problem = Problem(profile, cluster, PlanRequest("job", batch, updates_together=together))
    layout = Layout((0b11, 0b11100, 0b1111 << 5), one_each((0, 1, 2)))
    for name, warm_up in open_orders(problem.request, 3, batch):
        ((step_s,),) = problem.estimator.steps_s([layout], 1, [warm_up])
        found = simulate(plan_of(problem, Choice(layout, 1, name, warm_up)), cluster)
        assert step_s == pytest.approx(found.step_time_s, rel=1e-8)


@pytest.mark.parametrize("replication", list(Replication))
@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 4.0)])
@pytest.mark.parametrize("batch", [8, 11, 16, 24])
def test_no_node_is_charged_work_that_its_replicas_do_not_get(batch, speeds, replication) -> None:
    """Three replicas, two of them on one core, share micro-batches that three do not divide."""
    cluster = cluster_of(1, 2, cores=1, speeds=speeds, within=Link(0.0, 1e12))
    problem = Problem(chain(4), cluster, PlanRequest("job", batch, replicas=3))
    layout = Layout((0b1111,), ((0, 1, 2),))
    for size in (1, 4, 8):
        choice = Choice(layout, size, ONE_F_ONE_B.name, (1,), replication)
        plan = plan_of(problem, choice)
        assert least_step_s(plan, cluster) <= simulate(plan, cluster).step_time_s * (1 + 1e-9)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("interface", [True, False])
@pytest.mark.parametrize("sizes", [(10**6,) * 4, (10**5, 10**7, 10**6, 10**7)])
def test_estimates_know_that_sums_share_links(sizes, interface, together) -> None:
    """Four stages have two replicas each, on two nodes."""
    each = [{"parameters": ((f"p{i}", size),), "backward_s": 4e-3} for i, size in enumerate(sizes)]
    profile = replace(chain(each), optimizer=None)
    between = Link(0.0, 1e8, interface=interface)
    cluster = cluster_of(4, 4, within=Link(0.0, 1e12), between=between)
    problem = Problem(profile, cluster, PlanRequest("job", 32, updates_together=together))
    layout = Layout((1, 2, 4, 8), ((0, 4), (1, 5), (2, 6), (3, 7)))
    for name, warm_up in open_orders(problem.request, 4, 4):
        ((step_s,),) = problem.estimator.steps_s([layout], 8, [warm_up])
        choice = Choice(layout, 8, name, warm_up, Replication.SPLIT)
        simulated_s = simulate(plan_of(problem, choice), cluster).step_time_s
        assert simulated_s == pytest.approx(step_s, rel=0.02)
        assert simulated_s >= sum(sizes) / 1e8


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    data=st.data(),
    batch=st.sampled_from([8, 24, 44]),
    counts=st.sampled_from([(1,), (4,), (2, 1), (1, 3), (1, 2, 1), (1, 1, 1, 1)]),
)
def test_estimates_of_replicas_that_split_micro_batches_are_too(data, batch, counts) -> None:
    profile, cluster = data.draw(profiles(5)), cluster_of(4, within=Link(0.0, 1e12))
    request = PlanRequest("job", batch, replicas=None)
    problem = Problem(profile, cluster, request, condense(profile))
    layout = Layout(some_partition(data, problem, len(counts)), consecutive(counts))
    for policy in (policy_a, policy_b):
        warm_up = policy(len(counts), problem.micro_batches(8))
        ((step_s,),) = problem.estimator.steps_s([layout], 8, [warm_up])
        choice = Choice(layout, 8, ONE_F_ONE_B.name, warm_up, Replication.SPLIT)
        simulated_s = simulate(plan_of(problem, choice), cluster).step_time_s
        assert simulated_s == pytest.approx(step_s, rel=1e-3, abs=2e-5)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    data=st.data(),
    batch=st.sampled_from([8, 24, 44, 300]),
    counts=st.sampled_from([(3,), (4, 1), (2, 3), (1, 3, 2), (2, 1, 1, 2)]),
    together=st.booleans(),
)
def test_estimates_of_replicas_that_take_micro_batches_in_turn_are_too(
    data, batch, counts, together
) -> None:
    """On devices of unequal speed, with a number of micro-batches that replicas do not divide."""
    profile = data.draw(profiles(5))
    speeds = tuple(data.draw(st.lists(st.sampled_from([0.3, 0.7, 1.0]), min_size=6, max_size=6)))
    cluster = cluster_of(*[1] * 6, speeds=speeds, within=Link(0.0, 1e12))
    request = PlanRequest("job", batch, replicas=None, updates_together=together)
    problem = Problem(profile, cluster, request, condense(profile))
    layout = Layout(some_partition(data, problem, len(counts)), consecutive(counts))
    for size, policy in product((4, 8), (policy_a, policy_b)):
        warm_up = policy(len(counts), problem.micro_batches(size), counts)
        ((step_s,),) = problem.estimator.steps_in_turn_s([layout], size, [[warm_up]])
        plan = plan_of(problem, Choice(layout, size, ONE_F_ONE_B.name, warm_up))
        found = simulate(plan, cluster, process_baseline_bytes=problem.baseline_bytes)
        assert found.step_time_s == pytest.approx(step_s, rel=1e-3, abs=2e-5)
        limited = replace(request, memory_limit_bytes=max(found.peak_memory_bytes))
        tight = Problem(profile, cluster, limited, problem.graph).estimator
        assert tight.excess([layout], size, [[warm_up]], in_turn=True)[0, 0] <= 1e-9
