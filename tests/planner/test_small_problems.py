"""Plans of small random graphs against everything there is: cuts, ranks, sizes and orders."""

from dataclasses import replace
from itertools import permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.link import Link
from pipectl.plan import Replication
from pipectl.planner import PlanRequest
from pipectl.planner.choices import micro_batch_sizes, open_orders
from pipectl.planner.costs.devices import one_each
from pipectl.planner.evaluator import TIE
from pipectl.planner.graph.blocks import bits, bitset, condense
from pipectl.planner.partition.layout import Choice, Layout, consecutive
from pipectl.planner.partition.programme import _hash_of
from pipectl.planner.plans import plan_of
from pipectl.planner.problem import Problem
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B, policy_a
from pipectl.simulate import simulate
from tests.planner.gate import gate_corpus
from tests.planner.gate.checked_plans import cluster_of, planned
from tests.planner.gate.gate_corpus import GRAPHS, profile_of
from tests.planner.gate.graphs import chain, partitions_of, profiles

pytestmark = pytest.mark.slow

LINK, BETWEEN = Link(1e-4, 1e7), Link(1e-4, 3e6)
FAST, SLOW = 3.0, 1.0
"""Speeds of devices."""


def machines(*speeds, between=BETWEEN):
    """Nodes of one rank each."""
    return cluster_of(*[1] * len(speeds), speeds=speeds, within=between)


def one_node(*speeds):
    """One node whose ranks get unequal shares of its speed."""
    cluster = cluster_of(len(speeds), speeds=(FAST,), within=BETWEEN)
    (node,) = cluster.nodes
    shares = tuple(speed / FAST for speed in speeds)
    return replace(cluster, nodes=(replace(node, shares=shares),))


def shares(ranks, stages):
    """Ways to give stages their numbers of replicas, of these ranks or of some of them."""
    if stages == 0:
        yield ()
        return
    for count in range(1, ranks - stages + 2):
        for rest in shares(ranks - count, stages - 1):
            yield (count, *rest)


def every_choice(problem, size):
    """Written to be obviously complete, not fast."""
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
                    for order in rank_orders(problem.cluster):
                        layout = Layout(partition, consecutive(counts, order))
                        yield Choice(layout, size, ONE_F_ONE_B.name, depths, way)


def rank_orders(cluster):
    """One order of the ranks for every order of speeds."""
    speeds = [cluster.device(rank).speed for rank in range(cluster.ranks)]
    every = permutations(range(cluster.ranks))
    return {tuple(speeds[rank] for rank in order): order for order in every}.values()


def best_step_s(profile, cluster, request, most):
    problem = Problem(profile, cluster, request, condense(profile))
    return min(
        simulate(plan_of(problem, choice), cluster).step_time_s
        for size in micro_batch_sizes(request, most)
        for choice in every_choice(problem, size)
    )


@settings(max_examples=20, deadline=None)
@given(
    profile=profiles(most=4, caches=True),
    speeds=st.lists(st.sampled_from([FAST, SLOW]), min_size=1, max_size=3),
    count=st.sampled_from([1, 4]),
    place=st.sampled_from([machines, one_node]),
)
def test_plans_are_within_a_percent_of_the_best_and_the_best_if_the_gap_is_0(
    profile, speeds, count, place
) -> None:
    cluster = place(*speeds)
    request = PlanRequest("job", 8 * count, micro_batches=count)
    best_s = best_step_s(profile, cluster, request, count)
    plan = planned(profile, cluster, 8 * count, micro_batches=count)
    step_s, search = plan.predicted_step_s, plan.search
    assert search.finished
    assert best_s * (1 - 1e-9) <= step_s <= best_s * 1.01
    assert search.step_lower_bound_s <= best_s * (1 + 1e-9)
    if search.gap <= TIE:
        assert step_s <= best_s * (1 + 2 * TIE)


@pytest.mark.parametrize("count", [0, 1, 7, 16, 17, 900])
def test_an_integer_has_the_bits_of_a_set_and_gives_them_back(count):
    places = Random(count).sample(range(1000), count)
    assert bitset(iter(places)) == sum(1 << place for place in places)
    assert list(bits(bitset(places))) == sorted(places)


@pytest.mark.parametrize("number", range(12))
def test_plans_of_measured_sizes_are_within_a_percent_of_the_best_of_all_sizes(number) -> None:
    random, nodes = Random(number), gate_corpus.nodes
    profile = profile_of(f"tiny-{random.choice([*GRAPHS])}-{number}", random.randint(4, 6))
    machines = nodes(3), nodes(2, 1, between=1.2e8), nodes(1, 2, speeds=(2.0, 1.0), cores=1)
    cluster = random.choice(machines)
    best_s = best_step_s(profile, cluster, PlanRequest("job", 32), 24)
    assert planned(profile, cluster, 32).predicted_step_s <= best_s * 1.01


@settings(max_examples=24, derandomize=True, deadline=None)
@given(
    profile=profiles(most=4),
    speeds=st.sampled_from([[SLOW] * 2, [SLOW] * 3, [FAST, SLOW], [FAST, SLOW, SLOW]]),
    way=st.sampled_from([*Replication, None]),
)
def test_plans_with_replicas_are_hardly_slower_than_the_best(profile, speeds, way) -> None:
    cluster, asked = machines(*speeds, between=LINK), {"replicas": None, "replication": way}
    best_s = best_step_s(profile, cluster, PlanRequest("job", 16, **asked), 16)
    plan = planned(profile, cluster, 16, **asked)
    assert plan.search.step_lower_bound_s <= best_s * (1 + 1e-9)
    assert plan.predicted_step_s <= best_s * (1.02 if len(set(speeds)) == 1 else 1.1)


def test_long_chains_need_no_recursion() -> None:
    graph = condense(chain(5000))
    assert len(graph) == 5000
    assert [*bits(graph.ancestors[4])] == [0, 1, 2, 3]


def test_results_are_kept_for_the_same_numbers_only() -> None:
    """1.2 and 12.5 read like 1.21 and 2.5 if one is written after the other."""
    assert _hash_of((1.2, 12.5)) != _hash_of((1.21, 2.5))
