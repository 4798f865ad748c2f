"""Profiles without variants: what the planner takes for their costs, and that it minimises them."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.errors import InfeasibleError
from pipectl.planner.graphs.bitsets import bits
from pipectl.planner.throughput import ThroughputRequest, plan_throughput
from pipectl.planner.throughput.cost import stage_memory_bytes, stage_time_s
from pipectl.planner.throughput.model import workload_of

DEVICES, MICRO_BATCHES = 4, 6


def test_a_value_counts_once_in_each_stage(make_operator, make_profile) -> None:
    operators = [make_operator(index, output_bytes=700, gradient_bytes=300) for index in range(4)]
    work = workload_of(make_profile(operators, [(0, 1), (0, 2), (0, 3)]))
    request = ThroughputRequest(4, bandwidth_bytes_per_s=1e6)

    def moved_s(*blocks):
        ways = {block: work.ways[block][1][0] for block in blocks}
        return stage_time_s(work, request, ways, 1, 1) - len(blocks) * 3e-3

    assert moved_s(0) == pytest.approx(1e-3)
    assert moved_s(1, 2) == pytest.approx(1e-3)
    assert moved_s(0, 1, 2) == pytest.approx(1e-3)
    assert moved_s(0, 1, 2, 3) == pytest.approx(0)


def test_memory_is_parameters_state_and_saved_values(make_operator, make_profile) -> None:
    operators = [make_operator(0), make_operator(1, saved=(("x", 5000), ("y", 600)))]
    work = workload_of(make_profile(operators, [(0, 1)]))
    plain, again = work.ways[1][1]
    assert (plain.fixed_bytes, plain.kept_bytes) == (100 * (2 + 2), 5600)
    assert (again.fixed_bytes, again.kept_bytes) == (400 + 5600 - 1000, 1000)
    assert again.time_s - plain.time_s == pytest.approx(1e-3)


def test_recomputing_what_saves_nothing_is_no_choice(make_operator, make_profile) -> None:
    work = workload_of(make_profile([make_operator(0), make_operator(1)], [(0, 1)]))
    assert len(work.ways[1][1]) == 1


def every_time(work, request, partition, replicas):
    """Times of the slowest stage for every choice of recomputation that fits."""
    behind, found = 0, [0.0]
    for stage, count in zip(reversed(partition), reversed(replicas), strict=True):
        behind += count
        blocks = list(bits(stage))
        times = []
        for ways in product(*(work.ways[block][1] for block in blocks)):
            if stage_memory_bytes(ways, -(-behind // count)) <= request.memory_limit_bytes:
                chosen = dict(zip(blocks, ways, strict=True))
                times.append(stage_time_s(work, request, chosen, 1, count))
        found = [max(time, min(times)) for time in found] if times else []
    return found


@settings(max_examples=40, deadline=None)
@given(data=st.data(), limit=st.integers(1000, 9000), rate=st.sampled_from([1e5, 1e6, 1e9]))
def test_no_plan_is_faster(profiles, partitions_of, data, limit, rate) -> None:
    profile = data.draw(profiles(most=4))
    work = workload_of(profile)
    request = ThroughputRequest(DEVICES, limit, rate, MICRO_BATCHES)
    times = [
        time
        for stages in range(1, DEVICES + 1)
        for partition in partitions_of(work.graph, stages)
        for replicas in product(request.degrees, repeat=stages)
        if sum(replicas) <= DEVICES
        for time in every_time(work, request, partition, replicas)
    ]
    if not times:
        with pytest.raises(InfeasibleError):
            plan_throughput(profile, request)
        return
    plan = plan_throughput(profile, request)
    assert plan.exact
    assert plan.value_s == pytest.approx(min(times), rel=1e-12)
