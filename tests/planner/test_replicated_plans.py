"""Plans with replicated stages, against every plan there is of small graphs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import InfeasibleError
from pipectl.link import Link
from pipectl.plan import Replication
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.graphs.condense import condense
from pipectl.planner.plans.replica_costs import ReplicaChoice, ReplicaPlans
from pipectl.planner.request import micro_batch_sizes
from pipectl.planner.search import search_plans
from pipectl.schedule import lower, validate
from pipectl.schedule.one_f_one_b import NAME as ONE_F_ONE_B
from pipectl.schedule.one_f_one_b import policy_a
from pipectl.simulate import simulate

LINK = Link(1e-5, 1e9)


def cluster_of(ranks, link=LINK, memory=None):
    device = Device("cpu", memory_bytes=memory)
    nodes = tuple(Node(f"n{index}", 1, 1, device) for index in range(ranks))
    return Cluster("c", "test", nodes, link, link)


def splits(ranks, stages):
    """Ways to give stages their numbers of replicas."""
    if stages == 0:
        yield ()
        return
    for count in range(1, ranks - stages + 2):
        for rest in splits(ranks - count, stages - 1):
            yield (count, *rest)


def every_plan(profile, cluster, request, partitions_of):
    """Written to be obviously complete, not fast; ranks are alike, so they go in order."""
    graph, makers = condense(profile), ReplicaPlans(profile, cluster, request)
    for stages in range(1, cluster.ranks + 1):
        for partition in partitions_of(graph, stages):
            members = tuple(tuple(graph.operators_of(blocks)) for blocks in partition)
            for counts in splits(cluster.ranks, stages):
                free = iter(range(cluster.ranks))
                ranks = tuple(tuple(next(free) for _ in range(count)) for count in counts)
                for size in micro_batch_sizes(request, request.batch_size):
                    for way in request.replications:
                        replicas = counts if way is Replication.WHOLE else None
                        depths = policy_a(stages, -(-request.batch_size // size), replicas)
                        yield makers.plan(
                            ReplicaChoice(members, ranks, size, way, ONE_F_ONE_B, depths)
                        )


@settings(max_examples=40, derandomize=True)
@given(data=st.data(), ranks=st.integers(2, 3), way=st.sampled_from([*Replication, None]))
def test_no_plan_is_much_faster_than_the_one_found(data, ranks, way, profiles, partitions_of):
    profile = data.draw(profiles(most=4))
    cluster = cluster_of(ranks)
    request = PlanRequest("job", 16, replicas=None, replication=way)
    plan = make_plan(profile, cluster, request)
    best_s = min(
        simulate(other, cluster).step_time_s
        for other in every_plan(profile, cluster, request, partitions_of)
    )
    found_s = plan.prediction.step_time_s
    assert found_s <= best_s * 1.02
    assert plan.search.step_lower_bound_s <= min(found_s, best_s) * (1 + 1e-9)


@pytest.mark.parametrize("way", Replication)
def test_programs_of_such_plans_are_valid(way, chain) -> None:
    request = PlanRequest("job", 16, replicas=None, replication=way)
    found = search_plans(chain(6), cluster_of(4), request)
    plans = [found.plan, *found.alternatives]
    assert any(stage.replicas > 1 for plan in plans for stage in plan.stages)
    for plan in plans:
        validate(plan, [lower(plan, rank) for rank in range(plan.ranks)])


def test_a_stage_that_takes_most_of_the_time_gets_the_replicas(make_operator, make_profile) -> None:
    times = [1e-3, 8e-3, 1e-3]
    operators = [
        make_operator(index, forward_s=time, backward_s=time) for index, time in enumerate(times)
    ]
    profile = make_profile(operators, [(0, 1), (1, 2)])
    plan = make_plan(profile, cluster_of(4), PlanRequest("job", 64, replicas=None))
    widest = max(plan.stages, key=lambda stage: stage.replicas)
    assert "n1" in widest.nodes
    straight = make_plan(profile, cluster_of(4), PlanRequest("job", 64))
    assert plan.prediction.step_time_s < straight.prediction.step_time_s


def test_a_slow_link_is_not_worth_replicas(chain) -> None:
    profile = chain(8, parameter_bytes=10**6, parameters=(("p", 10**6),))
    slow = cluster_of(2, Link(1e-3, 1e6))
    plan = make_plan(profile, slow, PlanRequest("job", 16, replicas=None))
    assert all(stage.replicas == 1 for stage in plan.stages)


def test_a_given_number_of_replicas_is_kept(chain) -> None:
    plan = make_plan(chain(6), cluster_of(4), PlanRequest("job", 16, replicas=2))
    assert {stage.replicas for stage in plan.stages} == {2}


def test_more_replicas_than_ranks_are_refused(chain) -> None:
    with pytest.raises(InfeasibleError, match="3 replicas of every stage, but only 2 ranks"):
        make_plan(chain(6), cluster_of(2), PlanRequest("job", 16, replicas=3))


def test_bounds_hold_where_noise_says_that_caches_are_slow(chain) -> None:
    profile = chain(2)
    slow = [replace(each, cached={8: (1.0, 1.0)}) for each in profile.operators]
    overhead = replace(profile.stage, cache_bytes=1)
    noisy = replace(profile, operators=tuple(slow), stage=overhead)
    for stages, replicas in (1, 2), (2, 1):
        request = PlanRequest("r", 32, micro_batches=4, stages=stages, replicas=replicas)
        search = make_plan(noisy, cluster_of(2), request).search
        assert search is not None
        assert search.lower_bound_s <= search.max_stage_load_s
        assert search.gap is not None
        assert search.gap >= 0


def test_every_rank_stays_within_its_memory(chain) -> None:
    profile = chain(6)
    free = make_plan(profile, cluster_of(4), PlanRequest("job", 16, replicas=None))
    most = max(free.prediction.peak_memory_bytes)
    tight = cluster_of(4, memory=most - 1)
    plan = make_plan(profile, tight, PlanRequest("job", 16, replicas=None))
    assert max(plan.prediction.peak_memory_bytes) < most


def test_the_same_request_gives_the_same_plan(chain) -> None:
    request = PlanRequest("job", 32, replicas=None, replication=None)
    first, second = (make_plan(chain(7), cluster_of(5), request) for _ in range(2))
    timeless = [replace(p, search=replace(p.search, planning_s=0.0)) for p in (first, second)]
    assert timeless[0] == timeless[1]
