from collections.abc import Callable
from dataclasses import replace

import pytest

from pipectl.cluster import Cluster, Device, Node, assumed_cluster
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.explain.data_parallel import Estimate, WithoutPipeline, without_pipeline
from pipectl.profile import Profile
from pipectl.schedule.listed import Listed

LINK = Link(0.0, 1e6)
REQUEST = PlanRequest(name="test", batch_size=64)


def cluster(*ranks: int, cores: int = 1) -> Cluster:
    found = assumed_cluster("test", ranks, cores, None)
    return replace(found, within_node=LINK, between_nodes=LINK)


def estimates(profile: Profile, machines: Cluster, **changes: object) -> WithoutPipeline:
    return without_pipeline(profile, machines, replace(REQUEST, **changes), make_plan)


def test_four_chained_operators_on_one_rank_and_on_two(chain: Callable[..., Profile]):
    found = estimates(chain(4), cluster(1, 1))
    assert found.single is not None
    assert found.data_parallel is not None
    assert found.single.step_s == pytest.approx(8 * 12e-3, rel=1e-3)  # 64 samples, 8 in 12 ms
    reduction_s = 400 / 1e6
    assert found.data_parallel.reduction_s == pytest.approx(reduction_s)
    assert found.data_parallel.step_s == pytest.approx(4 * 12e-3 + reduction_s, rel=1e-3)


MEASURED = replace(cluster(1, 1), allreduce=((2, 1, 5.0), (2, 10**6, 5.0)))
FAR = replace(
    cluster(1, 1),
    nodes=tuple(Node(name, 1, 1, Device("cpu"), switch=name) for name in "ab"),
    between_switches=Link(1.0, 1e6),
)
MIXED = replace(
    cluster(1, 1), nodes=(Node("a", 1, 1, Device("cpu")), Node("b", 1, 1, Device("old", speed=0.5)))
)


@pytest.mark.parametrize(
    ("machines", "parameters", "reduction_s", "computing_s"),
    [
        pytest.param(MEASURED, {}, 5.0, 48e-3, id="measured sums"),
        pytest.param(FAR, {}, 2.0 + 400 / 1e6, 48e-3, id="links between switches"),
        pytest.param(
            cluster(1, 1), {"parameters": (("shared", 1000),)}, 1e-3, 48e-3, id="tied once"
        ),
        pytest.param(MIXED, {}, 400 / 1e6, 96e-3, id="the slowest device"),
        pytest.param(cluster(2, cores=1), {}, 400 / 1e6, 96e-3, id="ranks that share cores"),
    ],
)
def test_what_data_parallelism_takes(
    chain: Callable[..., Profile], machines: Cluster, parameters, reduction_s, computing_s
):
    found = estimates(chain(4, **parameters), machines).data_parallel
    assert found is not None
    assert found.reduction_s == pytest.approx(reduction_s)
    assert found.step_s - found.reduction_s == pytest.approx(computing_s, rel=1e-3)


def test_a_model_that_fits_no_rank_has_no_estimate(chain: Callable[..., Profile]):
    found = estimates(chain(4), cluster(1, 1), memory_limit_bytes=6000)
    assert (found.single, found.data_parallel) == (None, None)
    assert "does not fit" in found.reason


def test_without_parameters_there_is_nothing_to_estimate(chain: Callable[..., Profile]):
    bare = chain(4, parameters=(), parameter_bytes=0)
    found = estimates(bare, cluster(1, 1))
    assert found.data_parallel is None
    assert found.reason.startswith("the profile has no parameter bytes")
    assert estimates(bare, cluster(1)).reason == ""


def test_only_what_is_clearly_faster_is_better(chain: Callable[..., Profile]):
    plan = make_plan(chain(4), cluster(1, 1), REQUEST)
    assert plan.prediction is not None
    step_s = plan.prediction.step_time_s
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
def test_one_rank_is_one_whatever_is_asked_of_stages(
    chain: Callable[..., Profile], asked: dict[str, object]
):
    assert estimates(chain(4), cluster(1, 1), **asked) == estimates(chain(4), cluster(1, 1))
