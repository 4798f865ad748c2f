"""Plans with replicated stages, against every plan there is of small graphs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from validator import validate

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import InfeasibleError
from pipectl.link import Link
from pipectl.plan import Replication
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.bounds import work_s
from pipectl.planner.graph.blocks import condense
from pipectl.planner.partition.cutter import MAX_RANKS_OF_DETAILED_SEARCH
from pipectl.planner.partition.layout import Choice, Layout
from pipectl.planner.problem import Problem
from pipectl.planner.request import micro_batch_sizes
from pipectl.planner.search import search_plans
from pipectl.profile import OperatorMemory, OptimizerCost
from pipectl.schedule import lower
from pipectl.schedule.one_f_one_b import ONE_F_ONE_B, policy_a
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
    graph, makers = condense(profile), Problem(profile, cluster, request)
    for stages in range(1, cluster.ranks + 1):
        for partition in partitions_of(graph, stages):
            for counts in splits(cluster.ranks, stages):
                free = iter(range(cluster.ranks))
                ranks = tuple(tuple(next(free) for _ in range(count)) for count in counts)
                for size in micro_batch_sizes(request, request.batch_size):
                    for way in request.replications:
                        replicas = counts if way is Replication.WHOLE else None
                        depths = policy_a(stages, -(-request.batch_size // size), replicas)
                        yield makers.plan(
                            Choice(Layout(partition, ranks), size, ONE_F_ONE_B.name, depths, way)
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
    plans = search_plans(chain(6), cluster_of(4), request)
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


@pytest.mark.parametrize(("way", "batch"), [(Replication.WHOLE, 16), (Replication.SPLIT, 2)])
def test_no_rank_is_kept_that_would_have_nothing_to_do(way, batch, make_operator, make_profile):
    """Two micro-batches of which a replica takes the whole, or one of two samples."""
    one = make_profile([make_operator(0, forward_s=1.0, backward_s=2.0)], [])
    count = 2 if way is Replication.WHOLE else 1
    request = PlanRequest("job", batch, micro_batches=count, replicas=None, replication=way)
    plan = make_plan(one, cluster_of(3), request)
    assert [stage.replicas for stage in plan.stages] == [2]


def test_a_slow_link_is_not_worth_replicas(chain) -> None:
    profile = chain(8, parameter_bytes=10**6, parameters=(("p", 10**6),))
    slow = cluster_of(2, Link(1e-3, 1e6))
    plan = make_plan(profile, slow, PlanRequest("job", 16, replicas=None))
    assert all(stage.replicas == 1 for stage in plan.stages)


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


def test_the_bound_of_plans_without_replicas_holds_for_those_with(chain) -> None:
    """Five stages on seven ranks: two may have replicas, though they do not pay over this link."""
    profile = chain(20, parameter_bytes=10**6, parameters=(("p", 10**6),))
    cluster = cluster_of(7, Link(1e-3, 1e6))
    request = PlanRequest("job", 32, stages=5, replicas=None)
    plan = make_plan(profile, cluster, request)
    assert max(stage.replicas for stage in plan.stages) == 1
    assert plan.search.step_lower_bound_s == pytest.approx(
        work_s(Problem(profile, cluster, request))
    )


@pytest.mark.parametrize("asked", [{"stages": 5}, {"warm_up": (14, 12, 8, 6, 2)}])
def test_a_given_number_of_stages_gets_replicas_for_the_ranks_that_are_left(chain, asked) -> None:
    cluster = cluster_of(7, Link(1e-6, 1e11))
    plan = make_plan(chain(20), cluster, PlanRequest("job", 32, replicas=None, **asked))
    alone = make_plan(chain(20), cluster, PlanRequest("job", 32, **asked))
    assert len(plan.stages) == 5
    assert sum(stage.replicas for stage in plan.stages) == 7
    assert plan.predicted_step_s < 0.8 * alone.predicted_step_s


def test_a_given_number_of_stages_is_looked_for_on_many_ranks(chain) -> None:
    """Though fewer stages would be faster."""
    cluster = cluster_of(MAX_RANKS_OF_DETAILED_SEARCH + 1, Link(1e-6, 1e11))
    plans = search_plans(chain(12), cluster, PlanRequest("job", 64, stages=5, replicas=None))
    assert max(stage.replicas for stage in plans[0].stages) > 1
    assert {len(plan.stages) for plan in plans} == {5}


@pytest.fixture
def hungry(make_operator, make_profile):
    """Each operator saves much more than it receives."""
    operators = [make_operator(i, saved=((f"n{i}:own", 10**6),)) for i in range(12)]
    return make_profile(operators, [(i, i + 1) for i in range(11)])


@pytest.mark.parametrize("asked", [{"replicas": 2, "stages": 2}, {"replicas": None}])
@pytest.mark.parametrize("way", Replication)
def test_replicas_recompute_if_all_stages_shall(hungry, asked, way) -> None:
    request = PlanRequest("job", 32, recompute=True, replication=way, **asked)
    plan = make_plan(hungry, cluster_of(4, Link(1e-6, 1e11)), request)
    assert max(stage.replicas for stage in plan.stages) > 1
    assert all(stage.recompute for stage in plan.stages)
    validate(plan, [lower(plan, rank) for rank in range(plan.ranks)])


@pytest.mark.parametrize("blocks", [False, None])
@pytest.mark.parametrize("way", Replication)
def test_replicas_recompute_where_nothing_else_fits(hungry, way, blocks) -> None:
    limited = PlanRequest(
        "job",
        32,
        stages=2,
        schedule="gpipe",
        replicas=2,
        replication=way,
        memory_limit_bytes=4_000_000,
    )
    cluster = cluster_of(4, Link(1e-6, 1e11))
    with pytest.raises(InfeasibleError):
        make_plan(hungry, cluster, limited)
    plan = make_plan(hungry, cluster, replace(limited, recompute=None, blocks=blocks))
    assert any(stage.recompute for stage in plan.stages)
    assert max(plan.prediction.peak_memory_bytes) <= 4_000_000
    free = make_plan(hungry, cluster, replace(limited, recompute=None, memory_limit_bytes=None))
    assert not any(stage.recompute for stage in free.stages)


def test_other_numbers_of_micro_batches_than_asked_for_are_said(chain) -> None:
    plan = make_plan(chain(6), cluster_of(4), PlanRequest("job", 16, replicas=2, micro_batches=3))
    assert plan.micro_batches == 4
    assert plan.assumptions[-1] == (
        "3 micro-batches of 16 samples cannot be of one size with a smaller last one and be "
        "shared evenly by 2 replicas: 4 of 4 samples instead"
    )
    split = PlanRequest("job", 16, replicas=2, micro_batches=3, replication=Replication.SPLIT)
    plan = make_plan(chain(6), cluster_of(4), split)
    assert (plan.micro_batches, plan.micro_batch_size) == (3, 6)


def test_frozen_parameters_have_neither_gradients_nor_state(make_operator, make_profile) -> None:
    """Three large frozen operators; whoever counts them as trained finds no room for them."""
    heavy = {"parameter_bytes": 10**6, "forward_s": 1e-6, "backward_s": 1e-6}
    operators = [
        make_operator(
            i,
            **(heavy | {"parameters": ((f"p{i}", 10**6),)} if i < 3 else {}),
            memory=OperatorMemory(1000, f"n{i}", 1000, 1000, (((f"p{i}", 100),) if i > 2 else ())),
        )
        for i in range(12)
    ]
    profile = make_profile(operators, [(i, i + 1) for i in range(11)])
    limit = 1_200_000
    for replicas in (1, None):
        request = PlanRequest("job", 16, stages=3, replicas=replicas, memory_limit_bytes=limit)
        plan = make_plan(profile, cluster_of(3), request)
        assert max(plan.prediction.peak_memory_bytes) <= limit


def owning(make_operator, make_profile, sizes, state=6.0):
    """A chain of operators with a parameter each, and an optimizer with much state."""
    named = [((f"p{i}", size),) for i, size in enumerate(sizes)]
    operators = [
        make_operator(i, parameters=pairs, parameter_bytes=pairs[0][1])
        for i, pairs in enumerate(named)
    ]
    found = make_profile(operators, [(i, i + 1) for i in range(len(sizes) - 1)])
    return replace(found, optimizer=OptimizerCost(state, 1e-9))


@pytest.mark.parametrize("ranks", [2, MAX_RANKS_OF_DETAILED_SEARCH + 1])
@pytest.mark.parametrize("replicas", [2, None])
def test_shared_out_state_lets_a_plan_fit(make_operator, make_profile, replicas, ranks) -> None:
    """Whole it takes 32 MB; with two replicas, 20, and 6 more for the sums of gradients."""
    profile = owning(make_operator, make_profile, [10**6] * 4)
    limited = PlanRequest(
        "job", 16, stages=1, replicas=replicas, memory_limit_bytes=27_000_000, shard_optimizer=True
    )
    plan = make_plan(profile, cluster_of(ranks, Link(1e-6, 1e11)), limited)
    assert plan.stages[0].replicas > 1
    assert plan.stages[0].cost.optimizer_bytes < 24_000_000
    with pytest.raises(InfeasibleError):
        make_plan(
            profile,
            cluster_of(ranks, Link(1e-6, 1e11)),
            replace(limited, shard_optimizer=False),
        )


@pytest.mark.parametrize(
    ("sizes", "replicas", "most"),
    [([100] * 4, 2, 200), ([700, 100, 100], 2, 700), ([900, 100, 500, 400, 400, 100], 3, 900)],
)
def test_the_owner_of_most_state_counts(make_operator, make_profile, sizes, replicas, most) -> None:
    """Parameters stay whole, and go to whoever has least so far, the largest first."""
    profile = owning(make_operator, make_profile, sizes)
    request = PlanRequest("job", 16, replicas=replicas, shard_optimizer=True)
    layout = Layout(((1 << len(sizes)) - 1,), (tuple(range(replicas)),))
    choice = Choice(layout, 4, ONE_F_ONE_B.name, (1,))
    plan = Problem(profile, cluster_of(replicas), request).plan(choice)
    assert plan.stages[0].cost.optimizer_bytes == 6 * most


def test_all_replicas_keep_the_state_of_parameters_with_several_uses(
    make_operator, make_profile
) -> None:
    profile = owning(make_operator, make_profile, [100, 100, 100])
    tied = [replace(o, parameters=(*o.parameters, ("tied", 1000))) for o in profile.operators[:2]]
    profile = replace(profile, operators=(*tied, profile.operators[2]))
    request = PlanRequest("job", 16, replicas=2, shard_optimizer=True)
    choice = Choice(Layout((0b011, 0b100), ((0, 1), (2, 3))), 4, "1f1b", (2, 1))
    plan = Problem(profile, cluster_of(4), request).plan(choice)
    assert [stage.cost.optimizer_bytes for stage in plan.stages] == [6 * 1100, 6 * 100]
