"""Plans that offload, or recompute, or both: what is chosen, and what it may not cost."""

from dataclasses import replace

import pytest
from validator import validate

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan, search_plans
from pipectl.planner.bounds import least_step_s
from pipectl.schedule import lower
from pipectl.simulate import simulate

FAST = Link(1e-6, 1e11)
TO_HOST, SLOW_TO_HOST = Link(1e-6, 1e9), Link(1e-6, 2e6)
SHORT = 800_000
"""Bytes that no balanced stages of the deep chain stay within."""
SHORTER = 640_000
"""Bytes that no stages of it stay within, unless they offload or recompute."""


def cluster_of(ranks, memory_bytes=None, host_link=TO_HOST):
    device = Device("gpu", 1.0, memory_bytes, host_link)
    return Cluster("c", "test", (Node("n", ranks, ranks, device),), FAST, FAST)


def request(**more):
    return PlanRequest("job", 128, **{"micro_batches": 32, **more})


def check(plan, cluster):
    """The plan does what its prediction says, within what there is."""
    validate(plan, [lower(plan, rank) for rank in range(plan.ranks)], process_baseline_bytes=5000)
    assert plan.prediction == simulate(plan, cluster, process_baseline_bytes=5000).prediction
    assert 0 < least_step_s(plan, cluster) <= plan.predicted_step_s
    limits = [cluster.device(rank).memory_bytes or 1e18 for rank in range(plan.ranks)]
    peaks = plan.prediction.peak_memory_bytes
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    return plan


def step_s(profile, cluster, **more):
    return check(make_plan(profile, cluster, request(**more)), cluster).prediction.step_time_s


def test_offload_over_a_fast_link_beats_recomputation(deep) -> None:
    cluster = cluster_of(8, SHORT)
    plan = check(make_plan(deep, cluster, request(offload=None, recompute=None)), cluster)
    assert any(stage.offload for stage in plan.stages)
    assert not any(stage.recompute for stage in plan.stages)
    assert plan.prediction.step_time_s < 0.9 * step_s(deep, cluster, recompute=None)
    unlimited_s = step_s(deep, cluster_of(8))
    assert plan.prediction.step_time_s == pytest.approx(unlimited_s, rel=1e-2)


def test_recomputation_beats_offload_over_a_slow_link(deep) -> None:
    cluster = cluster_of(8, SHORT, SLOW_TO_HOST)
    plan = check(make_plan(deep, cluster, request(offload=None, recompute=None)), cluster)
    assert any(stage.recompute for stage in plan.stages)
    assert plan.prediction.step_time_s < 0.9 * step_s(deep, cluster, offload=None)


@pytest.mark.parametrize("allowed", [{"offload": None}, {"offload": None, "recompute": None}])
def test_what_fits_nowhere_fits_with_less_on_the_device(deep, allowed) -> None:
    cluster = cluster_of(8, SHORTER)
    with pytest.raises(InfeasibleError):
        make_plan(deep, cluster, request())
    plan = check(make_plan(deep, cluster, request(**allowed)), cluster)
    assert any(stage.offload or stage.recompute for stage in plan.stages)


def test_stages_that_fit_keep_what_they_save(deep) -> None:
    cluster = cluster_of(8, SHORT)
    plan = make_plan(deep, cluster, request(offload=None))
    assert [stage.offload for stage in plan.stages] != [True] * 8
    assert not any(s.offload for s in make_plan(deep, cluster_of(8), request(offload=None)).stages)


def test_offload_everywhere_if_that_is_asked(deep) -> None:
    plan = check(make_plan(deep, cluster_of(8), request(offload=True)), cluster_of(8))
    assert all(stage.offload and not stage.recompute for stage in plan.stages)
    both = request(offload=True, recompute=True)
    plan = check(make_plan(deep, cluster_of(8), both), cluster_of(8))
    assert all(stage.offload and stage.recompute for stage in plan.stages)


def test_recompute_everywhere_if_that_is_asked(deep) -> None:
    """Though plans that keep what they save would be faster, and are found by other planners."""
    asked = request(recompute=True, stages=None)
    plan = check(make_plan(deep, cluster_of(8), asked), cluster_of(8))
    assert all(stage.recompute for stage in plan.stages)
    assert plan.predicted_step_s > step_s(deep, cluster_of(8))


@pytest.mark.parametrize(
    ("memory_bytes", "recompute", "host_link"),
    [
        (None, False, TO_HOST),
        (SHORT, False, TO_HOST),
        (SHORT, None, SLOW_TO_HOST),
        (SHORTER, False, SLOW_TO_HOST),
        (SHORTER, None, TO_HOST),
    ],
)
def test_more_to_choose_from_is_never_slower(deep, memory_bytes, recompute, host_link) -> None:
    cluster = cluster_of(8, memory_bytes, host_link)
    try:
        plain_s = step_s(deep, cluster, recompute=recompute)
    except InfeasibleError:
        plain_s = float("inf")
    allowed = {"offload": None, "recompute": recompute}
    one_s = step_s(deep, cluster, **allowed)
    all_s = step_s(deep, cluster, **allowed, backward_apart=None, every_schedule=True)
    assert one_s <= plain_s
    assert all_s <= one_s


@pytest.mark.parametrize("recompute", [False, None])
def test_what_is_not_allowed_is_not_chosen(deep, recompute) -> None:
    found = search_plans(
        deep, cluster_of(8, SHORT), request(recompute=recompute, every_schedule=True, stages=8)
    )
    for plan in found:
        assert not any(stage.offload or stage.backward_ranks for stage in plan.stages)
        assert recompute is None or not any(stage.recompute for stage in plan.stages)


def test_same_input_same_plan(deep) -> None:
    wanted = request(offload=None, recompute=None, backward_apart=None, every_schedule=True)
    found = [make_plan(deep, cluster_of(4, SHORT * 2), wanted) for _ in range(2)]
    first, second = (replace(plan, search=None) for plan in found)
    assert first == second


def test_a_link_to_the_host_that_is_not_known_is_an_assumption(deep) -> None:
    said = "the link between a device and its host's memory is assumed, not measured"
    offloads = request(offload=True)
    assert said in make_plan(deep, cluster_of(8, host_link=None), offloads).assumptions
    assert said not in make_plan(deep, cluster_of(8), offloads).assumptions
    assert said not in make_plan(deep, cluster_of(8, host_link=None), request()).assumptions


def test_the_bound_holds_and_the_largest_load_is_that_of_a_rank(deep) -> None:
    plan = make_plan(deep, cluster_of(8, SHORT), request(offload=None))
    assert plan.search.step_lower_bound_s <= plan.prediction.step_time_s
    assert plan.search.gap == pytest.approx(
        plan.prediction.step_time_s / plan.search.step_lower_bound_s - 1
    )
    loads = [stage.cost.forward_s + stage.cost.backward_s for stage in plan.stages]
    assert plan.search.max_stage_load_s == pytest.approx(max(loads))


def test_time_that_is_up(deep) -> None:
    with pytest.raises(OutOfTimeError):
        make_plan(deep, cluster_of(8, SHORT), request(offload=None), lambda: True)


def test_what_backwards_elsewhere_wait_for_is_offloaded_if_asked(deep) -> None:
    wanted = request(backward_apart=True, offload=True, stages=2)
    plan = make_plan(deep, cluster_of(4), wanted)
    assert all(stage.backward_ranks and stage.offload for stage in plan.stages)


@pytest.mark.parametrize("asked", [{"offload": True}, {"backward_apart": True, "stages": 2}])
def test_time_that_is_up_is_no_reason_why_nothing_fits(deep, asked) -> None:
    with pytest.raises(OutOfTimeError, match="before any plan was found"):
        make_plan(deep, cluster_of(4), request(**asked), lambda: True)
