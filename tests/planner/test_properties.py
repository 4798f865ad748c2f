"""What holds for every plan, on random small problems: more of anything makes no plan slower."""

from dataclasses import replace
from math import inf
from random import Random

import pytest
from gate_corpus import BASELINE, GRAPHS, nodes, profile_of

from pipectl.errors import InfeasibleError
from pipectl.plan import Replication
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.evaluator import TIE
from pipectl.planner.explain.what_if import with_slower_links


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


@pytest.mark.parametrize("number", range(5))
def test_less_of_anything_and_fewer_choices_make_no_plan_faster(number) -> None:
    profile, cluster, request = problem(number)
    step_s = step_of(profile, cluster, request) * (1 - TIE)
    limit, last = request.memory_limit_bytes, cluster.nodes[number % len(cluster.nodes)]
    fewer = tuple(node for node in cluster.nodes if node is not last)
    shared = tuple(replace(node, cores=1) for node in cluster.nodes)
    for less in (fewer, shared):
        assert step_s <= step_of(profile, replace(cluster, nodes=less), request)
    assert step_s <= step_of(profile, with_slower_links(cluster, 2.0), request)
    closed = {"replicas": 1 + number % 2, "recompute": number % 4 == 0, "schedule": "1f1b"}
    for name, value in (
        closed | ({"memory_limit_bytes": limit * 9 // 10} if limit else {})
    ).items():
        assert step_s <= step_of(profile, cluster, replace(request, **{name: value}))


@pytest.mark.parametrize("number", range(1, 7, 2))
def test_if_everything_takes_twice_as_long_so_does_the_step(number) -> None:
    profile, cluster, request = problem(number)
    slower = replace(
        profile,
        operators=tuple(
            replace(each, forward_s=2 * each.forward_s, backward_s=2 * each.backward_s)
            for each in profile.operators
        ),
        optimizer=replace(
            profile.optimizer_cost, step_s_per_byte=2 * profile.optimizer_cost.step_s_per_byte
        ),
    )
    doubled_s = step_of(slower, with_slower_links(cluster, 2.0), request)
    assert doubled_s == pytest.approx(2 * step_of(profile, cluster, request), rel=1e-6)
