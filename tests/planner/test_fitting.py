from hypothesis import given, settings
from hypothesis import strategies as st
from pipectl.planner.partition.cut_space import CutSpace

from pipectl.cluster import (
    ASSUMED_BETWEEN,
    ASSUMED_WITHIN,
    Cluster,
    Device,
    Node,
    assumed_cluster,
)
from pipectl.planner import PlanRequest
from pipectl.planner.costs.devices import Mix
from pipectl.planner.costs.stage_costs import largest_peak_bytes
from pipectl.planner.graph.blocks import condense
from pipectl.planner.partition.cutter import CutRequest, Cutter
from pipectl.planner.problem import Problem


def problem_of(profile, limit_bytes=None):
    cluster = assumed_cluster("c", [4], 4, None)
    request = PlanRequest("job", 8, memory_limit_bytes=limit_bytes)
    return Problem(profile, cluster, request, condense(profile))


def cutter_of(problem):
    return Cutter(problem, CutSpace.plain(problem.graph))


def fit_of(limits, warm_up):
    """Stages of 8 samples, in the order of kinds of one device each."""
    kinds = len(limits)
    return CutRequest(8, tuple(warm_up), Mix.ordered(range(kinds), kinds), tuple(limits))


def one_kind(limit, warm_up):
    return CutRequest(8, tuple(warm_up), Mix.ordered([0] * len(warm_up), 1), (limit,))


def peak(problem, partition, warm_up):
    costs = problem.table(problem.members(partition), 8).costs
    return largest_peak_bytes(costs, warm_up, problem.baseline_bytes, 1 + max(warm_up))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), stages=st.integers(1, 3))
def test_smallest_peak_of_a_chain_equals_that_of_trying_every_cut(
    data, stages, chain, make_profile, make_operator, partitions_of
) -> None:
    count = data.draw(st.integers(stages, 7))
    operators = [
        make_operator(
            i,
            parameters=((f"p{i}", 1000 * data.draw(st.integers(0, 5))),),
            saved=((f"n{i}:own", 1000 * data.draw(st.integers(0, 3))),),
            output_bytes=0,
            gradient_bytes=0,
        )
        for i in range(count)
    ]
    problem = problem_of(make_profile(operators, [(i, i + 1) for i in range(count - 1)]))
    warm_up = tuple(range(stages, 0, -1))
    best = min(peak(problem, one, warm_up) for one in partitions_of(problem.graph, stages))
    found = cutter_of(problem).smallest_peak(one_kind(float("inf"), warm_up))
    assert min(peak(problem, one.partition, warm_up) for one in found) == best


def test_balanced_stages_respect_the_limit(make_profile, make_operator) -> None:
    heavy = {"saved": (("big", 50_000),)}
    operators = [make_operator(i, **(heavy if i == 0 else {})) for i in range(8)]
    problem = problem_of(make_profile(operators, [(i, i + 1) for i in range(7)]))
    warm_up = (2, 1)
    free = cutter_of(problem).balanced(one_kind(float("inf"), warm_up))
    assert [stage.bit_count() for stage in free[0].partition] == [4, 4]
    limit = peak(problem, (0b1, 0b11111110), warm_up) + 1500
    tight = cutter_of(problem).balanced(one_kind(limit, warm_up))
    assert min(peak(problem, one.partition, warm_up) for one in tight) <= limit
    assert all(one.partition[0].bit_count() < 4 for one in tight)


def test_ranks_with_more_memory_take_more(chain) -> None:
    cluster = Cluster(
        "c",
        "test",
        tuple(Node(f"n{size}", 1, 1, Device("cpu", 1.0, size)) for size in (20_000, 60_000)),
        ASSUMED_WITHIN,
        ASSUMED_BETWEEN,
    )
    profile = chain(8)
    cutter = cutter_of(Problem(profile, cluster, PlanRequest("job", 8), condense(profile)))
    first, second = cutter.smallest_peak(fit_of([20_000, 60_000], (1, 1)))[0].partition
    assert first.bit_count() < second.bit_count()


def test_nothing_fits_gives_nothing(chain) -> None:
    assert cutter_of(problem_of(chain(4))).balanced(one_kind(100, (1, 1))) == []


def test_unlimited_ranks_count_as_equal(chain) -> None:
    found = cutter_of(problem_of(chain(8))).smallest_peak(one_kind(float("inf"), (1, 1)))
    assert any([stage.bit_count() for stage in one.partition] == [4, 4] for one in found)
