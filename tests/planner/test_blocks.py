"""Stages that recompute block by block: where they are cut, what they hold, and when."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from validator import validate

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import InfeasibleError
from pipectl.link import Link
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.segments import SegmentCuts, SegmentPlans
from pipectl.schedule import lower
from pipectl.simulate import simulate

FAST = Link(1e-6, 1e11)
OPERATORS = 32
AT_ONCE, IN_BLOCKS = 900_000, 400_000
"""Bytes that two stages stay within if they recompute, and only if they do so in blocks."""


def cluster_of(ranks, memory_bytes=None):
    node = Node("n", ranks, ranks, Device("gpu", 1.0, memory_bytes))
    return Cluster("c", "test", (node,), FAST, FAST)


def request(**more):
    return PlanRequest("job", **{"batch_size": 128, "micro_batches": 32, "stages": 2, **more})


def planned(profile, memory_bytes, **more):
    """A plan that does what its prediction says, within what there is."""
    cluster = cluster_of(2, memory_bytes)
    plan = make_plan(profile, cluster, request(**more))
    validate(plan, [lower(plan, rank) for rank in range(2)], process_baseline_bytes=5000)
    assert plan.prediction == simulate(plan, cluster, process_baseline_bytes=5000).prediction
    assert max(plan.prediction.peak_memory_bytes) <= (memory_bytes or 1e18)
    return plan


def test_what_does_not_fit_at_once_fits_in_blocks(deep) -> None:
    with pytest.raises(InfeasibleError):
        planned(deep, IN_BLOCKS, recompute=None)
    plan = planned(deep, IN_BLOCKS, recompute=None, blocks=None)
    assert all(stage.recompute and stage.blocks is not None for stage in plan.stages)


@pytest.mark.parametrize("memory_bytes", [None, AT_ONCE, 600_000])
def test_more_to_choose_from_is_never_slower(deep, memory_bytes) -> None:
    try:
        plain_s = planned(deep, memory_bytes, recompute=None).predicted_step_s
    except InfeasibleError:
        plain_s = float("inf")
    plan = planned(deep, memory_bytes, recompute=None, blocks=None)
    assert plan.predicted_step_s <= plain_s
    assert memory_bytes is not None or not any(stage.recompute for stage in plan.stages)


def test_blocks_everywhere_if_that_is_asked(deep) -> None:
    plan = planned(deep, None, recompute=True, blocks=True)
    assert all(stage.recompute and stage.blocks is not None for stage in plan.stages)
    at_once = planned(deep, None, recompute=True)
    peaks = [max(found.prediction.peak_memory_bytes) for found in (plan, at_once)]
    assert peaks[0] < 0.6 * peaks[1]


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "pipedream-2bw"])
def test_blocks_in_every_kind_of_schedule(deep, schedule) -> None:
    stages = 4 if schedule == "interleaved" else 2
    asked = {"schedule": schedule, "stages": stages, "micro_batches": 8, "recompute": True}
    plan = planned(deep, None, blocks=True, **asked)
    at_once = planned(deep, None, **asked)
    assert all(stage.blocks is not None for stage in plan.stages)
    peaks = [max(found.prediction.peak_memory_bytes) for found in (plan, at_once)]
    assert peaks[0] < peaks[1]


def test_what_weights_wait_for_is_no_less_in_blocks(deep) -> None:
    """All that these stages save waits for the second half of a split backward."""
    asked = {"schedule": "zb-h1", "micro_batches": 8, "recompute": True}
    peaks = [
        max(planned(deep, None, blocks=blocks, **asked).prediction.peak_memory_bytes)
        for blocks in (True, False)
    ]
    assert peaks[0] <= peaks[1]


def test_a_stage_of_one_operator_has_no_blocks(chain) -> None:
    plan = make_plan(chain(2), cluster_of(2), request(recompute=True))
    assert SegmentPlans(chain(2)).of(plan) == [None, None]


def test_borders_are_where_little_crosses_and_no_group_is_cut(make_operator, make_profile) -> None:
    """Layers of four operators: a wide value, two in one memory, and a narrow value at the end."""
    layers = 6
    operators = [
        make_operator(
            index,
            output_bytes=10 if index % 4 == 3 else 5000,
            group=f"g{index // 4}" if index % 4 in (1, 2) else None,
        )
        for index in range(4 * layers)
    ]
    profile = make_profile(operators, list(pairwise(range(len(operators)))))
    cuts = SegmentCuts(profile).of(range(len(operators)))
    ends = {4 * layer for layer in range(1, layers)}
    assert {len(cut) for cut in cuts} >= {1, 2, layers - 1}
    coarse = [cut for cut in cuts if len(cut) < layers]
    assert all(set(cut) <= ends for cut in coarse)
    within_groups = {4 * layer + 2 for layer in range(layers)}
    assert not any(set(cut) & within_groups for cut in cuts)


def test_the_work_of_blocks_is_that_of_the_stage_twice_forward(deep) -> None:
    plan = make_plan(deep, cluster_of(2), request(recompute=True))
    for stage, blocks in zip(plan.stages, SegmentPlans(deep).of(plan), strict=True):
        cost = stage.cost
        assert blocks is not None
        assert blocks.forward_s == pytest.approx(cost.forward_s)
        twice_s = blocks.recompute_s + blocks.backward_s
        assert twice_s == pytest.approx(cost.forward_s + cost.backward_s)


def test_a_stage_with_its_backward_elsewhere_has_no_blocks(deep) -> None:
    plan = make_plan(deep, cluster_of(2), request(recompute=True))
    first = replace(plan.stages[0], backward_ranks=(1,))
    found = SegmentPlans(deep).of(replace(plan, stages=(first, plan.stages[1])))
    assert found[0] is None
    assert found[1] is not None


def test_the_memory_that_an_error_asks_for_is_that_of_stages_in_blocks(
    make_operator, make_profile
) -> None:
    own = [((f"n{index}", 10**6), (f"s{index}", 10**7)) for index in range(OPERATORS)]
    operators = [make_operator(i, output_bytes=10**6, saved=own[i]) for i in range(OPERATORS)]
    profile = make_profile(operators, list(pairwise(range(OPERATORS))))
    asked = {"stages": 2, "recompute": None, "schedule": "1f1b"}
    cures = []
    for blocks in (False, None):
        tight = request(**asked, blocks=blocks, memory_limit_bytes=10**6)
        with pytest.raises(InfeasibleError) as caught:
            make_plan(profile, cluster_of(2), tight)
        cures.append(int(re.search(r"memory_limit (\d+)MiB", caught.value.cure)[1]))
    assert cures[1] < cures[0]
    enough = request(**asked, blocks=None, memory_limit_bytes=cures[1] * 2**20)
    make_plan(profile, cluster_of(2), enough)
