"""Stages that recompute, at once or in blocks, offload, or have their backward elsewhere."""

import re
from dataclasses import replace
from itertools import product

import pytest

from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.link import Link
from pipectl.planner import PlanRequest, search_plans
from pipectl.planner.evaluator import TIE
from pipectl.planner.segments import SegmentCuts
from pipectl.schedule import is_unflushed
from pipectl.simulate import simulate
from tests.planner.gate.checked_plans import FAST, cluster_of, planned
from tests.planner.gate.graphs import DEEP, chain

pytestmark = pytest.mark.slow

SLOW = Link(1e-6, 1e7)
"""Saved values take several times as long as a forward."""
TO_HOST, SLOW_TO_HOST = Link(1e-6, 1e9), Link(1e-6, 2e6)
SHORT = 800_000
"""Bytes that no balanced stages of the deep chain on eight ranks stay within."""
SHORTER = 640_000
"""Bytes that no stages of it stay within, unless they offload or recompute."""
AT_ONCE, IN_BLOCKS = 900_000, 400_000
"""Bytes that two stages of it stay within if they recompute, and only if they do so in blocks."""


def machine(ranks=8, memory_bytes=None, host_link=TO_HOST):
    return cluster_of(ranks, memory_bytes=memory_bytes, host_link=host_link)


def plan_of(profile, cluster, **asked):
    return planned(profile, cluster, 128, micro_batches=32, **asked)


def step_s(profile, cluster, **asked):
    return plan_of(profile, cluster, **asked).predicted_step_s


def peak(plan):
    return max(plan.prediction.peak_memory_bytes)


def test_offload_over_a_fast_link_beats_recomputation_which_beats_it_over_a_slow_one() -> None:
    cluster, slow = machine(8, SHORT), machine(8, SHORT, SLOW_TO_HOST)
    plan = plan_of(DEEP, cluster, offload=None, recompute=None)
    offload = [stage.offload for stage in plan.stages]
    assert any(offload)
    assert not all(offload), "what fits keeps what it saves"
    assert not any(stage.recompute for stage in plan.stages)
    assert plan.predicted_step_s < 0.9 * step_s(DEEP, cluster, recompute=None)
    unlimited = plan_of(DEEP, machine(), offload=None)
    assert plan.predicted_step_s == pytest.approx(unlimited.predicted_step_s, rel=1e-2)
    assert not any(stage.offload for stage in unlimited.stages)
    again = plan_of(DEEP, slow, offload=None, recompute=None)
    assert any(stage.recompute for stage in again.stages)
    assert again.predicted_step_s < 0.9 * step_s(DEEP, slow, offload=None)


@pytest.mark.parametrize(
    "asked",
    [
        {"offload": True},
        {"recompute": True},
        {"offload": True, "recompute": True},
        {"backward_apart": True, "offload": True},
        {"backward_apart": True, "recompute": True},
        {"backward_apart": True, "recompute": False},
        {"backward_apart": True, "recompute": True, "segments": None},
        {"recompute": True, "segments": True},
        {"schedule": "pipedream", "recompute": True},
        {"schedule": "pipedream", "offload": True},
    ],
    ids=lambda asked: " ".join(asked),
)
def test_what_is_asked_of_all_stages_holds_for_all(asked) -> None:
    """Though other plans would be faster, and are found by other planners."""
    count = None if "schedule" in asked else 32
    plan = planned(DEEP, machine(4), 128, micro_batches=count, **asked)
    for stage in plan.stages:
        assert stage.offload == asked.get("offload", False)
        assert stage.recompute == asked.get("recompute", False)
        assert bool(stage.backward_ranks) == asked.get("backward_apart", False)
        assert (stage.segments is not None) == bool(asked.get("segments"))


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
def test_more_to_choose_from_is_never_slower(memory_bytes, recompute, host_link) -> None:
    cluster = machine(8, memory_bytes, host_link)
    try:
        plain_s = step_s(DEEP, cluster, recompute=recompute)
    except InfeasibleError:
        plain_s = float("inf")
    allowed = {"offload": None, "recompute": recompute}
    one_s = step_s(DEEP, cluster, **allowed)
    all_s = step_s(DEEP, cluster, **allowed, backward_apart=None, every_schedule=True)
    assert one_s <= plain_s
    assert all_s <= one_s


@pytest.mark.parametrize("recompute", [False, None])
def test_what_is_not_allowed_is_not_chosen(recompute) -> None:
    request = PlanRequest("job", 128, 32, 8, recompute=recompute, every_schedule=True)
    for plan in search_plans(DEEP, machine(8, SHORT), request):
        assert not any(stage.offload or stage.backward_ranks for stage in plan.stages)
        assert recompute is None or not any(stage.recompute for stage in plan.stages)
        assert not is_unflushed(plan), "others keep the results of one rank"


@pytest.mark.parametrize(("link", "offload"), [(None, True), (TO_HOST, True), (None, False)])
def test_a_link_to_the_host_that_is_not_known_is_an_assumption(link, offload) -> None:
    said = "the link between a device and its host's memory is assumed, not measured"
    found = plan_of(DEEP, machine(host_link=link), offload=offload).assumptions
    assert (said in found) == (link is None and offload)


@pytest.mark.parametrize("asked", [{"offload": None}, {"backward_apart": True, "stages": 2}])
def test_time_that_is_up_is_no_reason_why_nothing_fits(asked) -> None:
    with pytest.raises(OutOfTimeError, match="before any plan was found"):
        plan_of(DEEP, machine(4, SHORT), expired=lambda: True, **asked)


# In blocks


@pytest.mark.parametrize("memory_bytes", [None, AT_ONCE, IN_BLOCKS])
def test_blocks_are_never_slower_and_need_less(memory_bytes) -> None:
    cluster, asked = machine(2, memory_bytes), {"stages": 2, "recompute": None}
    plan = plan_of(DEEP, cluster, **asked, segments=None)
    assert bool(memory_bytes) == any(stage.recompute for stage in plan.stages)
    if memory_bytes == IN_BLOCKS:
        assert all(stage.recompute and stage.segments is not None for stage in plan.stages)
        with pytest.raises(InfeasibleError):
            plan_of(DEEP, cluster, **asked)
    else:
        assert plan.predicted_step_s <= step_s(DEEP, cluster, **asked)


@pytest.mark.parametrize(
    ("schedule", "stages", "share"),
    [
        ("1f1b", 2, 0.6),
        ("gpipe", 2, 0.9),
        ("interleaved", 4, 0.9),
        ("pipedream-2bw", 2, 0.9),
        ("zb-h1", 2, 1.0),  # all that is saved waits for the second half of the backward
    ],
)
def test_blocks_in_every_kind_of_schedule(schedule, stages, share) -> None:
    asked = {"schedule": schedule, "stages": stages, "micro_batches": 8, "recompute": True}
    plan, at_once = (planned(DEEP, machine(2), 128, segments=b, **asked) for b in (True, False))
    assert schedule == "zb-h1" or all(stage.segments is not None for stage in plan.stages)
    for stage in plan.stages:
        if stage.segments is not None:
            assert stage.segments.forward_s == pytest.approx(stage.cost.forward_s)
            twice_s = stage.segments.recompute_s + stage.segments.backward_s
            assert twice_s == pytest.approx(stage.load_s), "its work, and its forward again"
    assert peak(plan) <= share * peak(at_once)


def test_borders_are_where_little_crosses_and_no_group_is_cut() -> None:
    """Layers of four operators: a wide value, two in one memory, and a narrow value at the end."""
    layers, each = 6, []
    for layer in range(layers):
        group = {"group": f"g{layer}"}
        each += [{}, group, group, {"output_bytes": 10}]
    cuts = SegmentCuts(chain(each, output_bytes=5000)).of(range(4 * layers))
    ends = {4 * layer for layer in range(1, layers)}
    assert {len(cut) for cut in cuts} >= {1, 2, layers - 1}
    coarse = [cut for cut in cuts if len(cut) < layers]
    assert all(set(cut) <= ends for cut in coarse)
    within_groups = {4 * layer + 2 for layer in range(layers)}
    assert not any(set(cut) & within_groups for cut in cuts)


def test_the_memory_that_an_error_asks_for_is_that_of_stages_in_blocks() -> None:
    saved = [((f"n{index}", 10**6), (f"s{index}", 10**7)) for index in range(32)]
    profile = chain([{"saved": held} for held in saved], output_bytes=10**6)
    asked, hints = {"stages": 2, "recompute": None, "schedule": "1f1b"}, []
    for blocks in (False, None):
        with pytest.raises(InfeasibleError) as caught:
            plan_of(profile, machine(2), **asked, segments=blocks, memory_limit_bytes=10**6)
        hints.append(int(re.search(r"memory_limit (\d+)MiB", caught.value.hint)[1]))
    assert hints[1] < hints[0]
    plan_of(profile, machine(2), **asked, segments=None, memory_limit_bytes=hints[1] * 2**20)


# Backwards elsewhere: saved values travel over fast links, over slow ones inputs alone


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
        ([4], Link(1e-5, 5e7), None, None),
        ([1, 1, 1, 1], FAST, SLOW, [True, True]),
        ([2, 1, 1], FAST, SLOW, [False, True]),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream-2bw"])
def test_every_stage_chooses_by_its_link(schedule, machines, within, between, again) -> None:
    cluster = cluster_of(*machines, within=within, between=between)
    asked = {"stages": 2, "micro_batches": 8, "backward_apart": True, "recompute": None}
    plan = planned(DEEP, cluster, schedule=schedule, **asked)
    if again is not None and (schedule != "pipedream-2bw" or machines == [4]):
        assert [stage.recompute for stage in plan.stages] == again
    assert plan.predicted_step_s <= least_s(plan, cluster) * (1 + TIE)


@pytest.mark.parametrize("schedule", ["gpipe", "pipedream-2bw"])
def test_the_rank_of_the_backwards_offloads_if_what_arrives_does_not_fit(schedule) -> None:
    """No such stage recomputes in blocks, because its forward sends only whole inputs."""
    asked = {"schedule": schedule, "stages": 2, "micro_batches": 16, "backward_apart": True}

    def peak(**more: bool) -> int:
        plan = planned(DEEP, machine(4), 128, **asked, **more)
        return max(plan.prediction.peak_memory_bytes)

    limit = (peak() + peak(offload=True)) // 2
    plan = planned(DEEP, machine(4, limit), 128, **asked, offload=None)
    assert all(stage.backward_ranks for stage in plan.stages)
    assert any(stage.offload for stage in plan.stages)
    assert max(plan.prediction.peak_memory_bytes) <= limit
    least = planned(DEEP, machine(4, limit), 128, **asked, recompute=None, segments=None)
    assert not any(stage.segments for stage in least.stages)
