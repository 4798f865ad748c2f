"""Plans for schedules without flushes, which only their names bring."""

from dataclasses import replace

import pytest
from validator import validate

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import InfeasibleError, InvalidInputError
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan, search_plans
from pipectl.schedule import is_unflushed, lower
from pipectl.simulate import simulate

FAST = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e11)


def cluster_of(ranks):
    return Cluster("c", "test", (Node("n", ranks, ranks, Device("cpu", 1.0)),), FAST, FAST)


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_stages_are_balanced_and_proven(chain, schedule) -> None:
    plan = make_plan(chain(12), cluster_of(4), PlanRequest("job", 32, schedule=schedule))
    assert plan.schedule == schedule
    assert [len(stage.nodes) for stage in plan.stages] == [3] * 4
    assert (plan.micro_batches == 1) == (schedule == "pipedream")
    validate(plan, [lower(plan, rank) for rank in range(4)])
    assert plan.prediction == simulate(plan, cluster_of(4), process_baseline_bytes=5000).prediction
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
    assert not any(is_unflushed(plan) for plan in (found.plan, *found.alternatives))


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
    validate(plan, [lower(plan, rank) for rank in range(4)])
    assert plan.prediction == simulate(plan, cluster_of(4), process_baseline_bytes=5000).prediction
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


def test_what_does_not_fit_is_refused(chain) -> None:
    request = PlanRequest("job", 32, schedule="pipedream", memory_limit_bytes=10_000)
    with pytest.raises(InfeasibleError, match=r"schedule pipedream needs .* more than the memory"):
        make_plan(chain(8), cluster_of(2), request)


def test_what_they_cannot_have_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="replicas: schedule 'pipedream' allows"):
        PlanRequest("job", 32, schedule="pipedream", replicas=2)


def test_its_bound_is_that_of_its_own_step(chain) -> None:
    request = PlanRequest("job", 8, schedule="pipedream-2bw")
    plan = make_plan(chain(12), cluster_of(2), request)
    assert plan.search.step_lower_bound_s <= plan.predicted_step_s * (1 + 1e-9)
    assert plan.search.gap < 0.01


@pytest.fixture
def hungry(make_operator, make_profile):
    """Each operator saves much more than it receives."""
    operators = [make_operator(i, saved=((f"n{i}:own", 500_000),)) for i in range(8)]
    return make_profile(operators, [(i, i + 1) for i in range(7)])


def limited(profile, limit, where):
    """Two stages within a limit that the job or the device has."""
    given = {"memory_limit_bytes": limit} if where == "job" else {}
    node = Node("n", 2, 2, Device("cpu", 1.0, limit if where == "device" else None))
    request = PlanRequest("job", 8, schedule="pipedream-2bw", stages=2, **given)
    return make_plan(profile, Cluster("c", "test", (node,), FAST, FAST), request)


@pytest.mark.parametrize("where", ["job", "device"])
def test_smaller_micro_batches_are_tried_wherever_the_limit_is(hungry, where) -> None:
    assert max(limited(hungry, 1_500_000, where).prediction.peak_memory_bytes) <= 1_500_000


@pytest.mark.parametrize("where", ["job", "device"])
def test_stages_are_cut_for_memory_where_balanced_ones_do_not_fit(
    make_operator, make_profile, where
) -> None:
    """The first two operators have nearly all parameters."""
    sizes = [10**6, 10**6, *[100] * 6]
    operators = [
        make_operator(i, parameters=((f"p{i}", size),), parameter_bytes=size)
        for i, size in enumerate(sizes)
    ]
    profile = make_profile(operators, [(i, i + 1) for i in range(7)])
    plan = limited(profile, 6_500_000, where)
    assert [len(stage.nodes) for stage in plan.stages] == [1, 7]
    assert max(plan.prediction.peak_memory_bytes) <= 6_500_000


def test_stages_recompute_where_nothing_else_fits(hungry) -> None:
    wanted = PlanRequest("job", 8, schedule="pipedream", stages=2, memory_limit_bytes=3_000_000)
    with pytest.raises(InfeasibleError):
        make_plan(hungry, cluster_of(2), wanted)
    plan = make_plan(hungry, cluster_of(2), replace(wanted, recompute=None))
    assert any(stage.recompute for stage in plan.stages)
    validate(plan, [lower(plan, rank) for rank in range(2)])
