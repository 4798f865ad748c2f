"""Plans with one rank per stage: where they are cut, what they hold, and how their search ends."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.cluster import Device, assumed_cluster
from pipectl.errors import InfeasibleError, OutOfTimeError
from pipectl.link import Link
from pipectl.plan import Plan
from pipectl.planner import PlanRequest, make_plan
from pipectl.planner.choices import micro_batch_sizes, sizes_near, stage_counts, takes
from pipectl.profile_parts import SmallestMicroBatch
from pipectl.simulate import simulate
from tests.planner.gate.checked_plans import FAST, after, cluster_of, planned
from tests.planner.gate.graphs import chain, hungry, make_operator, make_profile, profiles

pytestmark = pytest.mark.slow

SLOW = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e7)


def nodes_of(*ranks, link=SLOW, **more):
    return cluster_of(*ranks, within=link, **more)


FOUR = nodes_of(4)
PAIR = {"stages": 2, "micro_batches": 2}


def sizes(plan: Plan) -> list[int]:
    return [len(stage.nodes) for stage in plan.stages]


def ranks(plan: Plan) -> list[int]:
    return [rank for stage in plan.stages for rank in stage.ranks]


PLAN_A_TIE = """
import sys
from pathlib import Path
from pipectl.cluster import assumed_cluster
from pipectl.planner import PlanRequest, make_plan
from pipectl.profile import Profile
cluster = assumed_cluster("c", [2, 2], 1, 2**28)
plan = make_plan(Profile.load(Path(sys.argv[1])), cluster, PlanRequest("job", 64))
print(plan.stages, plan.transfers, plan.prediction)
"""


@pytest.mark.parametrize(
    ("asked", "link", "warm_up"),
    [
        ({}, SLOW, (4, 3, 2, 1)),  # equal times take the fewest in flight
        ({"schedule": "gpipe"}, SLOW, (8, 8, 8, 8)),
        ({"warm_up": (5, 2)}, SLOW, (5, 2)),
        ({"warm_up": (5, 2), "micro_batches": 4}, SLOW, (4, 2)),
        ({"warm_up": (5, 2), "schedule": "zb-h1"}, SLOW, (5, 2)),
        ({"schedule": "zb-h1"}, Link(1e-3, 1e11), (7, 5, 3, 1)),
        ({"micro_batches": 16}, Link(1e-6, 1e11), (4, 3, 2, 1)),  # deeper gains less than 0.1 %
        ({"micro_batches": 16}, Link(1e-5, 1e11), (7, 5, 3, 1)),  # and here more
        ({"micro_batches": 16}, Link(2e-3, 1e9), (7, 5, 3, 1)),
    ],
)
def test_equal_operators_are_shared_equally_with_the_warm_up_that_pays(
    asked, link, warm_up
) -> None:
    profile = chain(16, **({"output_bytes": 0, "gradient_bytes": 0} if link is SLOW else {}))
    asked = {"micro_batches": 8, "stages": len(warm_up), **asked}
    plan = planned(profile, nodes_of(4, link=link), **asked)
    assert len(set(sizes(plan))) == 1
    assert ranks(plan) == list(range(len(warm_up)))
    assert plan.warm_up == warm_up
    assert plan.schedule == asked.get("schedule", "1f1b")


@settings(max_examples=50, deadline=None)
@given(
    data=st.data(),
    batch=st.integers(1, 24),
    cores=st.integers(1, 2),
    limit=st.one_of(st.none(), st.integers(5_000, 30_000)),
)
def test_every_operator_has_one_stage_and_nothing_flows_back_or_the_error_says_what_is_missing(
    data, batch, cores, limit
) -> None:
    profile = data.draw(profiles(caches=True))
    plan = error = None
    try:
        plan = planned(profile, nodes_of(2, 1, cores=cores), batch, memory_limit_bytes=limit)
    except InfeasibleError as caught:
        error = caught
    if error is not None:
        assert limit is not None
        assert "more than its limit" in error.message
        assert "pipeline.memory_limit" in error.hint
        return
    nodes = [node for stage in plan.stages for node in stage.nodes]
    assert sorted(nodes) == sorted(operator.id for operator in profile.operators)
    assert all(plan.stage_of[u] <= plan.stage_of[v] for u, v in profile.edges)
    order = {operator.id: place for place, operator in enumerate(profile.operators)}
    for stage in plan.stages:
        assert list(stage.nodes) == sorted(stage.nodes, key=order.__getitem__)
    assert len(set(ranks(plan))) == len(plan.stages)
    assert (plan.micro_batches - 1) * plan.micro_batch_size < batch
    assert plan.micro_batches * plan.micro_batch_size >= batch


def test_ranks_that_share_cores_are_slower_and_those_of_other_nodes_are_taken() -> None:
    plan = planned(chain(16), nodes_of(4, cores=2, link=FAST))
    work_s = 16 * 3e-3 * 64 / 8
    assert work_s / 2 <= plan.predicted_step_s <= work_s / 2 * 1.3
    spread = planned(chain(8), nodes_of(2, 2, cores=1), micro_batches=8, stages=2)
    assert (ranks(spread), spread.ranks) == ([0, 2], 4)


def test_a_group_is_never_cut() -> None:
    profile = chain([{"group": "g" if i in (1, 5) else None} for i in range(8)])
    plan = planned(profile, FOUR, stages=3)
    assert any({"n1", "n2", "n3", "n4", "n5"} <= set(stage.nodes) for stage in plan.stages)


@pytest.mark.parametrize(
    ("batch", "most", "tried"),
    [(64, 16, [64, 32, 16, 8, 4]), (96, 16, [96, 48, 24, 12, 6]), (7, 100, [7, 4, 2]), (1, 8, [1])],
)
def test_sizes_that_are_tried_halve_and_divide_the_batch_where_they_can(batch, most, tried) -> None:
    assert micro_batch_sizes(PlanRequest("job", batch), most) == tried


@pytest.mark.parametrize(
    ("batch", "epoch", "drop_last", "tried"),
    [
        (16, (48,), False, [16, 8, 4, 2]),  # each size by the nearest that leaves no single sample
        (16, (37,), False, [16, 8, 6]),  # the last batch has 5
        (16, (37,), True, [16, 8, 4, 2]),
        (16, (32, 21), False, [16, 8, 6]),  # of one length
        (16, (), False, [16, 8, 4, 2]),  # iterable
        (16, (9,), False, [16, 9, 5, 3]),  # fewer than a batch
        (16, (33,), False, "no feasible plan: a batch of 1 has a micro-batch of 1 sample: why"),
    ],
)
def test_no_micro_batch_of_an_epoch_is_smaller_than_the_model_takes(
    batch, epoch, drop_last, tried
) -> None:
    profile = replace(chain([{}]), smallest=SmallestMicroBatch(2, "model: why"), epoch=epoch)
    batches = profile.batches(batch, drop_last=drop_last)
    request = PlanRequest("job", batch, smallest=profile.smallest, batches=batches)
    if isinstance(tried, str):
        with pytest.raises(InfeasibleError, match=tried):
            micro_batch_sizes(request, batch)
        return
    assert micro_batch_sizes(request, batch) == tried
    fixed = replace(request, micro_batches=16)
    with pytest.raises(InfeasibleError, match="has a micro-batch of 1 sample"):
        micro_batch_sizes(fixed, batch)


def test_micro_batches_get_ever_smaller_as_long_as_that_pays() -> None:
    """Without messages, the fill and drain of four stages take as long as three micro-batches."""
    plan = planned(chain(4), cluster_of(4), 256, schedule="1f1b")
    assert plan.micro_batches == 256


def test_numbers_of_micro_batches_near_the_best_are_tried_that_are_no_powers_of_two() -> None:
    """Each of m micro-batches of 24 / m samples takes 3 + 24 / m: with two stages, m is best 3."""
    times = {size: ((3 + size) * 1e-4, (3 + size) * 2e-4) for size in (1, 2, 4, 8, 16, 24)}
    profile = chain(2, forward_s=11e-4, backward_s=22e-4, timings=times)
    assert planned(profile, nodes_of(2, link=FAST), 24).micro_batches == 3


def test_sizes_near_another_are_other_sizes_that_the_model_takes() -> None:
    smallest, tried = SmallestMicroBatch(2, "model: why"), 0
    for batch in range(2, 60):
        request = PlanRequest("job", batch, smallest=smallest)
        for size in (size for size in range(1, batch + 1) if takes(request, size)):
            own = ceil(batch / size)
            near = sizes_near(request, own)
            tried += len(near)
            assert ceil(batch / own) not in near
            assert all(takes(request, each) for each in near)
            assert all(own <= 1.5 * ceil(batch / each) <= 2.25 * own for each in near)
    assert tried


def test_the_number_of_fast_ranks_is_tried_as_the_number_of_stages() -> None:
    """Nine of twelve ranks are fast; of the numbers above eight, only some are tried at first."""
    cluster = cluster_of(*[1] * 12, speeds=(0.1, 1.0, 1.0, 1.0))
    assert len(planned(chain(18), cluster, 64).stages) == 9


def test_up_to_eight_stages_all_numbers_are_tried_then_fewer() -> None:
    many = stage_counts(PlanRequest("job", 8), ranks=1024, blocks=2000)
    assert [*many[:9], many[-1]] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 1024]
    assert len(many) < 40


def test_everything_assumed_is_said_in_the_plan_and_its_file(tmp_path) -> None:
    bare = replace(
        chain(4),
        process_baseline_bytes=None,
        optimizer=None,
        assumptions=("from the profile",),
        edge_bytes={("n0", "n1"): 5},
        fingerprint="f",
    )
    cluster = assumed_cluster("guess", [2], 2, None)
    request = PlanRequest("job", 10, micro_batches=6, memory_limit_bytes=10**9, key="k")
    plan = make_plan(bare, cluster, request)
    assert (plan.micro_batches, plan.micro_batch_size) == (5, 2)
    text = "\n".join(plan.assumptions)
    for said in (
        "from the profile",
        "'guess' is assumed",
        "240 MiB",
        "2 samples are taken as proportional",
        "edge_bytes are not used",
        "6 micro-batches of 10 samples",
    ):
        assert said in text
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert (plan.name, plan.key, plan.fingerprint) == ("job", "k", "f")
    same = replace(chain(4), edge_bytes={("n0", "n1"): 1000})
    assert "edge_bytes" not in "\n".join(planned(same, nodes_of(2), 8).assumptions)


# Memory


@pytest.mark.parametrize(
    ("first", "ranks", "batch", "limit", "asked"),
    [
        ({"saved": (("big", 50_000),)}, 2, 16, 111_000, {**PAIR, "schedule": "gpipe"}),
        ({}, 2, 64, 8_000, {"stages": 2}),
        ({"saved": (("own", 8_000_000),)}, 4, 16, 1_100_000, {}),
    ],
    ids=[
        "fewer operators in the first stage",
        "few samples",
        "few stages, as the first has fewer micro-batches in flight then",
    ],
)
def test_what_fits_is_found(first, ranks, batch, limit, asked) -> None:
    profile, cluster = chain([first, *[{}] * 7]), nodes_of(ranks)
    free = planned(profile, cluster, batch, **asked)
    assert max(free.prediction.peak_memory_bytes) > limit
    assert planned(profile, cluster, batch, **asked, memory_limit_bytes=limit)


def test_stages_recompute_where_nothing_else_fits() -> None:
    profile, asked = hungry(8, 50_000), {"stages": 4, "memory_limit_bytes": 200_000}
    with pytest.raises(InfeasibleError):
        planned(profile, FOUR, **asked, micro_batches=8)
    plan = planned(profile, FOUR, **asked, micro_batches=8, recompute=None)
    again = [stage.recompute for stage in plan.stages]
    assert any(again)
    assert not all(again), "the last stage has one micro-batch in flight and need not"
    assert planned(profile, FOUR, **asked, recompute=None).search.finished


# Nodes that differ


def mixed_nodes(slow=1.0):
    """Of large slow devices and small fast ones, two each."""
    cluster = cluster_of(2, 2, within=Link(1e-5, 1e9))
    devices = Device("slow", slow, 10**9), Device("fast", 3.0, 10**8)
    nodes = zip(cluster.nodes, devices, strict=True)
    return replace(cluster, nodes=tuple(replace(node, device=device) for node, device in nodes))


def test_faster_devices_get_more_work() -> None:
    """Plans that take all devices for equal lose a quarter of the time; the slowest stay idle."""
    mixed, equal = mixed_nodes(), cluster_of(2, 2, within=Link(1e-5, 1e9))
    plan = planned(chain(16), mixed, 128, micro_batches=16, stages=4)
    held = {stage.ranks[0]: len(stage.nodes) for stage in plan.stages}
    assert min(held[2], held[3]) >= 6
    assert max(held[0], held[1]) <= 2
    best, naive = (planned(chain(16), each, 128, micro_batches=16) for each in (mixed, equal))
    assert best.predicted_step_s < 0.75 * simulate(naive, mixed).step_time_s
    assert sorted(ranks(planned(chain(8), mixed_nodes(0.01), micro_batches=8))) == [2, 3]


def test_large_parts_go_where_memory_is() -> None:
    """The first operator fits only a slow device."""
    profile = chain([{"parameters": (("p0", 3 * 10**7),)}, *[{}] * 7])
    first, *others = ranks(planned(profile, mixed_nodes(), micro_batches=8))
    assert first in (0, 1)
    assert {2, 3} & set(others)


# What the search does with its time


def test_without_any_time_there_is_an_even_cut_if_it_fits() -> None:
    plan = planned(chain(12), FOUR, expired=after(0))
    assert sizes(plan) == [3, 3, 3, 3]
    assert not plan.search.finished
    assert sizes(planned(chain(1), FOUR, expired=after(0))) == [1]
    times = [9e-3, 0.0, 0.0, 0.0, 0.0, 1e-3]
    lopsided = chain([{"forward_s": time_s, "backward_s": time_s} for time_s in times])
    assert min(sizes(planned(lopsided, FOUR, expired=after(0), stages=4))) > 0
    with pytest.raises(OutOfTimeError, match="before any plan was found"):
        planned(chain(12), FOUR, expired=after(0), memory_limit_bytes=7500)


def test_a_search_that_is_cut_short_returns_its_best_and_says_so(tmp_path) -> None:
    whole = planned(chain(12), FOUR)
    assert whole.search.finished
    steps = []
    for looks in range(1, 2000):
        plan = planned(chain(12), FOUR, expired=after(looks))
        steps.append(plan.predicted_step_s)
        if plan.search.finished:
            break
        plan.save(tmp_path / "plan.json")
        assert not Plan.load(tmp_path / "plan.json").search.finished
    assert plan.search.finished
    assert len(steps) > 1
    assert replace(plan, search=None) == replace(whole, search=None)


def test_planning_does_not_depend_on_hash_order(tmp_path) -> None:
    """Branches of equal cost leave many ties; every interpreter must break them alike."""
    edges = [(3 * i + a, 3 * i + 3 + b) for i in range(5) for a in range(3) for b in range(3)]
    make_profile(list(map(make_operator, range(18))), edges).save(tmp_path / "profile.json")
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PLAN_A_TIE, tmp_path / "profile.json"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert len(outputs) == 1


def test_a_thousand_operators_are_planned_in_seconds() -> None:
    """Residual blocks of three branches each, as in an exported vision model."""
    edges = []
    for start in range(0, 1197, 7):
        for first in (start + 1, start + 3, start + 5):
            edges += [(start, first), (first, first + 1), (first + 1, start + 7)]
    profile = make_profile([make_operator(index) for index in range(1198)], edges)
    started = time.process_time()
    plan = planned(profile, nodes_of(2, 2), micro_batches=8)
    assert time.process_time() - started < 15
    loads = [stage.load_s for stage in plan.stages]
    assert max(loads) <= 1.25 * sum(loads) / 4
