"""Proven plans against an enumeration of everything: cuts, replicas, ranks, sizes and orders."""

from dataclasses import replace
from itertools import pairwise, permutations, product
from math import ceil
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import InfeasibleError
from pipectl.link import Link
from pipectl.plan import Replication
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.exploring.areas import MICRO_BATCHES_IF_PROPORTIONAL
from pipectl.planner.graphs.condense import condense
from pipectl.planner.plans.replica_costs import ReplicaChoice, ReplicaPlans
from pipectl.planner.proof import proven
from pipectl.planner.proof.search import SAME
from pipectl.planner.request import micro_batch_sizes
from pipectl.schedule.one_f_one_b import policy_a, policy_b
from pipectl.simulate import simulate

KINDS = [Device("slow"), Device("fast", 3.0)]
LINK = Link(1e-4, 1e7)
MOST_PLANS = 1500
SLOW_TO_DRAW = settings(
    deadline=None,
    suppress_health_check=[
        HealthCheck.data_too_large,
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
    ],
)


@st.composite
def clusters(draw, most=4):
    """Two to four ranks, equal or not, some in one node; each has a core."""
    nodes, left = [], draw(st.integers(2, most))
    while left:
        ranks = min(left, draw(st.integers(1, 2)))
        nodes.append(Node(f"n{len(nodes)}", ranks, ranks, draw(st.sampled_from(KINDS))))
        left -= ranks
    between = replace(LINK, bandwidth_bytes_per_s=draw(st.sampled_from([3e6, 1e7])))
    return Cluster("c", "test", tuple(nodes), LINK, between)


def random_profile(rng, count, density, make_operator, make_profile):
    """Costs are never equal by chance: who is first on a shared link depends on nothing else."""
    operators = [
        make_operator(
            index,
            forward_s=rng.uniform(1e-3, 1e-2),
            backward_s=rng.uniform(0, 2e-2),
            output_bytes=rng.randint(1, 10**5),
            gradient_bytes=rng.choice([0, rng.randint(1, 10**5)]),
            parameters=((f"p{index % 5}", 10**4 * (1 + index % 5)),),
        )
        for index in range(count)
    ]
    edges = [
        (one, other)
        for one in range(count)
        for other in range(one + 1, count)
        if rng.random() < density
    ]
    return make_profile(operators, edges)


def named_alike(cluster, sequence):
    """The ranks of a sequence, with equal nodes and ranks renamed by their first appearance."""
    kinds = [(node.ranks, node.device) for node in cluster.nodes]
    nodes, ranks, found = {}, {}, []
    for rank in sequence:
        node = cluster.node_of_rank[rank]
        if node not in nodes:
            taken = sum(kinds[other] == kinds[node] for other in nodes)
            alike = [index for index, kind in enumerate(kinds) if kind == kinds[node]]
            nodes[node] = alike[taken]
        first = cluster.node_of_rank.index(nodes[node])
        ranks[nodes[node]] = ranks.get(nodes[node], -1) + 1
        found.append(first + ranks[nodes[node]])
    return tuple(found)


def every_layout(cluster, request):
    """(ranks of every stage, one a replica; how they share the work)."""
    for stages in range(1, cluster.ranks + 1):
        for replicas in product(range(1, cluster.ranks + 1), repeat=stages):
            units = sum(replicas)
            if units > cluster.ranks or (request.replicas == 1 and units > stages):
                continue
            ends = [sum(replicas[:stage]) for stage in range(stages + 1)]
            sequences = {named_alike(cluster, s) for s in permutations(range(cluster.ranks), units)}
            for flat in sorted(sequences):
                ranks = tuple(flat[a:b] for a, b in pairwise(ends))
                yield from ((ranks, way) for way in Replication if way in request.replications)


def every_order(request, ranks, way, size):
    stages, count = len(ranks), ceil(request.batch_size / size)
    replicas = [len(held) for held in ranks] if way is Replication.WHOLE else None
    least, most = (policy(stages, count, replicas) for policy in (policy_a, policy_b))
    yield "gpipe", (count,) * stages
    if way is Replication.WHOLE or all(len(held) == 1 for held in ranks):
        yield from (("1f1b", depths) for depths in {least, most})
        return
    for depths in product(*(range(a, b + 1) for a, b in zip(least, most, strict=True))):
        if list(depths) == sorted(depths, reverse=True):
            yield "1f1b", depths


def every_plan(profile, cluster, request, partitions_of):
    """Written to be obviously complete, not fast."""
    graph, makers = condense(profile), ReplicaPlans(profile, cluster, request)
    for ranks, way in every_layout(cluster, request):
        sizes = micro_batch_sizes(request, MICRO_BATCHES_IF_PROPORTIONAL * len(ranks))
        for partition in partitions_of(graph, len(ranks)):
            members = tuple(tuple(graph.operators_of(blocks)) for blocks in partition)
            for size in sizes:
                for order in every_order(request, ranks, way, size):
                    yield makers.plan(ReplicaChoice(members, ranks, size, way, *order))


def check(profile, cluster, request, partitions_of):
    """The plan is proven, and nothing that fits is faster."""
    everything = []
    for plan in every_plan(profile, cluster, request, partitions_of):
        everything.append(plan)
        assume(len(everything) <= MOST_PLANS)
    found = make_plan(profile, cluster, request)
    step_s = found.prediction.step_time_s
    assert found.search.gap == 0.0
    assert found.search.finished
    assert found.search.step_lower_bound_s == step_s
    simulations = (simulate(plan, cluster, process_baseline_bytes=5000) for plan in everything)
    limit = request.memory_limit_bytes or float("inf")
    best_s = min(s.step_time_s for s in simulations if max(s.peak_memory_bytes) <= limit)
    assert step_s == pytest.approx(best_s, rel=2 * SAME)


@settings(SLOW_TO_DRAW, max_examples=30)
@given(
    rng=st.randoms(use_true_random=False),
    cluster=clusters(),
    count=st.integers(4, 9),
    density=st.sampled_from([0.3, 0.5, 0.9]),
    micro_batches=st.sampled_from([1, 4, 6, None]),
)
def test_no_plan_without_replicas_is_faster(
    rng, cluster, count, density, micro_batches, make_operator, make_profile, partitions_of
):
    profile = random_profile(rng, count, density, make_operator, make_profile)
    request = PlanRequest("job", 32, micro_batches=micro_batches)
    check(profile, cluster, request, partitions_of)


@settings(SLOW_TO_DRAW, max_examples=25)
@given(
    rng=st.randoms(use_true_random=False),
    cluster=clusters(),
    count=st.integers(3, 6),
    density=st.sampled_from([0.3, 0.9]),
    way=st.sampled_from([None, *Replication]),
    micro_batches=st.sampled_from([2, 4, 6]),
)
def test_no_plan_with_replicas_is_faster(
    rng, cluster, count, density, way, micro_batches, make_operator, make_profile, partitions_of
):
    profile = random_profile(rng, count, density, make_operator, make_profile)
    request = PlanRequest("job", 30, micro_batches=micro_batches, replicas=None, replication=way)
    check(profile, cluster, request, partitions_of)


@settings(SLOW_TO_DRAW, max_examples=3)
@given(rng=st.randoms(use_true_random=False))
def test_no_plan_of_ten_operators_on_four_equal_devices_is_faster(
    rng, make_operator, make_profile, partitions_of
):
    profile = random_profile(rng, 10, 0.9, make_operator, make_profile)
    nodes = tuple(Node(f"n{index}", 1, 1, KINDS[0]) for index in range(4))
    cluster = Cluster("c", "test", nodes, LINK, LINK)
    check(profile, cluster, PlanRequest("job", 32, micro_batches=4), partitions_of)


@settings(SLOW_TO_DRAW, max_examples=10)
@given(rng=st.randoms(use_true_random=False), share=st.sampled_from([0.4, 0.6, 0.8]))
def test_no_plan_that_fits_into_memory_is_faster(
    rng, share, make_operator, make_profile, partitions_of
):
    profile = random_profile(rng, 5, 0.5, make_operator, make_profile)
    nodes = tuple(Node(f"n{index}", 1, 1, KINDS[0]) for index in range(3))
    cluster = Cluster("c", "test", nodes, LINK, LINK)
    alone = make_plan(profile, cluster, PlanRequest("job", 32, micro_batches=4, stages=1))
    limit = round(share * max(alone.prediction.peak_memory_bytes))
    request = PlanRequest("job", 32, micro_batches=4, memory_limit_bytes=limit)
    try:
        make_plan(profile, cluster, request)
    except InfeasibleError:
        assume(False)
    check(profile, cluster, request, partitions_of)


@settings(SLOW_TO_DRAW, max_examples=25)
@given(
    rng=st.randoms(use_true_random=False),
    cluster=clusters(),
    count=st.integers(1, 10),
    density=st.sampled_from([0.0, 0.1, 0.3, 0.6]),
    replicas=st.sampled_from([1, 1, 2, None]),
    way=st.sampled_from([None, *Replication]),
    micro_batches=st.sampled_from([None, 4]),
)
def test_every_small_problem_is_proven(
    rng, cluster, count, density, replicas, way, micro_batches, make_operator, make_profile
):
    profile = random_profile(rng, count, density, make_operator, make_profile)
    assume(replicas is None or replicas <= cluster.ranks)
    request = PlanRequest(
        "job", 32, micro_batches=micro_batches, replicas=replicas, replication=way
    )
    assert make_plan(profile, cluster, request).search.gap == 0.0


@settings(SLOW_TO_DRAW, max_examples=5)
@given(
    rng=st.randoms(use_true_random=False),
    replicas=st.sampled_from([1, None]),
    micro_batches=st.sampled_from([2, 4]),
)
def test_no_plan_is_below_the_lower_bound_where_ranks_share_cores(
    rng, replicas, micro_batches, make_operator, make_profile, partitions_of
):
    profile = random_profile(rng, 4, 0.6, make_operator, make_profile)
    nodes = tuple(Node(f"n{index}", 2, 1, KINDS[index]) for index in range(2))
    cluster = Cluster("c", "test", nodes, LINK, LINK)
    request = PlanRequest("job", 32, micro_batches=micro_batches, replicas=replicas)
    search = make_plan(profile, cluster, request).search
    best_s = min(
        simulate(plan, cluster).step_time_s
        for plan in every_plan(profile, cluster, request, partitions_of)
    )
    assert search.step_lower_bound_s <= best_s * (1 + SAME)


def test_without_time_the_plan_and_its_gap_stay(make_operator, make_profile):
    profile = random_profile(Random(1), 8, 0.3, make_operator, make_profile)
    nodes = tuple(Node(f"n{index}", 1, 1, kind) for index, kind in enumerate(KINDS * 2))
    cluster = Cluster("c", "test", nodes, LINK, LINK)
    request = PlanRequest("job", 32, micro_batches=4, stages=2)
    best = make_plan(profile, cluster, request)
    worse_s = best.prediction.step_time_s * 1.5
    worse = replace(
        best,
        prediction=replace(best.prediction, step_time_s=worse_s),
        search=replace(best.search, step_lower_bound_s=1e-3, gap=worse_s / 1e-3 - 1),
    )
    assert proven(worse, profile, cluster, request, lambda: True) == worse
    again = proven(worse, profile, cluster, request)
    assert again.search.gap == 0.0
    assert again.prediction.step_time_s == pytest.approx(best.prediction.step_time_s, rel=SAME)


def test_large_problems_are_left_as_they_are(chain):
    nodes = (Node("n", 4, 4, KINDS[0]),)
    cluster = Cluster("c", "test", nodes, LINK, LINK)
    plan = make_plan(chain(20), cluster, PlanRequest("job", 32))
    assert proven(plan, chain(20), cluster, PlanRequest("job", 32)) is plan


def test_nothing_is_proven_where_what_was_not_looked_at_could_be_faster(
    chain, make_operator, make_profile
) -> None:
    """Plans with several stages a rank, and those that would fit if they offloaded."""
    cluster = Cluster("c", "test", (Node("n", 2, 2, KINDS[0]),), LINK, LINK)
    request = PlanRequest("job", 4)
    assert make_plan(chain(9), cluster, request).search.gap == 0.0
    assert make_plan(chain(9), cluster, replace(request, interleave=True)).search.gap > 0.0
    operators = [make_operator(i, saved=((f"n{i}:own", 10**6),)) for i in range(9)]
    hungry = make_profile(operators, list(pairwise(range(9))))
    limited = replace(request, memory_limit_bytes=900_000)
    known = make_plan(hungry, cluster, limited)
    assert known.search.gap == 0.0
    free = make_plan(hungry, cluster, request)
    fresh = replace(known, search=replace(known.search, step_lower_bound_s=None))
    unsure = proven(fresh, hungry, cluster, replace(limited, offload=None))
    assert unsure.search.step_lower_bound_s == pytest.approx(free.predicted_step_s)
    assert unsure.search.gap > 0.1
