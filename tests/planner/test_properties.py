"""What holds for every plan, on random small problems: more of anything makes no plan slower."""

from dataclasses import replace
from functools import cache
from math import inf
from random import Random

import pytest

from pipectl.errors import InfeasibleError
from pipectl.plan import Replication
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.evaluator import TIE
from tests.planner.gate.gate_corpus import BASELINE, GRAPHS, nodes, profile_of


def problem(number):
    """On equal and unequal devices, every other one with little memory."""
    draw, little = Random(number), number % 2 == 0
    profile = profile_of(f"any-{draw.choice([*GRAPHS])}-{number}", draw.randint(5, 7), sizes=())
    speeds = draw.choice([(1.0,), (1.0, 0.4), (0.5, 1.0, 0.8)])
    cluster = nodes(*draw.choice([(1, 1, 1), (1, 2), (2, 1)]), speeds=speeds)
    way = draw.choice([*Replication, None])
    request = PlanRequest("job", 16, replicas=None, replication=way, recompute=None)
    if little:
        state = 4 * sum(each.parameter_bytes for each in profile.operators)
        kept = 2 * sum(size for each in profile.operators for _, size in each.saved)
        limit = BASELINE + int(draw.choice([1.5, 2.5]) * (state + kept) / cluster.ranks)
        request = replace(request, memory_limit_bytes=limit)
    return profile, cluster, request


def step_of(profile, cluster, request):
    """Infinite if there is no plan."""
    try:
        return make_plan(profile, cluster, request).predicted_step_s
    except InfeasibleError:
        return inf


@pytest.mark.parametrize("number", [0, 1, 4, 12])
def test_the_order_of_the_nodes_changes_nothing(number) -> None:
    profile, cluster, request = problem(number)
    turned = replace(cluster, nodes=cluster.nodes[::-1])
    for replicas in (None, 1):
        asked = replace(request, replicas=replicas)
        step_s = step_of(profile, cluster, asked)
        assert step_of(profile, turned, asked) == pytest.approx(step_s, rel=TIE)


def renamed(profile, number):
    """The same operators in the same order, with other names."""
    draw, count = Random(number), len(profile.operators)
    names = dict(zip(profile.by_id, draw.sample(range(count), count), strict=True))
    return replace(
        profile,
        operators=tuple(
            replace(
                each,
                id=f"m{names[each.id]}",
                saved=tuple((f"m{names[value]}", size) for value, size in each.saved),
            )
            for each in profile.operators
        ),
        edges=tuple(
            (f"m{names[source]}", f"m{names[target]}") for source, target in profile.edges[::-1]
        ),
    )


@pytest.mark.parametrize("number", [2, 7])
def test_the_names_of_operators_change_nothing(number) -> None:
    profile, cluster, request = problem(number)
    step_s = step_of(renamed(profile, number), cluster, request)
    assert step_s == pytest.approx(whole_step_s(number), rel=TIE)


def reordered(profile, number):
    """The same operators in another topological order; small problems are solved whatever it is."""
    draw, order = Random(number), list[str]()
    before = {each.id: {u for u, v in profile.edges if v == each.id} for each in profile.operators}
    while before:
        order.append(draw.choice([each for each in before if before[each] <= {*order}]))
        del before[order[-1]]
    return replace(profile, operators=tuple(profile.by_id[each] for each in order))


@pytest.mark.parametrize("number", [5, 6, 7, 10])
def test_the_order_of_operators_changes_nothing(number) -> None:
    profile, cluster, request = problem(number)
    other = reordered(profile, number)
    assert other.operators != profile.operators
    assert step_of(other, cluster, request) == pytest.approx(whole_step_s(number), rel=TIE)


@cache
def whole_step_s(number):
    """The step with everything that a problem has."""
    return step_of(*problem(number))


def without_a_node(cluster, number):
    last = cluster.nodes[number % len(cluster.nodes)]
    return replace(cluster, nodes=tuple(node for node in cluster.nodes if node is not last))


def with_one_core(cluster, _):
    return replace(cluster, nodes=tuple(replace(node, cores=1) for node in cluster.nodes))


CLUSTERS = without_a_node, with_one_core, lambda cluster, _: cluster.with_slower_links(2.0)
CLOSED = (
    {"replicas": 1},
    {"replicas": 2},
    {"recompute": False},
    {"recompute": True},
    {"schedule": "1f1b"},
    {"stages": 2},
    {"micro_batches": 4},
)


@pytest.mark.parametrize(
    ("less", "number"), [(i, (2 * i + j) % 5) for i in range(3) for j in (0, 1)]
)
def test_less_of_anything_makes_no_plan_faster(less, number) -> None:
    profile, cluster, request = problem(number)
    step_s = step_of(profile, CLUSTERS[less](cluster, number), request)
    assert whole_step_s(number) * (1 - TIE) <= step_s


@pytest.mark.parametrize(("closed", "number"), [(each, i % 5) for i, each in enumerate(CLOSED)])
def test_fewer_choices_make_no_plan_faster(closed, number) -> None:
    profile, cluster, request = problem(number)
    step_s = step_of(profile, cluster, replace(request, **closed))
    assert whole_step_s(number) * (1 - TIE) <= step_s


@pytest.mark.parametrize("number", [0, 4])
def test_less_memory_makes_no_plan_faster(number) -> None:
    profile, cluster, request = problem(number)
    less = replace(request, memory_limit_bytes=request.memory_limit_bytes * 9 // 10)
    assert whole_step_s(number) * (1 - TIE) <= step_of(profile, cluster, less)


def twice_as_slow(profile):
    """The profile, all of whose times are twice as long."""
    cost = profile.optimizer_cost
    return replace(
        profile,
        operators=tuple(map(_twice_as_slow, profile.operators)),
        optimizer=replace(cost, step_s_per_byte=2 * cost.step_s_per_byte),
    )


def _twice_as_slow(operator):
    return replace(
        operator,
        forward_s=2 * operator.forward_s,
        backward_s=2 * operator.backward_s,
        timings={size: (2 * a, 2 * b) for size, (a, b) in operator.timings.items()},
    )


@pytest.mark.parametrize("number", [1, 3])
def test_if_everything_takes_twice_as_long_so_does_the_step(number) -> None:
    profile, cluster, request = problem(number)
    doubled_s = step_of(twice_as_slow(profile), cluster.with_slower_links(2.0), request)
    assert doubled_s == pytest.approx(2 * whole_step_s(number), rel=1e-6)
