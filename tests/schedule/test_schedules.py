"""What each rank computes, against the drawings, closed forms, known figures and torch's lists."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipectl.errors import ScheduleError
from pipectl.lanes import TransferKind
from pipectl.link import Link
from pipectl.plan import Replication, StageCost
from pipectl.schedule import (
    Kind,
    channels,
    default_ranks,
    default_warm_up,
    interleaved,
    lower,
    lower_evaluation,
    lower_stretch,
    lowering,
    one_f_one_b,
    pipedream,
    v_shaped,
)
from pipectl.schedule.listed import Listed
from pipectl.schedule.one_f_one_b import policy_a, policy_b
from pipectl.simulate import simulate
from pipectl.simulate.simulation import Machine
from tests.planner.gate.checked_plans import cluster_of
from tests.schedule.random_plans import FLUSHED, apart
from tests.schedule.validator import validate

LETTERS = {
    Kind.FORWARD: "0",
    Kind.EVALUATE: "0",
    Kind.BACKWARD: "a",
    Kind.BACKWARD_INPUT: "a",
    Kind.BACKWARD_WEIGHT: "A",
}
CHUNKS = {
    **dict.fromkeys(("gpipe", "1f1b", "zb-h1", "pipedream", "pipedream-2bw"), 1),
    **dict.fromkeys(("interleaved", "looped-bfs", "zb-v", "dualpipev", "v-half", "v-min"), 2),
}


def over(pipeline, schedule, ranks, micro_batches, chunks=None, **more):
    """The schedule on so many ranks."""
    stages = ranks * (chunks or CHUNKS[schedule])
    places = default_ranks(schedule, stages, ranks)
    return pipeline(stages, micro_batches, schedule=schedule, ranks=places, **more)


def computed(plan):
    """Kind, stage and micro-batch of what each rank computes."""
    programs = [lower(plan, rank) for rank in range(plan.ranks)]
    return [[row[:3] for row in program if row.kind in LETTERS] for program in programs]


def one_node(ranks, latency_s=0.0):
    return cluster_of(ranks, within=Link(latency_s, 1e30))


def drawing(plan, programs, *, by="stage", steps=1, indent=4):
    """What the ranks compute, a line for each stage or rank, as it is simulated."""
    machine = Machine(plan, one_node(plan.ranks), programs, steps=steps, record=True)
    machine.run()
    lines = [""] * (plan.ranks if by == "rank" else len(plan.stages))
    for rank, start, end, kind, stage, index, _ in machine.records():
        if kind in LETTERS:
            line = rank if by == "rank" else stage
            mark = chr(ord(LETTERS[kind]) + index) * round(end - start)
            lines[line] = lines[line].ljust(round(start), ".") + mark
    return "".join(f"{' ' * indent}{by} {number}  {line}\n" for number, line in enumerate(lines))


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "module"),
    [
        ("gpipe", 4, 4, one_f_one_b), ("1f1b", 4, 8, one_f_one_b), ("zb-h1", 4, 8, one_f_one_b),
        ("looped-bfs", 2, 4, interleaved), ("interleaved", 2, 4, interleaved),
        ("zb-v", 2, 6, v_shaped), ("dualpipev", 2, 6, v_shaped), ("v-half", 3, 4, v_shaped),
        ("v-min", 3, 4, v_shaped),
    ],
)  # fmt: skip
def test_a_schedule_is_as_it_is_drawn(pipeline, schedule, ranks, micro_batches, module):
    plan = over(pipeline, schedule, ranks, micro_batches)
    assert drawing(plan, [lower(plan, rank) for rank in range(ranks)]) in module.__doc__


def versions(plan, programs):
    """The version of the weights of every forward."""
    weights = {c for c, item in enumerate(channels(plan)) if item.kind is TransferKind.WEIGHT}
    lines = ""
    for index, stage in enumerate(plan.stages):
        newest, used = -1 if stage.backward_ranks else 0, ""
        for row in programs[stage.ranks[0]]:
            arrives = row.kind is Kind.RECEIVE_WAIT and row.channel in weights
            newest += arrives if stage.backward_ranks else row.kind is Kind.UPDATE
            used += str(newest - row.weight_version) * (row.kind is Kind.FORWARD)
        lines += f"    stage {index}  {used}\n"
    return lines


def two_stages_apart(pipeline):
    """Backwards are as long as forwards."""
    cost = StageCost(1.0, 1.0, 0.0, 0, 0, 0)
    return apart(pipeline(2, 1, schedule="pipedream", costs=[cost] * 2), (True, True))


@pytest.mark.parametrize(
    ("make", "steps", "by"),
    [
        (lambda pipeline: over(pipeline, "pipedream", 4, 1), 8, "stage"),
        (lambda pipeline: over(pipeline, "pipedream-2bw", 3, 3), 3, "stage"),
        (two_stages_apart, 9, "rank"),
    ],
    ids=["pipedream", "pipedream-2bw", "apart"],
)
def test_steps_that_overlap_are_as_they_are_drawn(pipeline, make, steps, by):
    plan = make(pipeline)
    programs = [lower_stretch(plan, rank, steps) for rank in range(plan.ranks)]
    assert drawing(plan, programs, by=by, steps=steps) in pipedream.__doc__
    assert versions(plan, programs) in pipedream.__doc__


def evaluation(plan, micro_batches):
    forward = [item for item in channels(plan) if item.kind is TransferKind.ACTIVATION]
    every = [(plan.stages_of_rank(rank), rank) for rank in range(plan.ranks)]
    return [lower_evaluation(forward, held, rank, micro_batches) for held, rank in every]


def test_evaluation_is_as_it_is_drawn(pipeline):
    plan = pipeline(4, 4)
    found = drawing(plan, evaluation(plan, 4), indent=8)
    assert found in lowering.lower_evaluation.__doc__
    several = [row[1:3] for row in lower_evaluation([], [2, 0], 0, 2)]
    assert several == [(0, 0), (2, 0), (0, 1), (2, 1)]


@given(
    ranks=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    micro_batches=st.integers(1, 6),
    skip=st.booleans(),
)
def test_evaluation_cannot_deadlock(pipeline, ranks, micro_batches, skip):
    skips = [(0, (len(ranks) - 1,), False)] if skip and len(ranks) > 1 else []
    plan = pipeline(len(ranks), micro_batches, ranks=ranks, skips=skips)
    Machine(plan, one_node(plan.ranks), evaluation(plan, micro_batches)).run()


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "latency", "bubble", "in_flight"),
    [
        ("gpipe", 4, 8, 0, 0.273, 8), ("gpipe", 4, 16, 0.25, 0.179, 16),
        ("gpipe", 8, 32, 0.25, 0.203, 32), ("1f1b", 4, 8, 0, 0.273, 4),
        ("1f1b", 4, 16, 0.25, 0.250, 4), ("1f1b", 8, 32, 0.25, 0.284, 8),
        ("interleaved", 4, 8, 0, 0.158, 5.5), ("interleaved", 4, 16, 0, 0.086, 5.5),
        ("interleaved", 8, 32, 0, 0.099, 11.5), ("interleaved", 4, 16, 0.25, 0.143, 5.5),
        ("interleaved", 8, 32, 0.25, 0.158, 11.5),
        ("zb-h1", 4, 8, 0, 0.111, 4), ("zb-h1", 4, 16, 0, 0.059, 4), ("zb-h1", 8, 32, 0, 0.068, 8),
        ("zb-h1", 4, 16, 0.25, 0.111, 4), ("zb-h1", 8, 32, 0.25, 0.127, 8),
        ("zb-v", 4, 8, 0, 0.059, 4), ("zb-v", 4, 16, 0, 0.030, 4), ("zb-v", 8, 32, 0, 0.035, 8),
        ("zb-v", 4, 16, 0.25, 0.090, 4), ("zb-v", 8, 32, 0.25, 0.109, 8),
        ("dualpipev", 4, 8, 0, 0.059, 4.5), ("dualpipev", 8, 32, 0, 0.035, 8.5),
        ("v-half", 4, 16, 0, 0.103, 3.5), ("v-half", 8, 32, 0, 0.111, 5.5),
        ("v-min", 4, 16, 0, 0.103, 2), ("v-min", 8, 32, 0, 0.123, 4),
        ("looped-bfs", 4, 8, 0, 0.158, 8), ("looped-bfs", 8, 32, 0, 0.099, 32),
    ],
)  # fmt: skip
def test_bubbles_and_micro_batches_in_flight_are_the_published_ones(
    pipeline, schedule, ranks, micro_batches, latency, bubble, in_flight
):
    """Latency in forwards of a rank. DualPipeV with whole backwards has twice its bubble here."""
    plan, chunks = over(pipeline, schedule, ranks, micro_batches), CHUNKS[schedule]
    assert simulate(plan, one_node(ranks, latency * chunks)).bubble == pytest.approx(
        bubble, abs=6e-4
    )
    assert max(map(in_flight_of, computed(plan))) == in_flight * chunks


def in_flight_of(rows):
    signs = [
        (kind is Kind.FORWARD) - (kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
        for kind, *_ in rows
    ]
    return max(np.cumsum(signs), default=0)


@settings(max_examples=50)
@given(ranks=st.integers(1, 16), micro_batches=st.integers(1, 40))
def test_ranks_keep_at_most_what_their_schedules_say(pipeline, ranks, micro_batches):
    bounds = {
        "zb-h1": min(ranks, micro_batches),
        "zb-v": min(ranks, micro_batches),
        "v-half": ranks / 2 + 3 / 2,
        "v-min": ranks / 3 + 4 / 3,
    }
    for schedule, bound in bounds.items():
        programs = computed(over(pipeline, schedule, ranks, micro_batches))
        assert max(map(in_flight_of, programs)) / CHUNKS[schedule] <= bound


@given(
    schedule=st.sampled_from(FLUSHED),
    ranks=st.integers(1, 5),
    micro_batches=st.integers(1, 12),
    chunks=st.integers(1, 3),
)
def test_warm_ups_are_the_forwards_before_the_first_backward(
    pipeline, schedule, ranks, micro_batches, chunks
):
    several = chunks if schedule in ("interleaved", "looped-bfs") else None
    plan = over(pipeline, schedule, ranks, micro_batches, several)
    for rows in computed(plan):
        for stage in {stage for _, stage, _ in rows}:
            kinds = [kind for kind, other, _ in rows if other == stage]
            warm_up = next(i for i, kind in enumerate(kinds) if kind is not Kind.FORWARD)
            assert warm_up == min(plan.warm_up[stage], micro_batches)


def test_dapple_policies():
    assert policy_a(4, 8) == (4, 3, 2, 1)
    assert policy_b(4, 8) == (7, 5, 3, 1)
    assert policy_a(4, 2) == (2, 2, 2, 1)
    assert policy_b(4, 4) == (4, 4, 3, 1)
    assert policy_a(3, 20, (4, 2, 1)) == (7, 3, 1)
    assert policy_b(3, 20, (4, 2, 1)) == (10, 4, 1)


def test_a_rank_with_two_stages_keeps_their_order_and_one_without_computes_nothing(pipeline):
    plan = pipeline(2, 2, ranks=[0, 0], warm_up=(2, 1), node_of_rank=[0, 0])
    found = [[f"{stage}{kind.name[0]}{index}" for kind, stage, index in r] for r in computed(plan)]
    assert found == [["0F0", "1F0", "1B0", "0F1", "1F1", "1B1", "0B0", "0B1"], []]


def test_replicas_in_turn_each_compute_as_one_of_fewer_micro_batches(pipeline):
    """Also the forwards before the first backward are those of all replicas together."""
    one, two = (over(pipeline, "interleaved", 2, count) for count in (4, 8))
    stages = tuple(
        replace(stage, ranks=(2 * stage.ranks[0], 2 * stage.ranks[0] + 1)) for stage in two.stages
    )
    two = replace(two, stages=stages, node_of_rank=(0,) * 4, replication=Replication.WHOLE)
    for rank, found in enumerate(computed(two)):
        alone = computed(one)[rank // 2]
        assert found == [(kind, stage, 2 * index + rank % 2) for kind, stage, index in alone]
    known = default_warm_up("interleaved", 4, 8, ranks=2, replicas=(2, 2, 2, 2))
    assert known == tuple(2 * depth for depth in one.warm_up)


@pytest.mark.parametrize(
    ("name", "schedule", "chunks"),
    [
        ("GPipe", "gpipe", 1), ("Interleaved1F1B", "interleaved", 2),
        ("Interleaved1F1B", "interleaved", 3), ("ZBVZeroBubble", "zb-v", 2),
        ("DualPipeV", "dualpipev", 2), ("LoopedBFS", None, 2), ("InterleavedZeroBubble", None, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8)])
def test_lists_of_torch_are_taken_as_they_are_and_our_orders_are_the_same(
    pipeline, name, schedule, chunks, ranks, micro_batches
):
    """Its 1F1B is left out: the last stage is wrong."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    several = {} if chunks == 1 else {"num_stages_per_rank": chunks}
    lists = visualizer.get_schedule_ops(name, ranks, micro_batches, **several)
    text = "\n".join(",".join("" if item is None else str(item) for item in row) for row in lists)
    listed = Listed.read(text, "x.csv")
    places = listed.rank_of_stage
    plan = pipeline(ranks * chunks, micro_batches, ranks=places, warm_up=listed.warm_up)
    plan = replace(plan, schedule="x.csv", actions=listed.text)
    validate(plan, [lower(plan, rank) for rank in range(ranks)])
    if schedule:
        assert computed(plan) == computed(over(pipeline, schedule, ranks, micro_batches, chunks))


@pytest.mark.parametrize(
    ("schedule", "ranks", "changes", "message"),
    [
        ("2f2b", [0, 1], {}, r"'2f2b' is not known\n.*gpipe, 1f1b"),
        ("interleaved", [0, 0, 1, 1], {}, r"stages are on ranks 0, 0, 1, 1\n.*0, 1, 0, 1"),
        ("zb-v", [0, 1, 0, 1], {}, r"stages are on ranks 0, 1, 0, 1\n.*0, 1, 1, 0"),
        ("pipedream", [0, 1], {"micro_batches": 2, "batch_size": 2}, "after every micro-batch"),
        ("pipedream-2bw", [0, 1], {"warm_up": (3, 1)}, "at most the 1 micro-batches"),
        ("pipedream", [0, 0], {}, "one stage per rank and one rank per stage"),
        ("pipedream", [(0, 2), 1], {}, "one stage per rank and one rank per stage"),
        ("pipedream", [(0, 1), 1], {}, "or two if backwards are apart"),
    ],
)
def test_plans_that_a_schedule_has_no_order_for_are_refused(
    pipeline, schedule, ranks, changes, message
):
    plan = pipeline(len(ranks), 1, warm_up=(1,) * len(ranks), node_of_rank=[0] * 3)
    stages = (
        replace(stage, ranks=rank if isinstance(rank, tuple) else (rank,))
        for stage, rank in zip(plan.stages, ranks, strict=True)
    )
    plan = replace(plan, schedule=schedule, stages=tuple(stages), **changes)
    with pytest.raises(ScheduleError, match=message):
        lower(plan, 0)
