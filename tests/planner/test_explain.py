"""What else a job could ask for, and what it takes without a pipeline."""

from dataclasses import replace

import pytest

from pipectl.cluster import Device, Node
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.explain.data_parallel import Estimate, WithoutPipeline, without_pipeline
from pipectl.planner.explain.explain import STOPPED, Offer, difference, explain
from pipectl.schedule.listed import Listed
from tests.planner.gate.checked_plans import cluster_of
from tests.planner.gate.graphs import chain

REQUEST = PlanRequest(name="test", batch_size=64)
FAST = Link(0.0, 1e12)
NODE, MEMORY, LINKS = (
    "one more node",
    "1 GiB more for every rank",
    "links between nodes twice as fast",
)


def cluster(ranks, link=FAST):
    return cluster_of(*[1] * ranks, within=link)


def explained(profile, machines, changes=None, **more):
    request = replace(REQUEST, **changes or {})
    plan = make_plan(profile, machines, request)
    found = explain(plan, profile, machines, request, make_plan, **more)
    return plan, found, {offer.change: offer for offer in found.offers}


def gain(found, change):
    plan, _, offers = found
    return offers[change].gain(plan.predicted_step_s)


def test_what_would_help_is_offered_with_its_gain():
    *_, offers = found = explained(chain(12), cluster(2))
    assert offers[NODE].step_s == make_plan(chain(12), cluster(3), REQUEST).predicted_step_s
    assert gain(found, NODE) > 0.2
    assert gain(explained(chain(2), cluster(2)), NODE) == 0.0, "it has no more cuts"
    alone = explained(chain(12), cluster(2), can_add_nodes=False)[2]
    assert set(alone) == set(offers) - {NODE}
    slow = chain(4, output_bytes=20_000, gradient_bytes=20_000)
    assert gain(explained(slow, cluster(2, Link(0.0, 1e6)), {"stages": 2}), LINKS) > 0.1
    each = [{"forward_s": time_s, "backward_s": time_s} for time_s in (1e-3, 9e-3, 1e-3)]
    heavy = chain(each, parameters=(), parameter_bytes=0)
    assert gain(explained(heavy, cluster(4)), "stages with replicas") > 0.3
    assert "stages with replicas" not in explained(heavy, cluster(1))[2]


def test_what_cannot_be_changed_or_does_not_matter_is_said():
    free = explained(chain(2), cluster(1))[2][MEMORY]
    assert (free.step_s, free.reason) == (None, "nothing: memory is not limited")
    limited = explained(chain(4), cluster(2), {"memory_limit_bytes": 10_000})[2]
    assert limited[MEMORY].step_s is not None
    more = explained(chain(4), cluster(2), {"micro_batches": 32})[2]["64 micro-batches"]
    assert more.step_s is not None
    most = explained(chain(4), cluster(2), {"micro_batches": 64})[2]["128 micro-batches"]
    assert most.reason == "the batch has only 64 samples"
    for step_s, expected in ((0.9, 0.1), (0.9995, 0.0), (1.2, 0.0), (None, 0.0)):
        assert Offer("x", step_s).gain(1.0) == pytest.approx(expected)


def test_alternatives_differ_and_are_ranked():
    plan, found, _ = explained(chain(8), cluster(4))
    times = [other.plan.predicted_step_s for other in found.alternatives]
    assert len(times) >= 2
    assert times == sorted(times)
    assert all(difference(plan, other.plan) for other in found.alternatives)
    assert any("schedule gpipe" in other.difference for other in found.alternatives)
    fixed = {"stages": 2, "micro_batches": 8, "schedule": "1f1b"}
    assert explained(chain(8), cluster(4), fixed)[1].alternatives == ()
    _, stopped, offers = explained(chain(4), cluster(2), expired=lambda: True)
    assert stopped.alternatives == ()
    assert offers[NODE].reason == STOPPED


# Without a pipeline

PAIR = cluster(2, Link(0.0, 1e6))
MEASURED = replace(PAIR, allreduce=((2, 1, 5.0), (2, 10**6, 5.0)))
FAR = replace(
    PAIR,
    nodes=tuple(Node(name, 1, 1, Device("cpu"), switch=name) for name in "ab"),
    between_switches=Link(1.0, 1e6),
)
MIXED = cluster_of(1, 1, speeds=(1.0, 0.5), within=Link(0.0, 1e6))
CROWDED = cluster_of(2, cores=1, within=Link(0.0, 1e6))


def estimates(profile, machines, **changes):
    return without_pipeline(profile, machines, replace(REQUEST, **changes), make_plan)


@pytest.mark.parametrize(
    ("machines", "parameters", "reduction_s", "computing_s"),
    [
        pytest.param(PAIR, {}, 400 / 1e6, 48e-3, id="64 samples, 8 in 12 ms"),
        pytest.param(MEASURED, {}, 5.0, 48e-3, id="measured sums"),
        pytest.param(FAR, {}, 2.0 + 400 / 1e6, 48e-3, id="links between switches"),
        pytest.param(PAIR, {"parameters": (("shared", 1000),)}, 1e-3, 48e-3, id="tied once"),
        pytest.param(MIXED, {}, 400 / 1e6, 96e-3, id="the slowest device"),
        pytest.param(CROWDED, {}, 400 / 1e6, 96e-3, id="ranks that share cores"),
    ],
)
def test_what_data_parallelism_takes(machines, parameters, reduction_s, computing_s):
    found = estimates(chain(4, **parameters), machines)
    assert found.single.step_s == pytest.approx(8 * 12e-3, rel=1e-3)
    assert found.data_parallel.reduction_s == pytest.approx(reduction_s)
    alone_s = found.data_parallel.step_s - found.data_parallel.reduction_s
    assert alone_s == pytest.approx(computing_s, rel=1e-3)


def test_what_cannot_be_estimated_says_why():
    found = estimates(chain(4), PAIR, memory_limit_bytes=6000)
    assert (found.single, found.data_parallel) == (None, None)
    assert "does not fit" in found.reason
    bare = chain(4, parameters=(), parameter_bytes=0)
    found = estimates(bare, PAIR)
    assert found.data_parallel is None
    assert found.reason.startswith("the profile has no parameter bytes")
    assert estimates(bare, cluster(1)).reason == ""


def test_only_what_is_clearly_faster_is_better():
    plan = make_plan(chain(4), PAIR, REQUEST)
    step_s = plan.predicted_step_s
    same, fast = Estimate(1, step_s * 0.995, 0.0, 0), Estimate(2, step_s * 0.9, 0.0, 0)
    assert WithoutPipeline(same, None).better_than(plan) is None
    assert WithoutPipeline(same, fast).better_than(plan) is fast
    assert WithoutPipeline(None, None).better_than(plan) is None


@pytest.mark.parametrize(
    "asked",
    [
        {"replicas": 2},
        {"backward_apart": True},
        {"listed": Listed.read("0F0,0B0\n1F0,1B0\n", "my.csv")},
        *({"schedule": schedule} for schedule in ("zb-v", "interleaved", "zb-h1", "pipedream")),
    ],
)
def test_one_rank_is_one_whatever_is_asked_of_stages(asked):
    assert estimates(chain(4), PAIR, **asked) == estimates(chain(4), PAIR)
