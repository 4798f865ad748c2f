"""Plans with the stages that planners of the literature choose, and what these minimise."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from checked_plans import after, checked, cluster_of, planned
from graphs import chain, make_operator, make_profile

from pipectl.errors import InfeasibleError
from pipectl.link import Link
from pipectl.plan import Replication
from pipectl.planner import PlanRequest
from pipectl.planner.baselines import POLICIES
from pipectl.planner.baselines.dapple import _Sums
from pipectl.planner.baselines.pipedream import antichain_states
from pipectl.planner.baselines.plans import policy_plans
from pipectl.planner.baselines.policy import balanced
from pipectl.profile import OperatorMemory

REQUEST = PlanRequest("job", 64)
EVEN = ("antichain", "gpipe-balance", "uniform", "parameters")
"""Policies for which equal stages of equal operators are the best."""
ALL_LATENCY = Link(1e-3, 1e9, timings=((1, 1e-3), (2_000_000, 1e-3)))
NO_LATENCY = Link(0.0, 1e9)


def cluster(*ranks, link=NO_LATENCY, memory=None):
    return cluster_of(*ranks, within=link, memory_bytes=memory)


FOUR = cluster(1, 1, 1, 1)


def best(*arguments):
    return policy_plans(*arguments)[0]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("machines", "operators"),
    [
        (FOUR, 8),
        (cluster(1), 6),
        (cluster(2, 2, link=ALL_LATENCY), 6),
        (cluster(1, 1, 1), 6),
        (cluster(4, 4), 2),
    ],
    ids=["four nodes", "one rank", "two by two, all latency", "three nodes", "two operators"],
)
def test_every_policy_makes_a_plan_that_can_be_carried_out(name, machines, operators):
    profile = chain(operators)
    plan = checked(best(name, profile, machines, REQUEST), machines, profile)
    assert [n for stage in plan.stages for n in stage.nodes] == [f"n{i}" for i in range(operators)]
    assert plan.search.planner == name
    held = [rank for stage in plan.stages for rank in stage.ranks]
    assert len(set(held)) == len(held)
    assert plan == best(name, profile, machines, REQUEST)
    if name in EVEN and machines is FOUR:
        step_s = planned(profile, machines, micro_batches=plan.micro_batches).predicted_step_s
        assert plan.predicted_step_s == pytest.approx(step_s, rel=1e-3)
    if operators == 2:
        assert len(plan.stages) <= 2


@pytest.mark.parametrize(
    ("name", "replication"), [("dapple", Replication.SPLIT), ("pipedream", Replication.WHOLE)]
)
def test_replicas_share_the_work_as_their_planner_has_it(name, replication):
    """One operator has most of the work, and nothing to sum or to send."""
    each = [{"forward_s": s, "backward_s": 2 * s} for s in (1e-3, 9e-3, 1e-3)]
    free = {"parameters": (), "parameter_bytes": 0, "output_bytes": 1, "gradient_bytes": 1}
    profile = chain(each, **free)
    plan = best(name, profile, FOUR, REQUEST)
    assert plan.replication is replication
    assert max(stage.replicas for stage in plan.stages) > 1
    assert plan.predicted_step_s < planned(profile, FOUR).predicted_step_s


def test_replicas_have_samples_and_what_they_allocate_is_for_their_own() -> None:
    """One operator without messages or parameters: as many replicas as there are ranks."""
    memory = OperatorMemory(1000, "n0", 80_000, 80_000, ())
    profile, fixed = chain(1, memory=memory, parameters=()), {"micro_batches": 8}
    plan = best("dapple", profile, FOUR, replace(REQUEST, **fixed))
    assert plan.micro_batch_size >= plan.stages[0].replicas == 4
    shared, alone = (p.stages[0].cost for p in (plan, planned(profile, cluster(1), **fixed)))
    assert shared.forward_s == alone.forward_s
    assert shared.peaks.forward_bytes == alone.peaks.forward_bytes / 4
    with pytest.raises(InfeasibleError, match="more replicas than a micro-batch has"):
        best("dapple", profile, FOUR, replace(REQUEST, micro_batches=64))


def test_what_the_job_fixes_holds_or_is_infeasible():
    request = replace(REQUEST, stages=2, micro_batches=4, schedule="gpipe")
    plan = best("uniform", chain(8), FOUR, request)
    assert [len(stage.nodes) for stage in plan.stages] == [4, 4]
    assert (plan.micro_batches, plan.schedule, plan.ranks) == (4, "gpipe", 4)
    with pytest.raises(InfeasibleError, match=r"dapple makes \d stages? here, not 3"):
        best("dapple", chain(8), FOUR, replace(REQUEST, stages=3, micro_batches=1))
    with pytest.raises(InfeasibleError, match="uniform plans for gpipe and 1f1b only"):
        best("uniform", chain(8), FOUR, replace(REQUEST, schedule="interleaved"))


@pytest.mark.parametrize(("limit", "memory"), [(6000, None), (None, 6000)])
def test_memory_that_a_policy_does_not_look_at(limit, memory):
    request = replace(REQUEST, memory_limit_bytes=limit)
    with pytest.raises(InfeasibleError, match="uniform ignores both") as caught:
        best("uniform", chain(8), cluster(1, 1, 1, 1, memory=memory), request)
    cure = "pipeline.memory_limit" if limit else "ranks with more memory"
    assert cure in caught.value.cure
    free = best("uniform", chain(8), FOUR, REQUEST)
    less = replace(REQUEST, memory_limit_bytes=max(free.prediction.peak_memory_bytes) - 1)
    tight = best("uniform", chain(8), FOUR, less)
    assert max(tight.prediction.peak_memory_bytes) <= less.memory_limit_bytes
    assert not best("uniform", chain(8), FOUR, REQUEST, after(0)).search.finished


def test_blocks_are_balanced_as_well_as_possible():
    random = np.random.default_rng(0)
    for _ in range(50):
        times = np.concatenate([[0.0], random.integers(1, 9, 7).cumsum()]).astype(float)
        for stages in range(1, 8):
            cuts, largest = balanced(times, stages)
            least = min(
                np.diff(times[[0, *inner, 7]]).max()
                for inner in combinations(range(1, 7), stages - 1)
            )
            assert np.diff(times[list(cuts)]).max() == largest == least


def test_antichain_states_of_a_diamond():
    """0 feeds 1 and 2, which feed 3: the second branch is left out or in."""
    profile = make_profile([make_operator(i) for i in range(4)], [(0, 1), (0, 2), (1, 3), (2, 3)])
    states = antichain_states(profile)
    inside = [frozenset(np.flatnonzero(row).tolist()) for row in states.operators]
    assert inside[0] == frozenset()
    assert inside[1] == {0}
    assert set(inside[2:-2]) == {frozenset({0, 1}), frozenset({0, 2})}
    assert inside[-2:] == [frozenset({0, 1, 2}), frozenset({0, 1, 2, 3})]


def test_dapple_counts_of_a_sum_what_earlier_stages_do_not_hide():
    sums = _Sums().with_stage(2.0, 0.0, 0.0).with_stage(1.0, 0.5, 3.0)
    assert sums.latency_s(4, 3.0) == 3 * 2.0 + 3.0 + 0.5 + (3.0 - 2.0)
