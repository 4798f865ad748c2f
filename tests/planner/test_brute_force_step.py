"""Plans of small random graphs against everything there is: cuts, ranks, sizes and orders."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.costs.devices import one_each
from pipectl.planner.graph.blocks import bits, condense
from pipectl.planner.judge import TIE
from pipectl.planner.partition.layout import Choice, Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import micro_batch_sizes, open_orders
from pipectl.simulate import simulate

FAST = Device("fast", 3.0)
SLOW = Device("slow", 1.0)
LINK = Link(1e-4, 1e7)


def cluster_of(*devices, ranks=1):
    nodes = tuple(Node(f"n{i}", ranks, ranks, device) for i, device in enumerate(devices))
    return Cluster("c", "test", nodes, LINK, replace(LINK, bandwidth_bytes_per_s=3e6))


def every_choice(problem, partitions_of, size):
    """Written to be obviously complete, not fast."""
    ranks = range(problem.cluster.ranks)
    for stages in range(1, problem.cluster.ranks + 1):
        for partition in partitions_of(problem.graph, stages):
            for placement in permutations(ranks, stages):
                micro_batches = problem.micro_batches(size)
                for order in open_orders(problem.request, stages, micro_batches):
                    yield Choice(Layout(partition, one_each(placement)), size, *order)


def best_step_s(problem, partitions_of, sizes):
    return min(
        simulate(problem.plan(choice), problem.cluster).step_time_s
        for size in sizes
        for choice in every_choice(problem, partitions_of, size)
    )


@settings(max_examples=30, deadline=None)
@given(data=st.data(), count=st.sampled_from([1, 4]))
def test_no_plan_is_below_the_lower_bound_and_none_above_the_best_if_the_gap_is_0(
    data, count, profiles, partitions_of
) -> None:
    profile = data.draw(profiles(most=4, caches=True))
    devices = data.draw(st.lists(st.sampled_from([FAST, SLOW]), min_size=1, max_size=3))
    cluster = cluster_of(*devices)
    request = PlanRequest("job", 8 * count, micro_batches=count)
    problem = Problem(profile, cluster, request, condense(profile))
    best_s = best_step_s(problem, partitions_of, micro_batch_sizes(request, count))
    plan = make_plan(profile, cluster, request)
    step_s, search = plan.prediction.step_time_s, plan.search
    assert search.finished
    assert best_s * (1 - 1e-9) <= step_s
    assert search.step_lower_bound_s <= best_s * (1 + 1e-9)
    assert search.gap == pytest.approx(step_s / search.step_lower_bound_s - 1 if step_s else 0.0)
    if search.gap <= TIE:
        assert step_s <= best_s * (1 + 2 * TIE)


def test_operators_between_which_messages_take_as_long_as_all_work_share_a_stage(chain) -> None:
    """Two stages have the smaller bound, so they are tried first."""
    profile = chain(2, output_bytes=1000, gradient_bytes=1000)
    work_s = sum(each.forward_s + each.backward_s for each in profile.operators)
    cluster = replace(cluster_of(FAST, FAST), between_nodes=Link(0.0, 1000 / (work_s / FAST.speed)))
    request = PlanRequest("job", 4 * profile.micro_batch_size, micro_batches=4)
    assert len(make_plan(profile, cluster, request).stages) == 1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_least_possible_load_is_found_on_any_mix_of_devices(
    data, profiles, partitions_of
) -> None:
    profile = data.draw(profiles(most=6))
    graph = condense(profile)
    devices = data.draw(st.lists(st.sampled_from([FAST, SLOW]), min_size=1, max_size=4))
    stages = data.draw(st.integers(1, min(len(devices), len(graph))))
    loads = [
        sum(profile.operators[i].forward_s + profile.operators[i].backward_s for i in b.operators)
        for b in graph.blocks
    ]
    everything = list(partitions_of(graph, stages))
    if not everything:
        return
    speeds = [device.speed for device in devices]
    best_s = min(
        max(
            sum(loads[b] for b in bits(part)) / speed
            for part, speed in zip(one, order, strict=True)
        )
        for one in everything
        for order in set(permutations(speeds, stages))
    )
    request = PlanRequest("job", 8, micro_batches=1, stages=stages)
    search = make_plan(profile, cluster_of(*devices), request).search
    assert search.exact
    assert search.lower_bound_s == pytest.approx(best_s, abs=1e-11)


def test_the_least_possible_load_stays_known_where_the_proof_finds_another_plan(
    make_profile, make_operator
) -> None:
    """Nothing takes time but updates, which are shorter where stages share a parameter."""
    nothing = {"forward_s": 0.0, "backward_s": 0.0, "output_bytes": 0, "gradient_bytes": 0}
    shared = [make_operator(i, **nothing, parameters=(("p0", 100),)) for i in range(6)]
    request = PlanRequest("job", 8, micro_batches=1, stages=3)
    search = make_plan(make_profile(shared, [(0, 1)]), cluster_of(FAST, FAST, FAST), request).search
    assert (search.exact, search.lower_bound_s, search.max_stage_load_s) == (True, 0.0, 0.0)


def test_the_least_possible_load_stays_known_where_another_planner_cuts_better(
    make_profile, make_operator
) -> None:
    times = [(0.001, 0.002), (0.0, 0.0), (0.0, 0.003), (0.0, 0.002), (0.0, 0.001), (0.0, 0.0)]
    operators = [
        make_operator(
            i,
            forward_s=forward_s,
            backward_s=backward_s,
            output_bytes=0,
            gradient_bytes=0,
            parameters=(("p0", 100),),
        )
        for i, (forward_s, backward_s) in enumerate(times)
    ]
    request = PlanRequest("job", 8, micro_batches=1, stages=4)
    cluster = cluster_of(FAST, FAST, SLOW, SLOW)
    assert make_plan(make_profile(operators, [(0, 1), (0, 2)]), cluster, request).search.exact
