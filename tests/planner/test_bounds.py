"""Bounds and estimates of steps, against what is simulated."""

from dataclasses import replace

import pytest
from checked_plans import cluster_of
from graphs import partitions_of, profiles
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipectl.link import Link, RowTimes
from pipectl.plan import Replication
from pipectl.planner import PlanRequest
from pipectl.planner.bounds import least_step_s
from pipectl.planner.costs.devices import one_each
from pipectl.planner.graph.blocks import condense
from pipectl.planner.partition.layout import Choice, Layout, consecutive
from pipectl.planner.problem import Problem
from pipectl.planner.request import open_orders
from pipectl.profile import OptimizerCost
from pipectl.simulate import simulate

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
    plan = problem.plan(Choice(layout, size, *order))
    found = simulate(plan, cluster, process_baseline_bytes=problem.baseline_bytes)
    ((bound_s,),) = problem.estimator.steps_s([layout], size, [order[1]])
    assert bound_s <= found.step_time_s * (1 + 1e-12)
    assert least_step_s(plan, cluster) <= found.step_time_s * (1 + 1e-12)
    limited = replace(problem.request, memory_limit_bytes=max(found.peak_memory_bytes))
    tight = Problem(profile, cluster, limited, problem.graph)
    excess = tight.estimator.excess([layout], size, [order[1]])
    assert excess[0, 0] <= 1e-9, "what fits is never left out"


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    data=st.data(),
    batch=st.sampled_from([1, 8, 24, 44, 150]),
    size=st.sampled_from([1, 8]),
    counts=st.sampled_from([(1,), (4,), (2, 1), (1, 3), (1, 2, 1), (1, 1, 1), (1, 1, 1, 1)]),
    together=st.booleans(),
    latency_s=st.sampled_from([0.0, 1e-6]),
)
def test_estimates_are_what_is_simulated_if_messages_are_short(
    data, batch, size, counts, together, latency_s
) -> None:
    """Also for replicas that split micro-batches, and where the steady state is skipped."""
    assume(together or max(counts) == 1)
    profile = replace(data.draw(profiles(5)), optimizer=data.draw(UPDATES))
    cluster = cluster_of(4, within=Link(latency_s, 1e12))
    request = PlanRequest("job", batch, replicas=None, updates_together=together)
    problem = Problem(profile, cluster, request, condense(profile))
    layout = Layout(some_partition(data, problem, len(counts)), consecutive(counts))
    size = min(size, batch)
    for name, warm_up in open_orders(request, len(counts), problem.micro_batches(size)):
        ((step_s,),) = problem.estimator.steps_s([layout], size, [warm_up])
        choice = Choice(layout, size, name, warm_up, Replication.SPLIT)
        simulated_s = simulate(problem.plan(choice), cluster).step_time_s
        assert step_s == pytest.approx(simulated_s, rel=1e-3, abs=2e-5)
