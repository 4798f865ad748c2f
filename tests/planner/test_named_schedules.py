"""Schedules other than 1F1B and GPipe: named ones, lists, and those that an open search chooses."""

from dataclasses import replace

import pytest

from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.link import Link
from pipectl.plan import Replication
from pipectl.planner import PlanRequest, search_plans
from pipectl.planner.costs.stage_costs import ASSUMED
from pipectl.planner.other_schedules import SPLIT_GAIN, UNMEASURED_SPLIT_GAIN
from pipectl.profile_parts import SplitBackward
from pipectl.schedule.interleaved import INTERLEAVED
from pipectl.schedule.listed import Listed
from tests.planner.gate.checked_plans import cluster_of, planned
from tests.planner.gate.graphs import chain, hungry

pytestmark = pytest.mark.slow

FOLDED = Listed.read("0F0,0F1,3F0,3F1,3B0,3B1,0B0,0B1\n1F0,1F1,2F0,2F1,2B0,2B1,1B0,1B1\n", "my.csv")
ONE_EACH = Listed.read("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", "my.csv")


LOPSIDED = chain([{"forward_s": s, "backward_s": 1.2 * s} for s in (1e-3, 1e-3, 8e-3, *[1e-3] * 3)])
"""The third operator takes eight times as long as each of the others."""


@pytest.mark.parametrize(
    ("asked", "operators", "ranks_of_stages"),
    [
        ({"schedule": "interleaved", "stages": 6}, 12, [0, 1] * 3),
        ({"schedule": "interleaved"}, 12, [0, 1] * 2),
        ({"every_schedule": True, "stages": 4}, 16, [0, 1] * 2),
        ({"schedule": "zb-v"}, 12, [0, 1, 1, 0]),
        ({"schedule": "dualpipev", "stages": 4}, 12, [0, 1, 1, 0]),
        ({"schedule": "v-half", "stages": 2}, 12, [0, 0]),
        # no more stages than there are blocks
        ({"schedule": "zb-h1"}, 1, [0]),
        ({"schedule": "interleaved"}, 2, [0, 1]),
        ({"schedule": "looped-bfs"}, 2, [0, 1]),
        ({"schedule": "zb-v"}, 3, [0, 0]),
    ],
)
def test_stages_go_round_or_lie_in_a_v(asked, operators, ranks_of_stages) -> None:
    plan = planned(chain(operators), cluster_of(2), micro_batches=4, **asked)
    assert [rank for stage in plan.stages for rank in stage.ranks] == ranks_of_stages
    assert operators < 4 or len({len(stage.nodes) for stage in plan.stages}) == 1
    assert plan.schedule == asked.get("schedule", plan.schedule)
    assert plan.micro_batches == 4


def test_split_backwards_cost_what_is_assumed_of_them() -> None:
    """The gradient that arrives for the last operator of a stage is in no heap."""
    profile = chain([{"gradient_bytes": 1000 * (index + 1)} for index in range(12)])
    plan = planned(profile, cluster_of(3), schedule="zb-h1", micro_batches=8)
    assert plan.assumptions.count(ASSUMED) == 1
    scale = plan.micro_batch_size / profile.micro_batch_size
    for stage in plan.stages:
        operators = [profile.by_id[node] for node in stage.nodes]
        assert stage.cost.weight_s == pytest.approx(stage.cost.backward_s / 2)
        kept = sum(sum(dict(o.saved).values()) + o.gradient_bytes for o in operators)
        assert stage.cost.deferred_bytes == pytest.approx(kept * scale, abs=1)
        arrives = stage is not plan.stages[-1]
        largest = max(operator.gradient_bytes for operator in operators[: len(operators) - arrives])
        assert stage.cost.deferred_block_bytes == pytest.approx(largest * scale, abs=1)


@pytest.mark.parametrize("speeds", [(3.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize(
    "asked",
    [
        {"schedule": "interleaved", "stages": 4},
        {"schedule": "zb-v", "stages": 4},
        {"schedule": "zb-h1", "stages": 2},
        {"schedule": "zb-h1", "stages": 1},
    ],
)
def test_stages_suit_the_devices_they_lie_on(asked, speeds) -> None:
    cluster = cluster_of(1, 1, speeds=speeds)
    plan = planned(chain(16), cluster, 32, **asked)
    loads = [stage.load_s / speeds[stage.ranks[0]] for stage in plan.stages]
    assert max(loads) == pytest.approx(min(loads))
    assert len(plan.stages) > 1 or speeds[plan.stages[0].ranks[0]] == 3.0
    of_list = planned(chain(16), cluster, 8, listed=FOLDED)
    held = [sum(len(s.nodes) for s in of_list.stages if s.ranks == (rank,)) for rank in range(2)]
    assert held[speeds.index(3.0)] >= 2 * held[speeds.index(1.0)]


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "zb-v", "pipedream-2bw"])
def test_another_number_of_micro_batches_than_asked_for_is_told(schedule) -> None:
    plan = planned(chain(12), cluster_of(2), 8, schedule=schedule, micro_batches=5)
    assert plan.micro_batches == 4
    assert sum("5 micro-batches of 8 samples" in said for said in plan.assumptions) == 1


@pytest.mark.parametrize(
    ("asked", "limit"),
    [
        ({"schedule": "looped-bfs", "stages": 4}, 3_000_000),
        ({"schedule": "zb-v", "stages": 4}, 900_000),
        ({"schedule": "pipedream", "stages": 2}, 6_000_000),
        ({"listed": FOLDED}, 3_000_000),
    ],
    ids=lambda each: each.get("schedule", "lists") if isinstance(each, dict) else None,
)
def test_stages_recompute_where_nothing_else_fits(asked, limit) -> None:
    def plan(recompute):
        given = {**asked, "recompute": recompute, "memory_limit_bytes": limit}
        return planned(hungry(8, 10**6), cluster_of(2), 8, **given)

    with pytest.raises(InfeasibleError):
        plan(False)
    some = plan(None)
    assert any(stage.recompute for stage in some.stages)
    assert some.predicted_step_s <= plan(True).predicted_step_s


@pytest.mark.parametrize("where", ["job", "device"])
def test_stages_without_flushes_are_cut_for_memory(where) -> None:
    """The first two operators have nearly all parameters."""
    sizes, limit = [10**6, 10**6, *[100] * 6], 6_500_000
    profile = chain([{"parameters": ((f"p{i}", size),)} for i, size in enumerate(sizes)])
    given = {"memory_limit_bytes": limit} if where == "job" else {}
    cluster = cluster_of(2, memory_bytes=limit if where == "device" else None)
    plan = planned(profile, cluster, 8, schedule="pipedream-2bw", stages=2, **given)
    assert [len(stage.nodes) for stage in plan.stages] == [1, 7]


@pytest.mark.parametrize("way", Replication)
@pytest.mark.parametrize(
    "schedule", ["zb-h1", "zb-v", "dualpipev", "v-min", "interleaved", "looped-bfs"]
)
def test_replicas_are_copies_of_the_pipeline(schedule, way) -> None:
    asked = {"schedule": schedule, "stages": 2 if schedule == "zb-h1" else 4}
    plan = planned(chain(12), cluster_of(4), 32, **asked, replicas=2, replication=way)
    assert {stage.replicas for stage in plan.stages} == {2}
    assert {rank for stage in plan.stages for rank in stage.ranks} == {0, 1, 2, 3}
    assert (plan.schedule, plan.replication) == (schedule, way)
    halved = schedule in ("zb-h1", "zb-v", "dualpipev", "v-min")
    assert all((stage.cost.weight_s is not None) == halved for stage in plan.stages)
    alone = planned(chain(12), cluster_of(2), 32, **asked)
    assert plan.predicted_step_s < alone.predicted_step_s


@pytest.mark.parametrize(
    "asked", [{"schedule": "zb-h1"}, {"schedule": "pipedream"}, {"listed": FOLDED}]
)
def test_time_that_is_up_gives_a_plan_of_even_cuts(asked) -> None:
    plan = planned(chain(12), cluster_of(2), 8, expired=lambda: True, **asked)
    assert not plan.search.finished
    with pytest.raises(OutOfTimeError):
        planned(chain(12), cluster_of(2), 8, expired=lambda: True, **asked, memory_limit_bytes=6000)
    small = {"schedule": "interleaved", "memory_limit_bytes": 3_000_000}
    assert planned(hungry(8, 10**6), cluster_of(2), 32, expired=lambda: True, **small)


# Steps that overlap


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("pipedream", "3, 2, 1, 0 updates old in stages 0 to 3, so results depend on the stages"),
        ("pipedream-2bw", "one update old, whatever the stages"),
    ],
)
def test_stages_are_balanced_and_the_plan_says_what_it_changes(schedule, words) -> None:
    plan = planned(chain(12), cluster_of(4), 32, schedule=schedule)
    assert plan.schedule == schedule
    assert [len(stage.nodes) for stage in plan.stages] == [3] * 4
    assert (plan.micro_batches == 1) == (schedule == "pipedream")
    assert plan.prediction.bubble < 0.05
    assert plan.assumptions[-1].startswith(f"schedule {schedule} is asynchronous")
    assert plan.assumptions[-1].endswith(words)


@pytest.mark.parametrize("stages", [None, 2])
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_backwards_have_ranks_of_their_own_if_that_is_asked(schedule, stages) -> None:
    asked = {"schedule": schedule, "stages": stages}
    plan = planned(chain(12), cluster_of(4), 32, backward_apart=True, **asked)
    assert sorted(r for s in plan.stages for r in (*s.ranks, *s.backward_ranks)) == [0, 1, 2, 3]
    if schedule == "pipedream":
        assert plan.warm_up == (5, 3)
        assert "4, 2 updates old in stages 0 to 1" in plan.assumptions[-1]
        free = planned(chain(12), cluster_of(4), 32, backward_apart=None, **asked)
        assert not any(stage.backward_ranks for stage in free.stages), "staleness needs a wish"


# Two ranks for a stage, and what an open search chooses


@pytest.mark.parametrize("machines", [[2], [4], [2, 2], [1, 1, 1]])
def test_two_ranks_for_an_operator_beat_one_unless_saved_values_travel_too_long(machines) -> None:
    cluster = cluster_of(*machines)
    plain, plan = planned(LOPSIDED, cluster), planned(LOPSIDED, cluster, backward_apart=None)
    assert plan.predicted_step_s < 0.8 * plain.predicted_step_s
    (heavy,) = [stage for stage in plan.stages if "n2" in stage.nodes]
    assert heavy.backward_ranks
    held = [rank for stage in plan.stages for rank in (*stage.ranks, *stage.backward_ranks)]
    assert len(held) == len(set(held))
    used = [plan.node_of_rank[rank] for rank in (*heavy.ranks, *heavy.backward_ranks)]
    assert machines != [2, 2] or used[0] == used[1]
    slow = cluster_of(*machines, within=Link(1e-3, 1e5))
    stays = planned(LOPSIDED, slow, backward_apart=None)
    assert not any(stage.backward_ranks for stage in stays.stages)


def test_several_stages_a_rank_are_faster_with_few_micro_batches() -> None:
    few, cluster = {"micro_batches": 4}, cluster_of(4)
    plain, plan = (
        planned(chain(16), cluster, every_schedule=every, **few) for every in (False, True)
    )
    assert plan.schedule == INTERLEAVED.name
    assert len(plan.stages) in (8, 16)
    assert plan.predicted_step_s < 0.9 * plain.predicted_step_s
    tight = cluster_of(4, memory_bytes=max(plan.prediction.peak_memory_bytes) - 1000)
    planned(chain(16), tight, every_schedule=True, **few)
    slow = cluster_of(4, within=Link(1e-3, 1e4))
    assert planned(chain(16), slow, every_schedule=True, **few).schedule != INTERLEAVED.name


def trained(profile, split):
    """With a parameter for each operator, and what half a backward takes."""
    operators = (replace(o, parameters=((o.id, 8),)) for o in profile.operators)
    return replace(profile, operators=tuple(operators), split=split)


@pytest.mark.parametrize(
    "split", [None, SplitBackward(weight_share=0.53)], ids=["assumed", "measured"]
)
def test_split_backwards_are_chosen_if_they_gain_enough(split) -> None:
    profile, cluster = trained(chain(16), split), cluster_of(4)
    least, chosen = SPLIT_GAIN if split else UNMEASURED_SPLIT_GAIN, set()
    for micro_batches in (4, 16, 32, 64):
        plain, plan, halved = (
            planned(profile, cluster, stages=4, micro_batches=micro_batches, **more)
            for more in ({}, {"every_schedule": True}, {"schedule": "zb-h1"})
        )
        gain = 1 - halved.predicted_step_s / plain.predicted_step_s
        assert (gain > least) == (plan.schedule == "zb-h1")
        assert any("split" in assumption for assumption in halved.assumptions) == (split is None)
        chosen.add(plan.schedule)
    assert len(chosen) == 2


def test_stages_are_cut_for_split_backwards_too() -> None:
    """With two micro-batches, 1F1B is fastest with more work on the first rank."""
    asked = {"micro_batches": 2, "updates_together": False}
    plan, halved = (
        planned(trained(chain(9), SplitBackward()), cluster_of(2), **asked, **more)
        for more in ({"every_schedule": True, "stages": 2}, {"schedule": "zb-h1"})
    )
    assert plan.schedule == "zb-h1"
    assert plan.predicted_step_s == pytest.approx(halved.predicted_step_s)


@pytest.mark.parametrize(
    "named",
    [
        *({"schedule": schedule, "stages": 2} for schedule in ("1f1b", "gpipe", "zb-h1")),
        {"warm_up": (2, 1)},
        {"listed": ONE_EACH},
    ],
    ids=lambda named: " ".join(map(str, named.values()))[:8],
)
def test_what_is_named_stays_whatever_else_is_open(named) -> None:
    schedule = "my.csv" if "listed" in named else named.get("schedule", "1f1b")
    for more in ({"backward_apart": None}, {"replicas": None}, {"every_schedule": True}):
        asked = {"micro_batches": 2, **named, **more}
        for plan in search_plans(chain(8), cluster_of(4), PlanRequest("job", 8, **asked)):
            assert plan.schedule == schedule
            assert len(plan.stages) == 2
            if schedule in ("my.csv", "zb-h1"):
                assert [stage.ranks for stage in plan.stages] == [(0,), (1,)]
                assert not any(stage.backward_ranks for stage in plan.stages)


def test_the_bound_holds_at_sizes_that_only_some_plans_have() -> None:
    """Micro-batches of four samples, which are no power of two of a batch of 54, are fast."""
    sizes = {4: 0.1, **{size: 1.0 * size for size in (1, 2, 3, 5, 6, 7, 9, 13, 14, 18, 27, 54)}}
    timings = {size: (1e-3 * share, 2e-3 * share) for size, share in sizes.items()}
    profile = chain(16, forward_s=8e-3, backward_s=16e-3, timings=timings)
    assert planned(profile, cluster_of(4), 54, every_schedule=True)
