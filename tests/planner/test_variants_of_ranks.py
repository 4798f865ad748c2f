"""Plans whose stages have two ranks, or whose ranks have several stages."""

from dataclasses import replace
from itertools import pairwise

import pytest
from validator import validate

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import InfeasibleError
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan, search_plans
from pipectl.planner.modes import ModeSearch, Shortlist
from pipectl.planner.other_schedules import SEVERAL_STAGES_GAIN, SPLIT_GAIN, UNMEASURED_SPLIT_GAIN
from pipectl.planner.problem import Problem
from pipectl.profile import SplitBackward
from pipectl.schedule import lower
from pipectl.schedule.interleaved import INTERLEAVED
from pipectl.simulate import simulate

FAST = Link(1e-6, 1e11)
SLOW = Link(1e-3, 1e4)


def cluster_of(machines, within=FAST, between=FAST, memory_bytes=None):
    device = Device("gpu", 1.0, memory_bytes)
    nodes = tuple(Node(f"n{i}", count, count, device) for i, count in enumerate(machines))
    return Cluster("c", "test", nodes, within, between)


@pytest.fixture
def lopsided(make_operator, make_profile):
    """Six operators, the third of which takes eight times as long as each of the others."""
    times = [(8e-3 if index == 2 else 1e-3) for index in range(6)]
    operators = [
        make_operator(index, forward_s=time_s, backward_s=1.2 * time_s)
        for index, time_s in enumerate(times)
    ]
    return make_profile(operators, list(pairwise(range(6))))


def check(plan, cluster):
    validate(plan, [lower(plan, rank) for rank in range(plan.ranks)], process_baseline_bytes=5000)
    assert plan.prediction == simulate(plan, cluster, process_baseline_bytes=5000).prediction
    return plan


def planned(profile, cluster, **more):
    return check(make_plan(profile, cluster, PlanRequest("job", 64, **more)), cluster)


@pytest.mark.parametrize("machines", [[2], [4], [2, 2], [1, 1, 1]])
def test_two_ranks_for_an_operator_beat_one(lopsided, machines) -> None:
    cluster = cluster_of(machines)
    plain, plan = planned(lopsided, cluster), planned(lopsided, cluster, backward_apart=None)
    assert plan.prediction.step_time_s < 0.8 * plain.prediction.step_time_s
    (heavy,) = [stage for stage in plan.stages if "n2" in stage.nodes]
    assert heavy.backward_ranks
    held = [rank for stage in plan.stages for rank in (*stage.ranks, *stage.backward_ranks)]
    assert len(held) == len(set(held))
    used = [plan.node_of_rank[rank] for rank in (*heavy.ranks, *heavy.backward_ranks)]
    assert machines != [2, 2] or used[0] == used[1]


def test_all_backwards_elsewhere_if_that_is_asked(lopsided) -> None:
    plan = planned(lopsided, cluster_of([4]), backward_apart=True)
    assert all(stage.backward_ranks for stage in plan.stages)
    fixed = planned(lopsided, cluster_of([8]), backward_apart=True, stages=3)
    assert len(fixed.stages) == 3
    assert all(stage.backward_ranks for stage in fixed.stages)
    with pytest.raises(InfeasibleError, match="all backwards on other ranks"):
        make_plan(lopsided, cluster_of([1]), PlanRequest("job", 64, backward_apart=True))


def test_all_backwards_are_elsewhere_also_where_that_is_slower(chain) -> None:
    plain, plan = (planned(chain(12), cluster_of([4]), backward_apart=x) for x in (False, True))
    assert all(stage.backward_ranks for stage in plan.stages)
    assert plan.prediction.step_time_s > plain.prediction.step_time_s


def test_saved_values_that_travel_too_long_stay(lopsided) -> None:
    cluster = cluster_of([4], within=Link(1e-3, 1e5))
    plan = planned(lopsided, cluster, backward_apart=None)
    assert not any(stage.backward_ranks for stage in plan.stages)


def test_several_stages_a_rank_are_faster_with_few_micro_batches(chain) -> None:
    cluster, few = cluster_of([4]), {"micro_batches": 4}
    plain, plan = (
        planned(chain(16), cluster, **few),
        planned(chain(16), cluster, every_schedule=True, **few),
    )
    assert plan.schedule == INTERLEAVED.name
    assert len(plan.stages) in (8, 16)
    assert plan.prediction.step_time_s < 0.9 * plain.prediction.step_time_s


@pytest.mark.parametrize(
    "split", [None, SplitBackward(weight_share=0.53)], ids=["assumed", "measured"]
)
def test_split_backwards_are_chosen_if_they_gain_enough(chain, split: SplitBackward | None) -> None:
    profile = chain(16)
    operators = (replace(o, parameters=((o.id, 8),)) for o in profile.operators)
    profile = replace(profile, operators=tuple(operators), split=split)
    least, cluster = SPLIT_GAIN if split else UNMEASURED_SPLIT_GAIN, cluster_of([4])
    chosen = set()
    for micro_batches in (4, 16, 32, 64):
        asked = {"stages": 4, "micro_batches": micro_batches}
        plain, plan, halved = (
            planned(profile, cluster, **asked, **more)
            for more in ({}, {"every_schedule": True}, {"schedule": "zb-h1"})
        )
        gain = 1 - halved.predicted_step_s / plain.predicted_step_s
        assert (gain > least) == (plan.schedule == "zb-h1")
        assert any("split" in assumption for assumption in halved.assumptions) == (split is None)
        chosen.add(plan.schedule)
        check(plan, cluster)
    assert len(chosen) == 2


def test_stages_are_cut_for_split_backwards_too(chain) -> None:
    """With two micro-batches, 1F1B is fastest with more work on the first rank."""
    profile, cluster = chain(9), cluster_of([2])
    operators = (replace(o, parameters=((o.id, 8),)) for o in profile.operators)
    profile = replace(profile, operators=tuple(operators), split=SplitBackward())
    asked = {"micro_batches": 2, "updates_together": False}
    plan, halved = (
        planned(profile, cluster, **asked, **more)
        for more in ({"every_schedule": True, "stages": 2}, {"schedule": "zb-h1"})
    )
    assert plan.schedule == "zb-h1"
    assert plan.predicted_step_s == pytest.approx(halved.predicted_step_s)


def test_several_stages_a_rank_are_not_worth_slow_messages(chain) -> None:
    plan = planned(chain(16), cluster_of([4], within=SLOW), every_schedule=True, micro_batches=4)
    assert plan.schedule != INTERLEAVED.name


@pytest.mark.parametrize(
    "named", [{"schedule": "1f1b"}, {"schedule": "gpipe"}, {"warm_up": (4, 3, 2, 1)}]
)
def test_schedules_that_are_named_stay(chain, named) -> None:
    found = search_plans(
        chain(16),
        cluster_of([4]),
        PlanRequest("job", 32, micro_batches=4, every_schedule=True, backward_apart=None, **named),
    )
    for plan in found:
        assert plan.schedule == named.get("schedule", "1f1b")


def test_so_many_stages_may_go_round(chain) -> None:
    plan = planned(chain(16), cluster_of([4]), every_schedule=True, stages=8)
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,), (2,), (3,)] * 2
    with pytest.raises(InfeasibleError):
        make_plan(chain(16), cluster_of([4]), PlanRequest("job", 32, stages=6, every_schedule=True))


def test_several_stages_a_rank_stay_within_memory(chain) -> None:
    free = planned(chain(16), cluster_of([4]), every_schedule=True, micro_batches=4)
    limit = max(free.prediction.peak_memory_bytes) - 1000
    plan = planned(
        chain(16), cluster_of([4], memory_bytes=limit), every_schedule=True, micro_batches=4
    )
    assert max(plan.prediction.peak_memory_bytes) <= limit


def test_gains_count_against_plans_that_need_none(chain, monkeypatch) -> None:
    """Neither against interleaved ones, nor against others with split backwards."""
    plain = planned(chain(8), cluster_of([4]))
    shares = {"plain": 1.0, "interleaved": 0.95, "recomputes": 0.91, "fits": 0.85, "slow": 0.93}

    def lasting(name, share):
        step_s = share * plain.predicted_step_s
        return replace(plain, name=name, prediction=replace(plain.prediction, step_time_s=step_s))

    def within_memory(_, plan):
        return lasting(plan.name, shares[plan.name])

    monkeypatch.setattr(ModeSearch, "within_memory", within_memory)
    shortlist = Shortlist(Problem(chain(8), cluster_of([4]), PlanRequest("job", 64)), lambda: False)
    shortlist.settle([lasting("plain", 1.0)])
    shortlist.settle([lasting("interleaved", 0.95)], SEVERAL_STAGES_GAIN)
    split = {"recomputes": 0.8, "slow": 0.84, "fits": 0.85}
    shortlist.settle([lasting(*pair) for pair in split.items()], 0.08)
    accepted = [plan.name for plan in shortlist.plans]
    assert accepted == ["plain", "interleaved", "recomputes", "fits"]


def test_the_bound_holds_at_sizes_that_only_some_plans_have(make_operator, make_profile) -> None:
    """Micro-batches of four samples, which are no power of two of a batch of 54, are fast."""
    sizes = {4: 0.1, **{size: 1.0 * size for size in (1, 2, 3, 5, 6, 7, 9, 13, 14, 18, 27, 54)}}
    timings = {size: (1e-3 * share, 2e-3 * share) for size, share in sizes.items()}
    operators = [
        make_operator(index, forward_s=8e-3, backward_s=16e-3, timings=timings)
        for index in range(16)
    ]
    profile = make_profile(operators, list(pairwise(range(16))))
    plan = make_plan(profile, cluster_of([4]), PlanRequest("job", 54, every_schedule=True))
    assert plan.search.step_lower_bound_s <= plan.predicted_step_s
