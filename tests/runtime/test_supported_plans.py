"""Plans that the engine cannot run are refused by name."""

from dataclasses import replace

import pytest

from pipectl.errors import MismatchError
from pipectl.plan import Replication
from pipectl.runtime.nodes import check_supported


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_every_schedule_runs_with_several_stages_a_rank(pipeline, schedule):
    check_supported(pipeline(4, 4, schedule=schedule, ranks=[0, 1, 0, 1]))


def test_stages_may_have_replicas_as_long_as_each_gets_samples(pipeline):
    plan = pipeline(2, 4, micro_batch_size=2, node_of_rank=[0, 0, 0, 0])
    several = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], ranks=(1, 2, 3))))
    check_supported(several)
    with pytest.raises(MismatchError, match=r"stages\[1\] has 3 replicas for the 2 samples"):
        check_supported(replace(several, replication=Replication.SPLIT))


@pytest.mark.parametrize("recompute", [False, True])
def test_backwards_run_on_other_ranks_but_not_in_halves(pipeline, recompute):
    plan = apart(pipeline(2, 4, node_of_rank=[0, 0, 0]), recompute=recompute)
    check_supported(plan)
    with pytest.raises(MismatchError, match="split backwards and a backward on other ranks"):
        check_supported(replace(plan, schedule="zb-h1"))


def test_replicas_keep_their_backwards(pipeline):
    plan = pipeline(2, 4, node_of_rank=[0] * 5)
    last = replace(plan.stages[1], ranks=(1, 2), backward_ranks=(3, 4))
    with pytest.raises(MismatchError, match="replicas and a backward on other ranks") as caught:
        check_supported(replace(plan, stages=(plan.stages[0], last)))
    assert caught.value.exit_code == 3


def apart(plan, *, recompute):
    last = replace(plan.stages[1], backward_ranks=(2,), recompute=recompute)
    return replace(plan, stages=(plan.stages[0], last))
