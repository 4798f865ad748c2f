"""Plans for named schedules: several stages per rank, split backwards, no flushes, and lists."""

from dataclasses import replace

import pytest
from validator import validate

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.link import Link
from pipectl.plan import Replication
from pipectl.planner import PlanRequest, make_plan, search_plans
from pipectl.planner.costs.stage_costs import ASSUMED
from pipectl.schedule import is_unflushed, lower
from pipectl.schedule.listed import Listed
from pipectl.simulate import simulate

FAST = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e11)
FOLDED = "0F0,0F1,3F0,3F1,3B0,3B1,0B0,0B1\n1F0,1F1,2F0,2F1,2B0,2B1,1B0,1B1\n"
ONE_EACH = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def cluster_of(ranks, memory_bytes=None):
    node = Node("n", ranks, ranks, Device("cpu", 1.0, memory_bytes))
    return Cluster("c", "test", (node,), FAST, FAST)


def request(schedule="interleaved", batch=32, **more):
    return PlanRequest("job", batch, schedule=schedule, **more)


def listed(text, **more):
    return PlanRequest("job", 8, listed=Listed.read(text, "my.csv"), **more)


def check(plan, cluster):
    """The plan does what its prediction says, and the bound is that of its own step."""
    validate(plan, [lower(plan, rank) for rank in range(plan.ranks)])
    assert plan.prediction == simulate(plan, cluster, process_baseline_bytes=5000).prediction
    step_s, search = plan.predicted_step_s, plan.search
    assert 0 < search.step_lower_bound_s <= step_s * (1 + 1e-9)
    assert search.gap == pytest.approx(step_s / search.step_lower_bound_s - 1)
    return plan


@pytest.fixture
def hungry(make_operator, make_profile):
    """Each operator saves much more than it receives."""
    operators = [make_operator(i, saved=((f"n{i}:own", 10**6),)) for i in range(8)]
    return make_profile(operators, [(i, i + 1) for i in range(7)])


def test_stages_go_round_over_the_ranks(chain) -> None:
    plan = make_plan(chain(12), cluster_of(2), request(stages=6, micro_batches=4))
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,)] * 3
    assert [len(stage.nodes) for stage in plan.stages] == [2] * 6
    assert (plan.schedule, plan.micro_batches, plan.ranks) == ("interleaved", 4, 2)
    check(plan, cluster_of(2))


def test_two_stages_a_rank_where_nothing_is_said(chain) -> None:
    plan = make_plan(chain(12), cluster_of(3), request())
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,), (2,)] * 2
    assert plan.micro_batches in (3, 6, 11, 16)


def test_it_waits_less_than_one_stage_a_rank(chain) -> None:
    chunks = make_plan(chain(16), cluster_of(4), request(micro_batches=4))
    whole = make_plan(chain(16), cluster_of(4), PlanRequest("job", 32, micro_batches=4))
    assert chunks.prediction.bubble < 0.75 * whole.prediction.bubble


def test_stages_that_cannot_go_round_are_refused(chain) -> None:
    with pytest.raises(InfeasibleError, match="5 stages cannot go round over 2 ranks"):
        make_plan(chain(12), cluster_of(2), request(stages=5))


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipev", "v-half"])
def test_two_stages_a_rank_lie_in_a_v(chain, schedule) -> None:
    plan = make_plan(chain(12), cluster_of(3), request(schedule))
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,), (2,), (2,), (1,), (0,)]
    assert plan.schedule == schedule
    validate(plan, [lower(plan, rank) for rank in range(3)])
    fewer = make_plan(chain(12), cluster_of(3), request(schedule, stages=4))
    assert [stage.ranks for stage in fewer.stages] == [(0,), (1,), (1,), (0,)]


def test_split_backwards_cost_what_is_assumed_of_them(chain) -> None:
    profile = chain(12)
    plan = make_plan(profile, cluster_of(3), request("zb-h1", micro_batches=8))
    assert plan.assumptions.count(ASSUMED) == 1
    scale = plan.micro_batch_size / profile.micro_batch_size
    for stage in plan.stages:
        operators = [profile.by_id[node] for node in stage.nodes]
        assert all(operator.parameters for operator in operators)
        assert stage.cost.weight_s == pytest.approx(stage.cost.backward_s / 2)
        kept = sum(sum(dict(o.saved).values()) + o.gradient_bytes for o in operators)
        assert stage.cost.deferred_bytes == pytest.approx(kept * scale, abs=1)


def test_split_backwards_wait_less(chain) -> None:
    found = {
        schedule: make_plan(chain(16), cluster_of(4), request(schedule, micro_batches=8))
        for schedule in ("1f1b", "zb-h1", "zb-v")
    }
    bubbles = [plan.prediction.bubble for plan in found.values()]
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[1] < 0.6 * bubbles[0]
    assert bubbles[2] < 0.6 * bubbles[1]


def test_zb_h1_takes_a_warm_up(chain) -> None:
    plan = make_plan(chain(12), cluster_of(2), request("zb-h1", warm_up=(5, 2)))
    assert plan.warm_up == (5, 2)


def test_zb_h1_has_a_deeper_warm_up_where_messages_are_slow(chain) -> None:
    slow = Link(latency_s=1e-3, bandwidth_bytes_per_s=1e11)
    node = Node("n", 4, 4, Device("cpu"))
    plan = make_plan(
        chain(16), Cluster("c", "test", (node,), slow, slow), request("zb-h1", micro_batches=8)
    )
    assert plan.warm_up == (7, 5, 3, 1)


@pytest.mark.parametrize("stages", [3, 6])
def test_stages_that_cannot_lie_in_a_v_are_refused(chain, stages) -> None:
    with pytest.raises(
        InfeasibleError, match=rf"{stages} stages cannot lie in a V over 2 ranks\n.*4"
    ):
        make_plan(chain(12), cluster_of(2), request("zb-v", stages=stages))


@pytest.mark.parametrize("schedule", ["interleaved", "pipedream"])
@pytest.mark.parametrize("where", ["job", "device"])
def test_what_does_not_fit_is_refused_with_what_is_missing(chain, schedule, where) -> None:
    limit = 10_000
    given = {"memory_limit_bytes": limit} if where == "job" else {}
    cluster = cluster_of(2, limit if where == "device" else None)
    with pytest.raises(InfeasibleError, match=f"{schedule} needs .* more than the memory limit"):
        make_plan(chain(12), cluster, request(schedule, **given))


def test_stages_with_backwards_apart_need_two_ranks_each(chain) -> None:
    apart = request("pipedream", backward_apart=True)
    with pytest.raises(InfeasibleError, match="2 ranks in all, and the job has 1"):
        make_plan(chain(12), cluster_of(1), apart)
    with pytest.raises(InfeasibleError, match="6 ranks in all, and the job has 4"):
        make_plan(chain(12), cluster_of(4), replace(apart, stages=3))
    found = make_plan(chain(12), cluster_of(4), replace(apart, stages=2)).search
    assert found.lower_bound_s <= found.max_stage_load_s


def test_a_plan_that_fits_is_found_without_time(hungry) -> None:
    wanted = request("interleaved", memory_limit_bytes=3_000_000)
    plan = make_plan(hungry, cluster_of(2), wanted, expired=lambda: True)
    assert max(plan.prediction.peak_memory_bytes) <= 3_000_000


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "interleaved", "pipedream-2bw"])
def test_plans_do_what_they_predict(chain, schedule) -> None:
    plan = check(make_plan(chain(12), cluster_of(2), request(schedule, 8)), cluster_of(2))
    assert plan.schedule == schedule
    check(make_plan(chain(8), cluster_of(2), listed(FOLDED)), cluster_of(2))


@pytest.mark.parametrize("speeds", [(3.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize(
    "wanted",
    [
        *(request("interleaved", stages=4), request("zb-v", stages=4)),
        *(request("zb-h1", stages=2), request("zb-h1", stages=1)),
    ],
    ids=lambda wanted: f"{wanted.schedule}-{wanted.stages}",
)
def test_stages_suit_the_devices_they_lie_on(chain, wanted, speeds) -> None:
    nodes = tuple(Node(f"n{speed}", 1, 1, Device("cpu", speed)) for speed in speeds)
    cluster = Cluster("c", "test", nodes, FAST, FAST)
    plan = make_plan(chain(16), cluster, wanted)
    loads = [stage.load_s / speeds[stage.ranks[0]] for stage in plan.stages]
    assert max(loads) == pytest.approx(min(loads))
    assert plan.search.max_stage_load_s == pytest.approx(max(loads))
    assert len(plan.stages) > 1 or speeds[plan.stages[0].ranks[0]] == 3.0


@pytest.mark.parametrize("speeds", [(3.0, 1.0), (1.0, 3.0)])
def test_stages_of_lists_suit_the_devices_they_lie_on(chain, speeds) -> None:
    nodes = tuple(Node(f"n{speed}", 1, 1, Device("cpu", speed)) for speed in speeds)
    plan = make_plan(chain(16), Cluster("c", "test", nodes, FAST, FAST), listed(FOLDED))
    held = [sum(len(s.nodes) for s in plan.stages if s.ranks == (rank,)) for rank in range(2)]
    assert held[speeds.index(3.0)] >= 2 * held[speeds.index(1.0)]


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "zb-v", "pipedream-2bw"])
def test_another_number_of_micro_batches_than_asked_for_is_told(chain, schedule) -> None:
    wanted = PlanRequest("job", 8, schedule=schedule, micro_batches=5)
    plan = make_plan(chain(12), cluster_of(2), wanted)
    assert plan.micro_batches == 4
    assert sum("5 micro-batches of 8 samples" in said for said in plan.assumptions) == 1


@pytest.mark.parametrize(
    ("wanted", "limit"),
    [
        (request("looped-bfs", 8, stages=4), 3_000_000),
        (request("zb-v", 8, stages=4), 900_000),
        (request("pipedream", 8, stages=2), 6_000_000),
        (listed(FOLDED), 3_000_000),
    ],
    ids=lambda each: getattr(each, "schedule", None),
)
def test_stages_recompute_where_nothing_else_fits(hungry, wanted, limit) -> None:
    def plan(recompute):
        asked = replace(wanted, recompute=recompute, memory_limit_bytes=limit)
        return check(make_plan(hungry, cluster_of(2), asked), cluster_of(2))

    with pytest.raises(InfeasibleError):
        plan(False)
    some = plan(None)
    assert any(stage.recompute for stage in some.stages)
    assert max(some.prediction.peak_memory_bytes) <= limit
    assert some.predicted_step_s <= plan(True).predicted_step_s


@pytest.mark.parametrize("schedule", ["v-half", "zb-v", "interleaved"])
def test_stages_are_cut_for_memory_if_even_ones_do_not_fit(
    make_operator, make_profile, schedule
) -> None:
    """The first rank of a V holds both ends of a model, which have most of its parameters."""
    large = {"parameter_bytes": 4000, "parameters": (("large", 4000),)}
    ends = {0: large, 23: {**large, "parameters": (("larger", 4000),)}}
    operators = [make_operator(index, **ends.get(index, {})) for index in range(24)]
    profile = make_profile(operators, [(index, index + 1) for index in range(23)])

    def wanted(limit=None):
        return request(
            schedule, stages=6, micro_batches=8, recompute=False, memory_limit_bytes=limit
        )

    even = make_plan(profile, cluster_of(3), wanted())
    limit = max(even.prediction.peak_memory_bytes) - 4000
    plan = make_plan(profile, cluster_of(3), wanted(limit))
    assert max(plan.prediction.peak_memory_bytes) <= limit
    assert [stage.ranks for stage in plan.stages] == [stage.ranks for stage in even.stages]
    assert even.predicted_step_s < plan.predicted_step_s < 1.5 * even.predicted_step_s
    validate(plan, [lower(plan, rank) for rank in range(3)])
    with pytest.raises(InfeasibleError, match="more than the memory limit"):
        make_plan(profile, cluster_of(3), wanted(min(even.prediction.peak_memory_bytes) - 4000))


@pytest.mark.parametrize(
    ("schedule", "ranks_of_stages"),
    [
        ("zb-h1", [(0,), (1,), (2,)]),
        ("interleaved", [(0,), (1,), (2,)]),
        ("looped-bfs", [(0,), (1,), (2,)]),
        ("zb-v", [(0,), (0,)]),
    ],
)
def test_there_are_no_more_stages_than_the_graph_has_blocks(
    chain, schedule, ranks_of_stages
) -> None:
    plan = make_plan(chain(3), cluster_of(4), request(schedule))
    assert [stage.ranks for stage in plan.stages] == ranks_of_stages


@pytest.mark.parametrize("way", Replication)
@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("zb-h1", 2),
        ("zb-v", 4),
        ("dualpipev", 4),
        ("v-min", 4),
        ("interleaved", 4),
        ("looped-bfs", 4),
    ],
)
def test_replicas_are_copies_of_the_pipeline(chain, schedule, stages, way) -> None:
    wanted = request(schedule, stages=stages, replicas=2, replication=way)
    plan = make_plan(chain(12), cluster_of(4), wanted)
    assert {stage.replicas for stage in plan.stages} == {2}
    assert {rank for stage in plan.stages for rank in stage.ranks} == {0, 1, 2, 3}
    assert (plan.schedule, plan.replication) == (schedule, way)
    halved = schedule in ("zb-h1", "zb-v", "dualpipev", "v-min")
    assert all((stage.cost.weight_s is not None) == halved for stage in plan.stages)
    validate(plan, [lower(plan, rank) for rank in range(4)])
    assert (
        plan.predicted_step_s
        < make_plan(chain(12), cluster_of(2), request(schedule, stages=stages)).predicted_step_s
    )


def test_open_replicas_stay_one(chain) -> None:
    plan = make_plan(chain(12), cluster_of(4), request("zb-h1", stages=2, replicas=None))
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,)]


@pytest.mark.parametrize("wanted", [request("zb-h1"), request("pipedream"), listed(FOLDED)])
def test_time_that_is_up_gives_a_plan_of_even_cuts(chain, wanted) -> None:
    plan = make_plan(chain(12), cluster_of(2), wanted, lambda: True)
    assert not plan.search.finished
    limited = replace(wanted, memory_limit_bytes=6000)
    with pytest.raises(OutOfTimeError):
        make_plan(chain(12), cluster_of(2), limited, lambda: True)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_stages_are_balanced_and_proven(chain, schedule) -> None:
    plan = make_plan(chain(12), cluster_of(4), PlanRequest("job", 32, schedule=schedule))
    assert plan.schedule == schedule
    assert [len(stage.nodes) for stage in plan.stages] == [3] * 4
    assert (plan.micro_batches == 1) == (schedule == "pipedream")
    check(plan, cluster_of(4))
    assert plan.prediction.bubble < 0.05


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("pipedream", "2, 1, 0 updates old in stages 0 to 2, so results depend on the stages"),
        ("pipedream-2bw", "one update old, whatever the stages"),
    ],
)
def test_the_plan_says_what_it_changes(chain, schedule, words) -> None:
    request = PlanRequest("job", 32, schedule=schedule, stages=3)
    plan = make_plan(chain(12), cluster_of(3), request)
    assert plan.assumptions[-1].startswith(f"schedule {schedule} is asynchronous")
    assert plan.assumptions[-1].endswith(words)


def test_no_search_chooses_them(chain) -> None:
    found = search_plans(chain(8), cluster_of(2), PlanRequest("job", 32))
    assert not any(is_unflushed(plan) for plan in found)


def test_two_versions_take_the_micro_batches_asked_for(chain) -> None:
    request = PlanRequest("job", 32, schedule="pipedream-2bw", micro_batches=5)
    assert make_plan(chain(8), cluster_of(2), request).micro_batches == 5


def test_pipedream_takes_no_micro_batches(chain) -> None:
    request = PlanRequest("job", 32, schedule="pipedream", micro_batches=4)
    with pytest.raises(InfeasibleError, match="updates after every micro-batch"):
        make_plan(chain(8), cluster_of(2), request)


@pytest.mark.parametrize("stages", [None, 2])
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_backwards_have_ranks_of_their_own_if_that_is_asked(chain, schedule, stages) -> None:
    request = PlanRequest("job", 32, schedule=schedule, backward_apart=True, stages=stages)
    plan = make_plan(chain(12), cluster_of(4), request)
    assert sorted(r for s in plan.stages for r in (*s.ranks, *s.backward_ranks)) == [0, 1, 2, 3]
    check(plan, cluster_of(4))
    if schedule == "pipedream":
        assert plan.warm_up == (5, 3)
        assert "4, 2 updates old in stages 0 to 1" in plan.assumptions[-1]


def test_backwards_stay_where_only_a_name_could_move_them(chain) -> None:
    """Which weights a step uses should not follow from how fast a link is."""
    request = PlanRequest("job", 32, schedule="pipedream", backward_apart=None)
    plan = make_plan(chain(12), cluster_of(4), request)
    assert not any(stage.backward_ranks for stage in plan.stages)


@pytest.mark.parametrize("name", ["recompute", "offload"])
def test_stages_can_do_without_what_backwards_need(chain, name) -> None:
    request = PlanRequest("job", 32, schedule="pipedream", **{name: True})
    plan = make_plan(chain(8), cluster_of(2), request)
    assert all(getattr(stage, name) for stage in plan.stages)
    validate(plan, [lower(plan, rank) for rank in range(2)])


@pytest.mark.parametrize("where", ["job", "device"])
def test_stages_without_flushes_are_cut_for_memory(make_operator, make_profile, where) -> None:
    """The first two operators have nearly all parameters."""
    sizes = [10**6, 10**6, *[100] * 6]
    operators = [
        make_operator(i, parameters=((f"p{i}", size),), parameter_bytes=size)
        for i, size in enumerate(sizes)
    ]
    profile, limit = make_profile(operators, [(i, i + 1) for i in range(7)]), 6_500_000
    given = {"memory_limit_bytes": limit} if where == "job" else {}
    cluster = cluster_of(2, limit if where == "device" else None)
    plan = make_plan(profile, cluster, request("pipedream-2bw", 8, stages=2, **given))
    assert [len(stage.nodes) for stage in plan.stages] == [1, 7]
    assert max(plan.prediction.peak_memory_bytes) <= limit


def test_backwards_are_where_the_lists_say(chain) -> None:
    plan = make_plan(chain(8), cluster_of(4), listed(ONE_EACH, backward_apart=None))
    assert [(stage.ranks, stage.backward_ranks) for stage in plan.stages] == [
        ((0,), ()),
        ((1,), ()),
    ]


def test_stages_have_one_replica(chain) -> None:
    plan = make_plan(chain(8), cluster_of(4), listed(ONE_EACH, replicas=None))
    assert [stage.replicas for stage in plan.stages] == [1, 1]
