"""Plans with the stages that planners of the literature choose."""

from dataclasses import replace
from itertools import count

import pytest
from validator import validate

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import InfeasibleError
from pipectl.link import Link
from pipectl.plan import Replication
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.baselines import POLICIES
from pipectl.planner.baselines.plans import policy_plans
from pipectl.schedule import lower
from pipectl.simulate import simulate

REQUEST = PlanRequest("job", 64)


def cluster(ranks: int, bandwidth: float = 1e9, memory: int | None = None) -> Cluster:
    link = Link(0.0, bandwidth)
    nodes = tuple(Node(f"n{i}", 1, 1, Device("cpu", memory_bytes=memory)) for i in range(ranks))
    return Cluster("c", "test", nodes, link, link)


def best(*arguments):
    return policy_plans(*arguments)[0]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_makes_a_plan_that_can_be_carried_out(chain, name):
    profile, machines = chain(8), cluster(4)
    plan = best(name, profile, machines, REQUEST)
    assert [node for stage in plan.stages for node in stage.nodes] == [f"n{i}" for i in range(8)]
    assert plan.search.planner == name
    assert plan.search.lower_bound_s <= plan.search.max_stage_load_s
    assert plan.prediction.step_time_s == simulate(plan, machines).step_time_s
    validate(plan, [lower(plan, rank) for rank in range(plan.ranks)])
    assert plan == best(name, profile, machines, REQUEST)


def test_equal_operators_in_equal_stages_are_what_the_own_planner_finds(chain):
    own_s = make_plan(chain(8), cluster(4), REQUEST).prediction.step_time_s
    for name in ("antichain", "gpipe-balance", "uniform", "parameters"):
        step_s = best(name, chain(8), cluster(4), REQUEST).prediction.step_time_s
        assert step_s == pytest.approx(own_s, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "replication"), [("dapple", Replication.SPLIT), ("pipedream", Replication.WHOLE)]
)
def test_replicas_share_the_work_as_their_planner_has_it(
    make_profile, make_operator, name, replication
):
    """One operator has most of the work, and nothing to sum or to send."""
    operators = [
        make_operator(
            i,
            forward_s=s,
            backward_s=2 * s,
            parameters=(),
            parameter_bytes=0,
            output_bytes=1,
            gradient_bytes=1,
        )
        for i, s in enumerate((1e-3, 9e-3, 1e-3))
    ]
    profile = make_profile(operators, [(0, 1), (1, 2)])
    plan = best(name, profile, cluster(4), REQUEST)
    assert plan.replication is replication
    assert max(stage.replicas for stage in plan.stages) > 1
    straight = make_plan(profile, cluster(4), REQUEST)
    assert plan.prediction.step_time_s < straight.prediction.step_time_s


def test_no_replica_is_left_without_samples(chain):
    """One operator without messages or parameters: as many replicas as there are ranks."""
    profile = chain(1, parameters=())
    plan = best("dapple", profile, cluster(4), REQUEST)
    assert plan.micro_batch_size >= plan.stages[0].replicas == 4
    with pytest.raises(InfeasibleError, match="more replicas than a micro-batch has"):
        best("dapple", profile, cluster(4), replace(REQUEST, micro_batches=64))


def test_what_a_replica_allocates_is_for_its_own_samples(chain):
    """The temporaries of a stage shrink with the samples that a replica takes."""
    from pipectl.profile import OperatorMemory

    profile = chain(1, memory=OperatorMemory(1000, "n0", 80_000, 80_000, ()), parameters=())
    plan = best("dapple", profile, cluster(4), replace(REQUEST, micro_batches=8))
    assert plan.stages[0].replicas == 4
    alone = make_plan(profile, cluster(1), replace(REQUEST, micro_batches=8))
    assert plan.stages[0].cost.forward_s == alone.stages[0].cost.forward_s
    assert plan.stages[0].cost.peaks.forward_bytes == alone.stages[0].cost.peaks.forward_bytes / 4


def test_what_the_job_fixes_holds(chain):
    request = replace(REQUEST, stages=2, micro_batches=4, schedule="gpipe")
    plan = best("uniform", chain(8), cluster(4), request)
    assert [len(stage.nodes) for stage in plan.stages] == [4, 4]
    assert (plan.micro_batches, plan.schedule, plan.ranks) == (4, "gpipe", 4)


def test_what_a_policy_cannot_do_is_infeasible(chain):
    with pytest.raises(InfeasibleError, match=r"dapple makes \d stages? here, not 3"):
        best("dapple", chain(8), cluster(4), replace(REQUEST, stages=3, micro_batches=1))
    with pytest.raises(InfeasibleError, match="uniform plans for gpipe and 1f1b only"):
        best("uniform", chain(8), cluster(4), replace(REQUEST, schedule="interleaved"))


@pytest.mark.parametrize(("limit", "memory"), [(6000, None), (None, 6000)])
def test_memory_that_a_policy_does_not_look_at(chain, limit, memory):
    request = replace(REQUEST, memory_limit_bytes=limit)
    with pytest.raises(InfeasibleError, match="uniform ignores both") as caught:
        best("uniform", chain(8), cluster(4, memory=memory), request)
    cure = "pipeline.memory_limit" if limit else "ranks with more memory"
    assert cure in caught.value.cure


def test_smaller_micro_batches_are_taken_where_others_do_not_fit(chain):
    free = best("uniform", chain(8), cluster(2), REQUEST)
    limit = max(free.prediction.peak_memory_bytes) - 1
    tight = best("uniform", chain(8), cluster(2), replace(REQUEST, memory_limit_bytes=limit))
    assert max(tight.prediction.peak_memory_bytes) <= limit


def test_the_best_so_far_where_time_is_up(chain):
    looks = count()
    plan = best("uniform", chain(8), cluster(4), REQUEST, lambda: next(looks) >= 0)
    assert not plan.search.finished
