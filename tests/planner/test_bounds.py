from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link, RowTimes
from pipectl.planner import PlanRequest
from pipectl.planner.bounds import least_step_s
from pipectl.planner.costs.devices import one_each
from pipectl.planner.graph.blocks import condense
from pipectl.planner.partition.layout import Choice, Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import open_orders
from pipectl.profile import OptimizerCost
from pipectl.simulate import simulate

CLUSTERS = [
    Cluster(
        name="c",
        source="test",
        nodes=tuple(
            Node(f"n{i}", ranks, cores, Device("cpu", speed, rows=rows))
            for i, ranks in enumerate(per)
        ),
        within_node=within,
        between_nodes=between,
    )
    for per in ([4], [2, 2], [1, 3])
    for cores in (1, 2, 4)
    for speed in (1.0, 2.0)
    for rows in (None, RowTimes(compute=2e-4, begin=1e-3, end=1e-3))
    for within, between in (
        (Link(1e-4, 1e7), Link(1e-3, 1e6)),
        (Link(1e-4, 1e7), Link(1e-3, 1e6, shared=False, timings=((1, 1e-3), (2000, 5e-3)))),
    )
]


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    cluster=st.sampled_from(CLUSTERS),
    stages=st.integers(1, 4),
    batch=st.integers(1, 20),
    size=st.integers(1, 8),
    together=st.booleans(),
)
def test_nothing_is_simulated_below_the_bounds(
    data, cluster, stages, batch, size, together, profiles, partitions_of
) -> None:
    optimizer = OptimizerCost(0.0, data.draw(st.sampled_from([0.0, 1e-6, 1e-5])))
    profile = replace(data.draw(profiles(most=5, caches=True)), optimizer=optimizer)
    problem = Problem(
        profile, cluster, PlanRequest("job", batch, updates_together=together), condense(profile)
    )
    partitions = list(partitions_of(problem.graph, stages))
    if not partitions:
        return
    size = min(size, batch)
    options = open_orders(problem.request, stages, problem.micro_batches(size))
    recompute = data.draw(st.one_of(st.just(()), st.tuples(*[st.booleans()] * stages)))
    partition = data.draw(st.sampled_from(partitions))
    layout = Layout(partition, one_each(tuple(range(stages))), recompute)
    order = data.draw(st.sampled_from(options))
    choice = Choice(layout, size, *order)
    plan = problem.plan(choice)
    found = simulate(plan, cluster, process_baseline_bytes=problem.baseline_bytes)
    ((bound_s,),) = problem.estimator.steps_s([layout], size, [order[1]])
    assert bound_s <= found.step_time_s * (1 + 1e-12)
    assert least_step_s(plan, cluster) <= found.step_time_s * (1 + 1e-12)
    peaks = found.peak_memory_bytes
    limited = replace(problem.request, memory_limit_bytes=max(peaks))
    tight = Problem(profile, cluster, limited, problem.graph)
    excess = tight.estimator.excess([layout], size, [order[1]])
    assert excess[0, 0] <= 1e-9, "what fits is never left out"


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("latency_s", [0.0, 1e-4])
@pytest.mark.parametrize("batch", [1, 12, 500])
def test_estimates_are_what_is_simulated_if_messages_are_short(
    chain, batch, latency_s, together
) -> None:
    """Also where the steady state is skipped."""
    link = Link(latency_s, 1e12)
    cluster = Cluster("c", "test", (Node("n", 4, 4, Device("cpu")),), link, link)
    profile = replace(chain(9), optimizer=OptimizerCost(0.0, 1e-6))
    request = PlanRequest("job", batch, updates_together=together)
    problem = Problem(profile, cluster, request)
    layout = Layout((0b11, 0b11100, 0b1111 << 5), one_each((0, 1, 2)))
    for name, warm_up in open_orders(problem.request, 3, batch):
        ((step_s,),) = problem.estimator.steps_s([layout], 1, [warm_up])
        found = simulate(problem.plan(Choice(layout, 1, name, warm_up)), cluster)
        assert step_s == pytest.approx(found.step_time_s, rel=1e-8)
