from collections.abc import Callable
from dataclasses import replace

import pytest

from pipectl.cluster import Cluster, assumed_cluster
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.explain.explain import STOPPED, Explanation, Offer, difference, explain
from pipectl.profile import Operator, Profile

REQUEST = PlanRequest(name="test", batch_size=64)


def cluster(ranks: int, bandwidth: float = 1e12) -> Cluster:
    found = assumed_cluster("test", [1] * ranks, 1, None)
    return replace(found, between_nodes=Link(0.0, bandwidth))


def explained(profile: Profile, machines: Cluster, **changes: object) -> tuple[Plan, Explanation]:
    request = replace(REQUEST, **changes)
    plan = make_plan(profile, machines, request)
    return plan, explain(plan, profile, machines, request, make_plan)


def offers(found: Explanation) -> dict[str, Offer]:
    return {offer.change: offer for offer in found.offers}


def test_another_node_helps_a_model_that_can_be_cut_further(chain: Callable[..., Profile]):
    plan, found = explained(chain(12), cluster(2))
    offer = offers(found)["one more node"]
    assert offer.step_s == make_plan(chain(12), cluster(3), REQUEST).predicted_step_s
    assert offer.gain(plan.predicted_step_s) > 0.2
    plan, found = explained(chain(2), cluster(2))
    assert offers(found)["one more node"].gain(plan.predicted_step_s) == 0.0, "it has no more cuts"


def test_a_job_on_one_machine_is_offered_no_other_node(chain: Callable[..., Profile]):
    plan = make_plan(chain(4), cluster(2), REQUEST)
    subject = chain(4), cluster(2), REQUEST, make_plan
    found = offers(explain(plan, *subject, can_add_nodes=False))
    assert "one more node" not in found
    assert set(found) == set(offers(explain(plan, *subject))) - {"one more node"}


def test_memory_is_offered_where_it_is_limited(chain: Callable[..., Profile]):
    free = offers(explained(chain(2), cluster(1))[1])["1 GiB more for every rank"]
    assert (free.step_s, free.reason) == (None, "nothing: memory is not limited")
    _, tight = explained(chain(4), cluster(2), memory_limit_bytes=10_000)
    assert offers(tight)["1 GiB more for every rank"].step_s is not None


def test_faster_links_help_where_messages_are_slow(chain: Callable[..., Profile]):
    machines = cluster(2, bandwidth=1e6)
    plan, found = explained(
        chain(4, output_bytes=20_000, gradient_bytes=20_000), machines, stages=2
    )
    assert offers(found)["links between nodes twice as fast"].gain(plan.predicted_step_s) > 0.1


def test_twice_the_micro_batches_need_samples(chain: Callable[..., Profile]):
    _, found = explained(chain(4), cluster(2), micro_batches=32)
    assert offers(found)["64 micro-batches"].step_s is not None
    _, found = explained(chain(4), cluster(2), micro_batches=64)
    assert offers(found)["128 micro-batches"].reason == "the batch has only 64 samples"


def test_replicas_are_offered_where_one_operator_has_the_work(
    make_profile: Callable[..., Profile], make_operator: Callable[..., Operator]
):
    free = {"parameters": (), "parameter_bytes": 0}
    times = (1e-3, 9e-3, 1e-3)
    operators = [
        make_operator(i, forward_s=time_s, backward_s=time_s, **free)
        for i, time_s in enumerate(times)
    ]
    profile = make_profile(operators, [(0, 1), (1, 2)])
    plan, found = explained(profile, cluster(4))
    offer = offers(found)["stages with replicas"]
    assert offer.gain(plan.predicted_step_s) > 0.3
    assert "stages with replicas" not in offers(explained(profile, cluster(1))[1])


def test_alternatives_differ_and_are_ranked(chain: Callable[..., Profile]):
    plan, found = explained(chain(8), cluster(4))
    times = [other.plan.predicted_step_s for other in found.alternatives]
    assert len(times) >= 2
    assert times == sorted(times)
    assert all(difference(plan, other.plan) for other in found.alternatives)
    assert any("schedule gpipe" in other.difference for other in found.alternatives)


def test_what_the_user_has_fixed_has_no_alternative(chain: Callable[..., Profile]):
    fixed = {"stages": 2, "micro_batches": 8, "schedule": "1f1b"}
    assert explained(chain(8), cluster(4), **fixed)[1].alternatives == ()


def test_once_stopped_nothing_more_is_planned(chain: Callable[..., Profile]):
    plan = make_plan(chain(4), cluster(2), REQUEST)
    found = explain(plan, chain(4), cluster(2), REQUEST, make_plan, expired=lambda: True)
    assert found.alternatives == ()
    assert offers(found)["one more node"].reason == STOPPED


@pytest.mark.parametrize(("step_s", "gain"), [(0.9, 0.1), (0.9995, 0.0), (1.2, 0.0), (None, 0.0)])
def test_a_gain_too_small_to_matter_is_none(step_s, gain):
    assert Offer("x", step_s).gain(1.0) == pytest.approx(gain)
