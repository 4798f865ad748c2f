"""What each rank computes, against the drawings, closed forms, known figures and torch's lists."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from validator import InvalidError, Progress, validate

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import ScheduleError
from pipectl.graph import TransferKind
from pipectl.link import Link
from pipectl.plan import Replication
from pipectl.schedule import (
    NAMES,
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
from pipectl.schedule.one_f_one_b import policy_a, policy_b
from pipectl.schedule.registry import order_of
from pipectl.simulate import simulate
from pipectl.simulate.memory import stage_peaks_in_flight

LENGTH = {
    Kind.FORWARD: 1,
    Kind.EVALUATE: 1,
    Kind.BACKWARD: 2,
    Kind.BACKWARD_INPUT: 1,
    Kind.BACKWARD_WEIGHT: 1,
}
FIRST = {
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
SPLIT = ("zb-h1", "zb-v", "dualpipev", "v-half", "v-min")
FLUSHED = [name for name in NAMES if not name.startswith("pipedream")]


def over(pipeline, schedule, ranks, micro_batches, chunks=None, **more):
    """The schedule on so many ranks."""
    stages = ranks * (chunks or CHUNKS[schedule])
    places = default_ranks(schedule, stages, ranks)
    return pipeline(stages, micro_batches, schedule=schedule, ranks=places, **more)


def computed(plan, micro_batches=None):
    """Kind, stage and micro-batch of what each rank computes."""
    programs = [lower(plan, rank, micro_batches) for rank in range(plan.ranks)]
    return [[row[:3] for row in program if row.kind in LENGTH] for program in programs]


def times(pending, stages):
    """Start of every (kind, stage, micro-batch), as soon as its rank and its neighbours allow."""
    pending = [list(rows) for rows in pending]
    starts, ends, free = {}, {}, [0] * len(pending)
    while any(pending):
        for rank, rows in enumerate(pending):
            while rows and ends.keys() >= (need := needs(rows[0], stages - 1)):
                starts[rows[0]] = max([free[rank], *(ends[key] for key in need)])
                free[rank] = ends[rows[0]] = starts[rows[0]] + LENGTH[rows[0][0]]
                rows.pop(0)
    return starts


def needs(row, last):
    kind, stage, index = row
    if kind in (Kind.FORWARD, Kind.EVALUATE):
        return {(kind, stage - 1, index)} if stage else set()
    if kind is Kind.BACKWARD_WEIGHT:
        return {(Kind.BACKWARD_INPUT, stage, index)}
    return {(Kind.FORWARD, stage, index)} if stage == last else {(kind, stage + 1, index)}


def drawing(pending, stages, indent=4):
    lines = [""] * stages
    for (kind, stage, index), start in sorted(times(pending, stages).items(), key=lambda i: i[1]):
        mark = chr(ord(FIRST[kind]) + index) * LENGTH[kind]
        lines[stage] = lines[stage].ljust(start, ".") + mark
    return "".join(f"{' ' * indent}stage {stage}  {line}\n" for stage, line in enumerate(lines))


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
    assert drawing(computed(plan), len(plan.stages)) in module.__doc__


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "steps"),
    [("pipedream", 4, 1, 8), ("pipedream-2bw", 3, 3, 3)],
)
def test_steps_that_overlap_are_as_they_are_drawn(pipeline, schedule, ranks, micro_batches, steps):
    plan = over(pipeline, schedule, ranks, micro_batches)
    programs = [list(lower_stretch(plan, rank, steps)) for rank in range(ranks)]
    pending = [[row[:3] for row in rows if row.kind in LENGTH] for rows in programs]
    assert drawing(pending, ranks) in pipedream.__doc__
    versions = ""
    for rank, rows in enumerate(programs):
        made, used = np.cumsum([row.kind is Kind.UPDATE for row in rows]), ""
        for row, newest in zip(rows, made.tolist(), strict=True):
            used += str(newest - row.weight_version) * (row.kind is Kind.FORWARD)
        versions += f"    stage {rank}  {used}\n"
    assert versions in pipedream.__doc__


def test_backwards_on_ranks_of_their_own_are_as_they_are_drawn(pipeline):
    warm_up = default_warm_up("pipedream", 2, 1, apart=(True, True))
    plan = pipeline(2, 1, schedule="pipedream", warm_up=warm_up)
    ranks = [{"ranks": (0,), "backward_ranks": (1,)}, {"ranks": (2,), "backward_ranks": (3,)}]
    stages = tuple(replace(s, **held) for s, held in zip(plan.stages, ranks, strict=True))
    plan = replace(plan, stages=stages, node_of_rank=(0,) * 4)
    weights = {c for c, item in enumerate(channels(plan)) if item.kind is TransferKind.WEIGHT}
    pending = [list(lower_stretch(plan, rank, 9)) for rank in range(4)]
    lines, sent, arrived, versions = [""] * 4, {}, [-1] * 4, ["", "", "", ""]
    while any(pending):
        for rank, rows in enumerate(pending):
            while rows and (rows[0].kind is not Kind.RECEIVE_WAIT or rows[0][2:4] in sent):
                row = rows.pop(0)
                if row.kind in (Kind.FORWARD, Kind.BACKWARD):
                    lines[rank] += chr(ord(FIRST[row.kind]) + row.micro_batch)
                if row.kind is Kind.FORWARD:
                    versions[rank] += str(arrived[rank] - row.weight_version)
                if row.kind is Kind.SEND_START:
                    sent[row[2:4]] = len(lines[rank])
                if row.kind is Kind.RECEIVE_WAIT:
                    lines[rank] = lines[rank].ljust(sent[row[2:4]], ".")
                    arrived[rank] += row.channel in weights
    assert "".join(f"    rank {r}  {line}\n" for r, line in enumerate(lines)) in pipedream.__doc__
    used = "".join(f"    stage {stage}  {versions[2 * stage]}\n" for stage in range(2))
    assert used in pipedream.__doc__


def test_evaluation_is_as_it_is_drawn():
    programs = [lower_evaluation([], [stage], stage, 4) for stage in range(4)]
    pending = [[row[:3] for row in program] for program in programs]
    assert drawing(pending, 4, indent=8) in lowering.lower_evaluation.__doc__
    several = [row[1:3] for row in lower_evaluation([], [2, 0], 0, 2)]
    assert several == [(0, 0), (2, 0), (0, 1), (2, 1)]


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
    link = Link(latency * chunks, 1e30)
    node = Node("n", ranks, ranks, Device("cpu"))
    cluster = Cluster("c", "test", (node,), within_node=link, between_nodes=link)
    assert simulate(plan, cluster).bubble == pytest.approx(bubble, abs=6e-4)
    assert max(map(in_flight_of, computed(plan))) == in_flight * chunks


def in_flight_of(rows):
    signs = [
        (kind is Kind.FORWARD) - (kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT))
        for kind, *_ in rows
    ]
    return max(np.cumsum(signs), default=0)


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
def test_any_number_of_micro_batches_runs_in_ascending_order(
    pipeline, schedule, ranks, micro_batches, chunks
):
    several = chunks if schedule in ("interleaved", "looped-bfs") else None
    plan = over(pipeline, schedule, ranks, micro_batches, several)
    in_flight = validate(plan, [lower(plan, rank) for rank in range(ranks)])
    assert in_flight == stage_peaks_in_flight(plan)
    fewer = max(1, micro_batches - 2)
    validate(plan, [lower(plan, rank, fewer) for rank in range(ranks)], fewer)
    for rows in computed(plan):
        for stage in {stage for _, stage, _ in rows}:
            kinds = [kind for kind, other, _ in rows if other == stage]
            first = Kind.BACKWARD_INPUT if schedule in SPLIT else Kind.BACKWARD
            assert kinds.index(first) == min(plan.warm_up[stage], micro_batches)


@pytest.mark.parametrize("schedule", NAMES)
@given(ranks=st.integers(1, 6), micro_batches=st.integers(1, 9))
def test_an_action_has_a_later_turn_than_what_it_depends_on(
    pipeline, schedule, ranks, micro_batches
):
    """So no placement of ranks can deadlock."""
    count = 1 if schedule == "pipedream" else micro_batches
    plan = over(pipeline, schedule, ranks, count)
    order, every = order_of(plan, count), np.arange(count)
    kinds = [Kind.FORWARD, *order.parts(Kind.BACKWARD)]
    turns = {
        (kind, stage): order.turns(kind, stage, every)
        for kind in kinds
        for stage in range(len(plan.stages))
    }
    for stage in range(len(plan.stages)):
        for early, late in pairwise(kinds):
            assert np.all(turns[early, stage] < turns[late, stage])
        if stage:
            assert np.all(turns[Kind.FORWARD, stage - 1] < turns[Kind.FORWARD, stage])
            assert np.all(turns[kinds[1], stage] < turns[kinds[1], stage - 1])


def test_dapple_policies():
    assert policy_a(4, 8) == (4, 3, 2, 1)
    assert policy_b(4, 8) == (7, 5, 3, 1)
    assert policy_a(4, 2) == (2, 2, 2, 1)
    assert policy_b(4, 4) == (4, 4, 3, 1)
    assert policy_a(3, 20, (4, 2, 1)) == (7, 3, 1)
    assert policy_b(3, 20, (4, 2, 1)) == (10, 4, 1)


@given(
    warm_up=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    micro_batches=st.integers(1, 9),
)
def test_any_warm_up_is_the_forwards_before_the_first_backward(pipeline, warm_up, micro_batches):
    plan = pipeline(len(warm_up), micro_batches, warm_up=warm_up)
    for depth, rows in zip(warm_up, computed(plan), strict=True):
        assert [kind for kind, *_ in rows].index(Kind.BACKWARD) == min(depth, micro_batches)
        assert len(rows) == 2 * micro_batches


def test_a_rank_with_two_stages_keeps_their_order_and_one_without_computes_nothing(pipeline):
    plan = pipeline(2, 2, ranks=[0, 0], warm_up=(2, 1), node_of_rank=[0, 0])
    found = [[f"{stage}{kind.name[0]}{index}" for kind, stage, index in r] for r in computed(plan)]
    assert found == [["0F0", "1F0", "1B0", "0F1", "1F1", "1B1", "0B0", "0B1"], []]


def test_one_chunk_interleaved_is_1f1b_with_a_deeper_warm_up(pipeline):
    one = over(pipeline, "interleaved", 4, 8, chunks=1)
    assert one.warm_up == (7, 5, 3, 1)
    assert computed(one) == computed(pipeline(4, 8, warm_up=one.warm_up))


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
    ("theirs", "schedule", "chunks"),
    [("GPipe", "gpipe", 1), ("1F1B", "1f1b", 1), ("Interleaved1F1B", "interleaved", 2),
     ("Interleaved1F1B", "interleaved", 3), ("ZBVZeroBubble", "zb-v", 2),
     ("DualPipeV", "dualpipev", 2)],
)  # fmt: skip
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8)])
def test_same_order_as_torch(pipeline, theirs, schedule, chunks, ranks, micro_batches):
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    several = {} if chunks == 1 else {"num_stages_per_rank": chunks}
    expected = visualizer.get_schedule_ops(theirs, ranks, micro_batches, **several)
    names = {Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}
    found = computed(over(pipeline, schedule, ranks, micro_batches, chunks))
    for rank in range(ranks - (schedule == "1f1b")):  # torch's list is wrong for the last rank
        ours = [f"{s}{names.get(kind, kind.name[0])}{index}" for kind, s, index in found[rank]]
        actions = (action for action in expected[rank] if action)
        assert ours == [t for action in actions for t in parts_of(action, schedule in SPLIT)]


def parts_of(action, halves):
    """Texts of a single action of torch's."""
    if action.sub_actions:
        return [text for part in action.sub_actions for text in parts_of(part, halves)]
    text = str(action)
    if halves and "B" in text:
        return [text.replace("B", "I"), text.replace("B", "W")]
    return [] if "REDUCE" in text else [text]


@pytest.mark.parametrize(
    ("schedule", "ranks", "example"),
    [("interleaved", [0, 0, 1, 1], "0, 1, 0, 1"), ("zb-v", [0, 1, 0, 1], "0, 1, 1, 0"),
     ("dualpipev", [0, 1, 0, 1], "0, 1, 1, 0"), ("v-half", [0, 1, 0, 1], "0, 1, 1, 0")],
)  # fmt: skip
def test_stages_that_lie_otherwise_are_refused(pipeline, schedule, ranks, example):
    plan = pipeline(4, 4, schedule=schedule, ranks=ranks)
    shown = ", ".join(map(str, ranks))
    with pytest.raises(ScheduleError, match=f"stages are on ranks {shown}\n.*{example}"):
        lower(plan, 0)


def test_an_odd_number_of_stages_has_no_v():
    assert default_ranks("v-half", 6) == (0, 1, 2, 2, 1, 0)
    with pytest.raises(ScheduleError, match=r"5 stages cannot lie in a V"):
        default_ranks("v-half", 5)


def test_unknown_schedule_is_named_with_the_known_ones(pipeline):
    plan = pipeline(2, 2, warm_up=(2, 1), schedule="2f2b")
    with pytest.raises(ScheduleError, match=r"'2f2b' is not known\n.*gpipe, 1f1b"):
        lower(plan, 0)


@given(
    ranks=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    falls=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    micro_batches=st.integers(1, 9),
    skip=st.sampled_from([None, (2,), (1, 2), (2, 1), (1, 3, 2)]),
    has_gradient=st.booleans(),
)
def test_no_warm_up_that_never_rises_can_deadlock(
    pipeline, ranks, falls, micro_batches, skip, has_gradient
):
    stages = len(ranks)
    warm_up = [1 + sum(falls[stage:stages]) for stage in range(stages)]
    skips = [(0, skip, has_gradient)] if skip and max(skip) < stages else []
    plan = pipeline(stages, micro_batches, warm_up=warm_up, ranks=ranks, skips=skips)
    in_flight = validate(plan, [lower(plan, rank) for rank in range(plan.ranks)])
    assert in_flight == tuple(min(depth, micro_batches) for depth in warm_up)


def test_a_rising_warm_up_deadlocks(pipeline):
    plan = pipeline(3, 4, warm_up=(2, 1, 2))
    with pytest.raises(InvalidError, match=r"ranks \[0, 1, 2\] wait for each other"):
        validate(plan, [lower(plan, rank) for rank in range(3)])


@given(
    ranks=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    micro_batches=st.integers(1, 6),
    skip=st.booleans(),
)
def test_evaluation_cannot_deadlock(pipeline, ranks, micro_batches, skip):
    stages = len(ranks)
    skips = [(0, (stages - 1,), False)] if skip and stages > 1 else []
    plan = pipeline(stages, micro_batches, ranks=ranks, skips=skips)
    forward = [item for item in channels(plan) if item.kind is TransferKind.ACTIVATION]
    every = [(rank, plan.stages_of_rank(rank)) for rank in range(plan.ranks)]
    Progress([lower_evaluation(forward, held, rank, micro_batches) for rank, held in every]).run()
