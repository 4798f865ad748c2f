from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link, RowTimes
from pipectl.planner import PlanRequest
from pipectl.planner.candidates import Candidates, Judge
from pipectl.planner.costs.devices import one_each
from pipectl.planner.costs.stage_costs import least_peaks_bytes
from pipectl.planner.graph.blocks import condense
from pipectl.planner.partition.layout import Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import open_orders
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
)
def test_nothing_is_simulated_below_the_bounds(
    data, cluster, stages, batch, size, profiles, partitions_of
) -> None:
    profile = data.draw(profiles(most=5, caches=True))
    problem = Problem(profile, cluster, PlanRequest("job", batch), condense(profile))
    partitions = list(partitions_of(problem.graph, stages))
    if not partitions:
        return
    size = min(size, batch)
    options = open_orders(problem.request, stages, problem.micro_batches(size))
    layout = Layout(data.draw(st.sampled_from(partitions)), one_each(tuple(range(stages))))
    order = data.draw(st.sampled_from(options))
    plan = problem.plan(problem.choice(layout, size, order))
    found = simulate(plan, cluster, process_baseline_bytes=problem.baseline_bytes)
    table, shares = problem.table(problem.members(layout.partition), size), problem.shares(size)
    ((bound_s,),) = problem.estimator.steps_s([layout], size, [order[1]])
    assert bound_s <= found.step_time_s * (1 + 1e-12)
    least = least_peaks_bytes(table, order[1], shares)
    for stage in range(stages):
        assert problem.baseline_bytes + least[stage] <= found.peak_memory_bytes[stage] + 1


def test_what_does_not_fit_is_not_the_best(chain) -> None:
    profile = chain(4)
    request = PlanRequest("job", 8, memory_limit_bytes=10_000)
    problem = Problem(profile, CLUSTERS[0], request, condense(profile))
    judge = Judge(problem)
    small = Candidates(problem, [Layout((0b1, 0b1110), ((0,), (1,)))], 1, [("1f1b", (2, 1))])
    large = Candidates(problem, [Layout((0b1111,), ((0,),))], 8, [("gpipe", (1,))])
    judge.consider(large)
    assert large.taken
    assert judge.best() is None
    judge.consider(small)
    assert judge.best().candidate == small.taken[0]
