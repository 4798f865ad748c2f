"""Requests that no plan can meet: what is said of them, and what would help."""

import re
from dataclasses import replace
from itertools import count

import pytest

from pipectl.errors import InfeasibleError
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.evaluator import Evaluator
from pipectl.planner.request import EvaluationSize
from pipectl.profile import Profile
from pipectl.profile_parts import OperatorMemory
from pipectl.schedule import SCHEDULES
from tests.planner.gate.checked_plans import cluster_of, planned
from tests.planner.gate.graphs import chain, hungry

APART, TIGHT = {"backward_apart": True}, {"memory_limit_bytes": 10_000}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"micro_batches": 65}, "65 micro-batches of 64 samples"),
        ({"warm_up": (3, 2, 1)}, "3 stages, but only 2 ranks"),
        ({"stages": 13}, "13 stages, but the graph has 11 possible cuts"),
        ({"replicas": 3}, "3 replicas of every stage, but only 2 ranks"),
        ({"schedule": "interleaved", "stages": 5}, "5 stages cannot go round over 2 ranks"),
        ({"schedule": "zb-v", "stages": 3}, r"3 stages cannot lie in a V over 2 ranks\n.*4"),
        ({"schedule": "zb-v", "stages": 6}, r"6 stages cannot lie in a V over 2 ranks\n.*4"),
        ({"every_schedule": True, "stages": 3}, "3 stages"),
        ({"schedule": "pipedream", "micro_batches": 4}, "updates after every micro-batch"),
        (
            {"schedule": "pipedream", "backward_apart": True, "stages": 3},
            "6 ranks in all, and the job has 2",
        ),
        ({"backward_apart": True, "stages": 2}, "all backwards on other ranks|4 ranks in all"),
        ({"ranks": 1, **APART, "schedule": "pipedream"}, "2 ranks in all, and the job has 1"),
        ({"ranks": 1, **APART}, "all backwards on other ranks"),
        ({"schedule": "interleaved", **TIGHT}, "interleaved needs .* more than the memory limit"),
        ({"schedule": "pipedream", **TIGHT}, "pipedream needs .* more than the memory limit"),
    ],
)
def test_what_cannot_be_is_refused(asked, words) -> None:
    cluster = cluster_of(asked.pop("ranks", 2))
    with pytest.raises(InfeasibleError, match=words):
        planned(chain(12), cluster, **asked)


def evaluating(count: int = 4) -> Profile:
    """A chain of operators that keep their values, of 100 bytes a sample, for the backward."""
    return chain(
        [
            {
                "saved": ((f"n{index}", 800),),
                "memory": OperatorMemory(800, f"n{index}", 800, 800, ((f"n{index - 1}", 800),)),
            }
            for index in range(count)
        ],
        output_bytes=800,
        gradient_bytes=800,
    )


@pytest.mark.parametrize(
    ("size", "stages", "most"),
    [
        # Two values of 64 samples are as much as what a step keeps, of 8 samples.
        (EvaluationSize(None, None), 1, None),
        (EvaluationSize(512, 20), 1, None),
        (EvaluationSize(512, None), 1, 2 * 51_200),
        (EvaluationSize(512, 400), 1, 2 * 40_000),
        # The first of two stages has two values, and sends a third; the second receives one.
        (EvaluationSize(512, 5000), 2, 3 * 51_200),
        (EvaluationSize(512, 512), 2, 2 * 51_200),
    ],
)
def test_an_evaluation_counts_as_the_memory_of_its_samples(size, stages, most) -> None:
    profile, cluster = evaluating(), cluster_of(stages)
    asked = {"micro_batches": 8, "stages": stages}
    (without, *_) = planned(profile, cluster, **asked).prediction.peak_memory_bytes
    plan = planned(profile, cluster, **asked, evaluation=size)
    own = sum(each.cost.resident_bytes for each in plan.stages if 0 in each.ranks)
    assert plan.prediction.peak_memory_bytes[0] == (5000 + own + most if most else without)


def test_an_evaluation_that_does_not_fit_is_named_with_a_smaller_one_that_does() -> None:
    profile, limit = evaluating(), {"memory_limit_bytes": 60_000, "micro_batches": 8}
    planned(profile, cluster_of(1), **limit)
    with pytest.raises(InfeasibleError, match="in an evaluation of 512 samples at once") as caught:
        planned(profile, cluster_of(1), **limit, evaluation=EvaluationSize(512, None))
    assert re.search(r"evaluation.batch_size 64: about .* \(fits\)", caught.value.hint)


@pytest.mark.parametrize("schedule", [None, "1f1b", "pipedream-2bw"])
@pytest.mark.parametrize("asked", [True, None])
def test_code_of_a_stage_is_recomputed_where_its_backward_is_elsewhere(
    monkeypatch, schedule, asked
) -> None:
    """Ranks would refuse another plan; without recomputation there may be none. No plan is tried
    again and again."""
    free = chain(6)
    profile, cluster = replace(free, own_code=("n2",)), cluster_of(4)
    tried, run = count(), Evaluator.run
    monkeypatch.setattr(Evaluator, "run", lambda *given: next(tried) >= 0 and run(*given))
    more = {"schedule": schedule, "stages": 2, "backward_apart": asked}
    plan = planned(profile, cluster, **more, recompute=None)
    assert next(tried) < 1000
    for stage in plan.stages:
        assert bool(stage.backward_ranks) or not asked
        assert stage.recompute or not stage.backward_ranks or "n2" not in stage.nodes
    if not asked:
        plan = planned(profile, cluster, **more, recompute=False)
        assert not any(stage.backward_ranks for stage in plan.stages if "n2" in stage.nodes)
        return
    assert any(stage.recompute for stage in plan.stages)
    assert not any(s.recompute for s in planned(free, cluster, **more, recompute=False).stages)
    with pytest.raises(InfeasibleError, match="layer2 runs code of its own") as caught:
        planned(profile, cluster, **more, recompute=False)
    assert caught.value.hint == "write pipeline.recompute: auto, or pipeline.backward: together"


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "gpipe"])
def test_a_model_with_few_cuts_is_planned_or_refused_by_the_number_of_its_cuts(schedule) -> None:
    for blocks, ranks in ((1, 2), (1, 3), (2, 3), (3, 2)):
        profile, cluster = chain(blocks), cluster_of(ranks)
        refused: InfeasibleError | None = None
        try:
            plan = planned(profile, cluster, schedule=schedule)
        except InfeasibleError as error:
            refused = error
        if refused is not None:
            assert f"{blocks - 1} possible cuts: at most {blocks} stages" in refused.message
            assert "pipeline.schedule to auto" in str(refused.hint)
            plan = planned(profile, cluster)  # as the hint says
        assert len(plan.stages) <= blocks
        assert all(stage.nodes for stage in plan.stages)


@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs", "zb-v", "v-half", "dualpipev"])
def test_more_stages_than_cuts_are_refused(schedule) -> None:
    with pytest.raises(InfeasibleError, match="4 stages, but the graph has 2 possible cuts"):
        planned(chain(3), cluster_of(2), schedule=schedule, stages=4)


def refusal(profile, cluster=None, **asked):
    with pytest.raises(InfeasibleError) as caught:
        planned(profile, cluster or cluster_of(2), **asked)
    return caught.value


TWO_OF_EIGHT = {"micro_batches": 8, "stages": 2}


def test_infeasible_error_names_rank_stage_figures_and_hints() -> None:
    error = refusal(chain(8), **TWO_OF_EIGHT, schedule="gpipe", memory_limit_bytes=30_000)
    assert error.exit_code == 4
    assert error.message == (
        "no feasible plan: the one with the smallest peak needs 46.5 KiB on rank 1 "
        "(stage 1 of 2: process 4.88 KiB, parameters, gradients and optimizer 1.56 KiB, "
        "4.88 KiB for each micro-batch in flight (at most 8, of 8 samples)), "
        "17.2 KiB more than its limit of 29.3 KiB"
    )
    assert error.hint == (
        "pipeline.memory_limit 1MiB would be enough; 4 stages on 4 ranks: about 32.0 KiB "
        "(still too much); schedule 1f1b: about 16.6 KiB (fits)"
    )


@pytest.mark.parametrize(
    ("memory_bytes", "asked", "hint"),
    [
        pytest.param(
            None,
            {"micro_batches": 4, "stages": 2, "schedule": "1f1b", "memory_limit_bytes": 15_000},
            r".*micro_batches 16: about 11\.7 KiB \(fits\)",
            id="smaller micro-batches",
        ),
        pytest.param(
            None,
            {"memory_limit_bytes": 4_000},
            "pipeline.memory_limit 1MiB would be enough$",
            id="less than the process itself: only the limit",
        ),
        pytest.param(
            6_000,
            {**TWO_OF_EIGHT, "memory_limit_bytes": 5_500},
            "pipeline.memory_limit 1MiB and ranks with 1 MiB of memory would be enough",
            id="devices do not have the limit that would do",
        ),
        pytest.param(
            None,
            {**TWO_OF_EIGHT, "memory_limit_bytes": 5_500, "memory_shared_by": 2},
            "resources.memory_per_node 2MiB would be enough",
            id="a share of the memory of a node",
        ),
    ],
)
def test_the_hint_is_what_would_be_enough(memory_bytes, asked, hint) -> None:
    error = refusal(chain(8), cluster_of(2, memory_bytes=memory_bytes), **asked)
    assert re.match(hint, error.hint)


def test_a_limit_below_the_peak_of_the_capture_advises_to_create_parameters_per_rank() -> None:
    profile = replace(chain(8), capture_bytes=40_000)
    plan = make_plan(profile, cluster_of(2), PlanRequest("job", 64, memory_limit_bytes=40_000))
    assert plan.prediction.peak_memory_bytes == (40_000, 40_000)
    error = refusal(profile, memory_limit_bytes=30_000)
    assert "captures the whole model" in error.message
    assert "pipeline.memory_limit 1MiB" in error.hint
    assert "model.materialize: per_rank" in error.hint


def test_what_recomputes_is_said_to_keep_its_inputs() -> None:
    asked = {"stages": 2, "recompute": True, "memory_limit_bytes": 100_000}
    error = refusal(hungry(4, 10**6), batch=16, **asked)
    assert "0 B for each micro-batch in flight (at most 2, of 1 sample)" in error.message
    assert ", 244 KiB for one that it recomputes)" in error.message


def test_changes_of_stages_that_recompute_are_estimated_as_such() -> None:
    received = [((f"n{i - 1}", 10**5),) if i else () for i in range(8)]
    each = [{"saved": ((f"n{i}:own", 10**6), *more)} for i, more in enumerate(received)]
    profile = chain(each, output_bytes=10**5)
    asked = {**TWO_OF_EIGHT, "memory_limit_bytes": 5_000_000, "recompute": None}
    hint = refusal(profile, **asked, schedule="gpipe").hint
    assert re.search(r"schedule 1f1b: about [\d.]+ MiB \(fits\)", hint)
    assert planned(profile, cluster_of(2), **asked, schedule="1f1b")
