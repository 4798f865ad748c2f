"""Plans of small random graphs against everything there is: cuts, ranks, sizes and orders."""

from itertools import permutations

import pytest
from checked_plans import cluster_of, planned
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.link import Link
from pipectl.plan import Replication
from pipectl.planner import PlanRequest
from pipectl.planner.costs.devices import Mix, one_each
from pipectl.planner.graph.blocks import bits, condense
from pipectl.planner.graph.downsets import CutSpace
from pipectl.planner.judge import TIE
from pipectl.planner.partition.cutter import Cutter
from pipectl.planner.partition.layout import Choice, Layout, consecutive
from pipectl.planner.partition.programme import _hash_of
from pipectl.planner.problem import Problem
from pipectl.planner.request import micro_batch_sizes, open_orders
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B, policy_a
from pipectl.simulate import simulate

LINK, BETWEEN = Link(1e-4, 1e7), Link(1e-4, 3e6)
FAST, SLOW = 3.0, 1.0
"""Speeds of devices."""


def machines(*speeds, between=BETWEEN):
    """Nodes of one rank each."""
    return cluster_of(*[1] * len(speeds), speeds=speeds, within=LINK, between=between)


def shares(ranks, stages):
    """Ways to give stages their numbers of replicas."""
    if stages == 0:
        yield ()
        return
    for count in range(1, ranks - stages + 2):
        for rest in shares(ranks - count, stages - 1):
            yield (count, *rest)


def every_choice(problem, partitions_of, size):
    """Written to be obviously complete, not fast; replicas have ranks in rising order."""
    request, ranks = problem.request, problem.cluster.ranks
    count = problem.micro_batches(size)
    for stages in range(1, ranks + 1):
        for partition in partitions_of(problem.graph, stages):
            if request.replicas == 1:
                for place in permutations(range(ranks), stages):
                    for order in open_orders(request, stages, count):
                        yield Choice(Layout(partition, one_each(place)), size, *order)
                continue
            for counts in shares(ranks, stages):
                for way in request.replications:
                    replicas = counts if way is Replication.WHOLE else None
                    depths = policy_a(stages, count, replicas)
                    layout = Layout(partition, consecutive(counts))
                    yield Choice(layout, size, ONE_F_ONE_B.name, depths, way)


def best_step_s(problem, partitions_of, most):
    return min(
        simulate(problem.plan(choice), problem.cluster).step_time_s
        for size in micro_batch_sizes(problem.request, most)
        for choice in every_choice(problem, partitions_of, size)
    )


@settings(max_examples=30, deadline=None)
@given(data=st.data(), count=st.sampled_from([1, 4]))
def test_plans_are_within_a_percent_of_the_best_and_the_best_if_the_gap_is_0(
    data, count, profiles, partitions_of
) -> None:
    profile = data.draw(profiles(most=4, caches=True))
    cluster = machines(*data.draw(st.lists(st.sampled_from([FAST, SLOW]), min_size=1, max_size=3)))
    request = PlanRequest("job", 8 * count, micro_batches=count)
    problem = Problem(profile, cluster, request, condense(profile))
    best_s = best_step_s(problem, partitions_of, count)
    plan = planned(profile, cluster, 8 * count, micro_batches=count)
    step_s, search = plan.predicted_step_s, plan.search
    assert search.finished
    assert best_s * (1 - 1e-9) <= step_s
    assert search.step_lower_bound_s <= best_s * (1 + 1e-9)
    assert step_s <= best_s * 1.01
    if search.gap <= TIE:
        assert step_s <= best_s * (1 + 2 * TIE)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    data=st.data(),
    ranks=st.integers(2, 3),
    way=st.sampled_from([*Replication, None]),
    mixed=st.booleans(),
)
def test_no_plan_with_replicas_is_much_faster_than_the_one_found(
    data, ranks, way, mixed, profiles, partitions_of
) -> None:
    """A search by proposals and moves: nearly always the best plan, never far from it."""
    profile = data.draw(profiles(most=4))
    cluster = machines(*(FAST, SLOW, SLOW)[:ranks] if mixed else [SLOW] * ranks, between=LINK)
    asked = {"replicas": None, "replication": way}
    problem = Problem(profile, cluster, PlanRequest("job", 16, **asked), condense(profile))
    best_s = best_step_s(problem, partitions_of, 16)
    plan = planned(profile, cluster, 16, **asked)
    assert plan.predicted_step_s <= best_s * (1.15 if mixed else 1.02)
    assert plan.search.step_lower_bound_s <= best_s * (1 + 1e-9)


def test_operators_between_which_messages_take_as_long_as_all_work_share_a_stage(chain) -> None:
    """Two stages have the smaller bound, so they are tried first."""
    profile = chain(2, output_bytes=1000, gradient_bytes=1000)
    work_s = sum(each.forward_s + each.backward_s for each in profile.operators)
    cluster = machines(FAST, FAST, between=Link(0.0, 1000 / (work_s / FAST)))
    batch = 4 * profile.micro_batch_size
    assert len(planned(profile, cluster, batch, micro_batches=4).stages) == 1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_least_possible_load_is_found_on_any_mix_of_devices(
    data, profiles, partitions_of
) -> None:
    profile = data.draw(profiles(most=6))
    graph = condense(profile)
    speeds = data.draw(st.lists(st.sampled_from([FAST, SLOW]), min_size=1, max_size=4))
    stages = data.draw(st.integers(1, min(len(speeds), len(graph))))
    times = [each.forward_s + each.backward_s for each in profile.operators]
    loads = [sum(times[index] for index in block.operators) for block in graph.blocks]
    best_s = min(
        (
            max(
                sum(loads[block] for block in bits(part)) / speed
                for part, speed in zip(partition, order, strict=True)
            )
            for partition in partitions_of(graph, stages)
            for order in set(permutations(speeds, stages))
        ),
        default=None,
    )
    if best_s is not None:
        problem = Problem(profile, machines(*speeds), PlanRequest("job", 8), graph)
        cutter = Cutter(problem, CutSpace.plain(graph))
        found_s = min(
            max(
                sum(loads[block] for block in bits(part)) / problem.speeds[kind]
                for part, kind in zip(cut.partition, cut.kinds, strict=True)
            )
            for mix in cutter.mixes(stages)
            for cut in cutter.partitions(stages, 8, mix)
        )
        assert found_s == pytest.approx(best_s, abs=1e-11)


def bottleneck_s(problem, space, stages, size=8):
    """Of the first cut into stages on equal devices, with all operators in it."""
    cut = Cutter(problem, space).partitions(stages, size, Mix.ordered([0] * stages, 1))[0]
    assert sum(cut.partition) == space.graph.everything
    times = problem.block_times(size)
    return max(sum(times[block] for block in bits(part)) for part in cut.partition)


def test_blocks_without_edges_are_merged_instead_of_searched(make_profile, make_operator) -> None:
    tiny = {"forward_s": 1e-7, "backward_s": 0.0}
    operators = [make_operator(i, **(tiny if i % 2 else {})) for i in range(60)]
    profile = make_profile(operators, [(i, i + 2) for i in range(0, 58, 2)])
    space = CutSpace.of(condense(profile), profile)
    assert space.complete
    assert len(space.moved) > 20
    problem = Problem(profile, machines(*[SLOW] * 4), PlanRequest("job", 8), space.graph)
    assert bottleneck_s(problem, space, 3) == pytest.approx(10 * 3e-3, rel=1e-3)


def test_operators_at_the_end_that_take_no_time_have_a_stage(chain) -> None:
    """Sums of the same times differ by rounding: that of all operators was the smaller one."""
    times = [(0.0, 0.001), (0.003, 0.0), (0.0, 0.001), (0.0, 0.0), (0.0, 0.0)]
    profile = chain([{"forward_s": forward, "backward_s": back} for forward, back in times])
    space = CutSpace.of(condense(profile), profile, 100)
    problem = Problem(profile, machines(*[SLOW] * 4), PlanRequest("job", 8), space.graph)
    assert all(bottleneck_s(problem, space, 3, size) > 0 for size in range(1, 20))


def test_long_chains_need_no_recursion(chain) -> None:
    graph = condense(chain(5000))
    assert len(graph) == 5000
    assert [*bits(graph.ancestors[4])] == [0, 1, 2, 3]


def test_results_are_kept_for_the_same_numbers_only() -> None:
    """1.2 and 12.5 read like 1.21 and 2.5 if one is written after the other."""
    assert _hash_of((1.2, 12.5)) != _hash_of((1.21, 2.5))
