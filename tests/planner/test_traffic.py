"""Backwards elsewhere: saved values travel over fast links, over slow ones inputs alone."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
from validator import validate

from pipectl.cluster import Cluster, Device, Node
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.judge import TIE
from pipectl.schedule import lower
from pipectl.simulate import simulate

FAST, SLOW = Link(1e-6, 1e11), Link(1e-6, 1e7)
"""A stage's saved values take microseconds, or several times as long as its forward."""


def cluster_of(machines, within, between):
    nodes = tuple(Node(f"n{i}", n, n, Device("gpu", 1.0)) for i, n in enumerate(machines))
    return Cluster("c", "test", nodes, within, between)


@pytest.fixture
def deep(make_operator, make_profile):
    """A chain that saves a hundred times what it sends."""
    saved = [((f"n{index}", 1000), (f"s{index}", 99_000)) for index in range(16)]
    operators = [make_operator(index, saved=held) for index, held in enumerate(saved)]
    return make_profile(operators, list(pairwise(range(16))))


def planned(profile, cluster, **more):
    asked = {"stages": 2, "micro_batches": 8, "backward_apart": True, "recompute": None, **more}
    plan = make_plan(profile, cluster, PlanRequest("job", 64, **asked))
    validate(plan, [lower(plan, rank) for rank in range(plan.ranks)])
    assert all(stage.backward_ranks for stage in plan.stages)
    return plan


def least_s(plan, cluster):
    """The shortest step of all choices of the same stages on the same ranks."""
    found = []
    for chosen in product([False, True], repeat=len(plan.stages)):
        pairs = zip(plan.stages, chosen, strict=True)
        stages = tuple(replace(stage, recompute=again) for stage, again in pairs)
        found.append(simulate(replace(plan, stages=stages), cluster).step_time_s)
    return min(found)


@pytest.mark.parametrize(
    ("machines", "within", "between", "again"),
    [
        ([4], FAST, FAST, [False, False]),
        ([4], SLOW, SLOW, [True, True]),
        ([1, 1, 1, 1], FAST, SLOW, [True, True]),
        ([2, 1, 1], FAST, SLOW, [False, True]),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_stage_chooses_by_its_link(deep, schedule, machines, within, between, again) -> None:
    cluster = cluster_of(machines, within, between)
    plan = planned(deep, cluster, schedule=schedule)
    assert [stage.recompute for stage in plan.stages] == again
    assert plan.predicted_step_s <= least_s(plan, cluster) * (1 + TIE)
    assert planned(deep, cluster, schedule=schedule).stages == plan.stages


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("link", [FAST, SLOW])
def test_what_is_asked_of_all_stages_stays(deep, link, recompute) -> None:
    plan = planned(deep, cluster_of([4], link, link), recompute=recompute)
    assert [stage.recompute for stage in plan.stages] == [recompute] * 2


def test_a_choice_is_never_slower_than_none(deep) -> None:
    for bandwidth in (1e6, 2e7, 5e7, 1e8, 1e9):
        cluster = cluster_of([4], *[Link(1e-5, bandwidth)] * 2)
        plan = planned(deep, cluster)
        for recompute in (False, True):
            other = planned(deep, cluster, recompute=recompute)
            assert plan.predicted_step_s <= other.predicted_step_s * (1 + TIE)


@pytest.mark.parametrize(("link", "again"), [(FAST, False), (SLOW, True)])
def test_stages_choose_also_where_steps_overlap(deep, link, again) -> None:
    cluster = cluster_of([4], link, link)
    plan = planned(deep, cluster, schedule="pipedream-2bw")
    assert [stage.recompute for stage in plan.stages] == [again] * 2
    assert plan.predicted_step_s <= least_s(plan, cluster) * (1 + TIE)
