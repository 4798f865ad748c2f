"""Ending the search early, what else was found, and recomputation."""

from dataclasses import replace

import pytest
from checked_plans import FAST, cluster_of, planned

from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, search_plans

CLUSTER = cluster_of(4, within=Link(1e-4, 1e7))


class After:
    """A clock that expires after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def __call__(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_without_any_time_there_is_an_even_cut(chain) -> None:
    plan = planned(chain(12), CLUSTER, expired=After(0))
    assert [len(stage.nodes) for stage in plan.stages] == [3, 3, 3, 3]
    assert not plan.search.finished
    assert len(planned(chain(1), CLUSTER, expired=After(0)).stages) == 1


def test_without_any_time_there_is_no_plan_that_does_not_fit(chain) -> None:
    with pytest.raises(OutOfTimeError, match="before any plan was found"):
        planned(chain(12), CLUSTER, expired=After(0), memory_limit_bytes=7500)


def test_even_cuts_leave_no_stage_empty(make_profile, make_operator) -> None:
    times = [9e-3, 0.0, 0.0, 0.0, 0.0, 1e-3]
    operators = [make_operator(i, forward_s=t, backward_s=t) for i, t in enumerate(times)]
    profile = make_profile(operators, [(i, i + 1) for i in range(5)])
    plan = planned(profile, CLUSTER, expired=After(0), stages=4)
    assert [node for stage in plan.stages for node in stage.nodes] == [f"n{i}" for i in range(6)]
    assert all(stage.nodes for stage in plan.stages)


def test_a_search_that_is_cut_short_returns_its_best_and_says_so(chain, tmp_path) -> None:
    whole = planned(chain(12), CLUSTER)
    assert whole.search.finished
    steps = []
    for looks in range(1, 2000):
        try:
            plan = planned(chain(12), CLUSTER, expired=After(looks))
        except OutOfTimeError:
            assert not steps
            continue
        steps.append(plan.prediction.step_time_s)
        if plan.search.finished:
            break
        plan.save(tmp_path / "plan.json")
        assert not Plan.load(tmp_path / "plan.json").search.finished
    assert plan.search.finished
    assert len(steps) > 1
    assert replace(plan, search=None) == replace(whole, search=None)


def test_alternatives_differ_in_shape_and_are_no_better(chain) -> None:
    plans = search_plans(chain(12), CLUSTER, PlanRequest("job", 64))
    shapes = [(len(p.stages), p.micro_batches, p.schedule, p.warm_up) for p in plans]
    assert len(set(shapes)) == len(shapes)
    best_s, *steps = (plan.prediction.step_time_s for plan in plans)
    assert steps
    assert steps == sorted(steps)
    assert min(steps) >= best_s / (1 + 1e-3)


@pytest.fixture
def hungry(make_profile, make_operator):
    """Each operator saves much more than it receives."""
    operators = [make_operator(i, saved=((f"n{i}:own", 50_000),)) for i in range(8)]
    return make_profile(operators, [(i, i + 1) for i in range(7)])


def test_stages_recompute_where_nothing_else_fits(hungry) -> None:
    asked = {"micro_batches": 8, "stages": 4, "memory_limit_bytes": 200_000}
    with pytest.raises(InfeasibleError):
        planned(hungry, CLUSTER, **asked)
    plan = planned(hungry, CLUSTER, **asked, recompute=None)
    again = [stage.recompute for stage in plan.stages]
    assert any(again)
    assert not all(again), "the last stage has one micro-batch in flight and need not"


def test_no_smaller_micro_batches_are_faster(make_profile, make_operator) -> None:
    """Micro-batches of four fit into two stages only if these are not even, smaller ones do."""
    operators = [make_operator(i, saved=((f"n{i}:own", 10**6),)) for i in range(8)]
    hungry = make_profile(operators, [(i, i + 1) for i in range(7)])
    two, asked = cluster_of(2, within=FAST), {"stages": 2, "memory_limit_bytes": 3_500_000}
    plan = planned(hungry, two, **asked)
    steps = [
        planned(hungry, two, **asked, micro_batches=count).predicted_step_s
        for count in (16, 32, 64)
    ]
    assert plan.predicted_step_s <= min(steps) * (1 + 1e-3)
    assert plan.search.step_lower_bound_s <= min(steps)


def test_a_search_that_leaves_out_cuts_for_memory_says_so(hungry, monkeypatch) -> None:
    asked = {"stages": 4, "memory_limit_bytes": 200_000, "recompute": None}
    assert planned(hungry, CLUSTER, **asked).search.finished
    monkeypatch.setattr("pipectl.planner.explorer.MAX_RECUTS", 0)
    assert not planned(hungry, CLUSTER, **asked).search.finished
