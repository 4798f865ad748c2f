"""Schedules that split backwards, and looped breadth-first: drawings, known figures, torch's lists.

Times are those of ranks that start every action as soon as it can be, without messages.
"""

import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from validator import validate

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import ScheduleError
from pipectl.link import Link
from pipectl.schedule import (
    Kind,
    compute_programs,
    default_ranks,
    dual_pipe_v,
    looped_bfs,
    lower,
    v_bounded,
    zb_h1,
    zb_v,
)
from pipectl.simulate import simulate

LOOPED_BFS = """\
stage 0  0123...............aabbccdd
stage 1  .0123............aabbccdd
stage 2  ....0123...aabbccdd
stage 3  .....0123aabbccdd
"""

ZB_H1 = """\
stage 0  0123...aA4bB5cC6dD7eEfFgGhH
stage 1  .012..a3bA4cB5dC6eD7fEgFhGH
stage 2  ..01.a2b3cA4dB5eC6fD7gEhFGH
stage 3  ...0a1b2c3dA4eB5fC6gD7hEFGH
"""

ZB_V = """\
stage 0  012......3aA...4bB...5cC...dD...eEfF
stage 1  .0.1...2aA...3bB...4cC...5dD...e.fE.F
stage 2  ..0.1aA...2bB...3cC...4dD...5eE.f..F
stage 3  ...0aA1bB...2cC...3dD...4eE..5fF
"""

DUAL_PIPE_V = """\
stage 0  012....3...aA4...bB5...cC...dD..eE.fF
stage 1  .0.1.2...aA3...bB4...cC5...dD..eE.f.F
stage 2  ..0.1.aA2...bB3...cC4...dD5..eE..f.F
stage 3  ...0aA1.bB2...cC3...dD4..eE5..fF
"""

V_HALF = """\
stage 0  01......2...aA3...bB....cC...dD
stage 1  .0...1....2a.A..3b.B...c.C..dD
stage 2  ..0...1...aA2...bB3...cC...dD
stage 3  ...0...1aA...2bB...3cC...dD
stage 4  ....0..a1A..b.2B..c.3C..d.D
stage 5  .....0aA.1bB...2cC...3dD
"""

V_MIN = """\
stage 0  0.....1.....2a..A.3b..B..c..C..dD
stage 1  .0.....1....a2A...b3B...cC....dD
stage 2  ..0.....1..a.A2..b.B3..c.C...d.D
stage 3  ...0.....1a.A..2b.B..3c.C...d.D
stage 4  ....0...a.1A...b2B...c3C...dD
stage 5  .....0.aA..1..bB.2..cC.3..dD
"""

CHUNKS = {"zb-h1": 1, "zb-v": 2, "dualpipev": 2, "v-half": 2, "v-min": 2, "looped-bfs": 2}
SPLIT = ("zb-h1", "zb-v", "dualpipev", "v-half", "v-min")
LENGTH = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}
FIRST = {Kind.FORWARD: "0", Kind.BACKWARD: "a", Kind.BACKWARD_INPUT: "a", Kind.BACKWARD_WEIGHT: "A"}


def over(pipeline, schedule, ranks, micro_batches, **more):
    """The schedule on so many ranks."""
    once = list(range(ranks))
    places = {"zb-h1": once, "looped-bfs": once * 2}.get(schedule, once + once[::-1])
    return pipeline(len(places), micro_batches, schedule=schedule, ranks=places, **more)


def times(plan):
    """Start of every (kind, stage, micro-batch)."""
    pending = [list(program.body) for program in compute_programs(plan)]
    starts, ends, free, last = {}, {}, [0] * len(pending), len(plan.stages) - 1
    while any(pending):
        for rank, rows in enumerate(pending):
            while rows and ends.keys() >= (need := needs(rows[0], last)):
                kind, stage, index = rows.pop(0)[:3]
                start = max([free[rank], *(ends[key] for key in need)])
                starts[kind, stage, index] = start
                free[rank] = ends[kind, stage, index] = start + LENGTH[kind]
    return starts


def needs(action, last):
    kind, stage, index = action[:3]
    if kind is Kind.FORWARD:
        return {(kind, stage - 1, index)} if stage else set()
    if kind is Kind.BACKWARD_WEIGHT:
        return {(Kind.BACKWARD_INPUT, stage, index)}
    return {(Kind.FORWARD, stage, index)} if stage == last else {(kind, stage + 1, index)}


def drawing(plan):
    lines = [""] * len(plan.stages)
    for (kind, stage, index), start in sorted(times(plan).items(), key=lambda item: item[1]):
        mark = chr(ord(FIRST[kind]) + index) * LENGTH[kind]
        lines[stage] = lines[stage].ljust(start, ".") + mark
    return "".join(f"stage {stage}  {line}\n" for stage, line in enumerate(lines))


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "table", "module"),
    [
        ("zb-h1", 4, 8, ZB_H1, zb_h1),
        ("zb-v", 2, 6, ZB_V, zb_v),
        ("dualpipev", 2, 6, DUAL_PIPE_V, dual_pipe_v),
        ("v-half", 3, 4, V_HALF, v_bounded),
        ("v-min", 3, 4, V_MIN, v_bounded),
        ("looped-bfs", 2, 4, LOOPED_BFS, looped_bfs),
    ],
)
def test_schedule_is_the_drawn_table(pipeline, schedule, ranks, micro_batches, table, module):
    assert drawing(over(pipeline, schedule, ranks, micro_batches)) == table
    assert textwrap.indent(table, "    ") in module.__doc__


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "latency", "bubble", "in_flight"),
    [
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
def test_bubbles_and_micro_batches_in_flight_are_the_known_ones(
    pipeline, schedule, ranks, micro_batches, latency, bubble, in_flight
):
    """Latency in forwards of a rank. DualPipeV with whole backwards has twice its bubble here."""
    plan, chunks = over(pipeline, schedule, ranks, micro_batches), CHUNKS[schedule]
    link = Link(latency * chunks, 1e30)
    node = Node("n", ranks, ranks, Device("cpu"))
    cluster = Cluster("c", "test", (node,), within_node=link, between_nodes=link)
    assert simulate(plan, cluster).bubble == pytest.approx(bubble, abs=6e-4)
    assert max(map(in_flight_of, compute_programs(plan))) == in_flight * chunks


def in_flight_of(program):
    kind = program.body.column("kind")
    ended = (kind == Kind.BACKWARD) | (kind == Kind.BACKWARD_WEIGHT)
    return np.cumsum((kind == Kind.FORWARD).astype(int) - ended).max(initial=0)


@given(ranks=st.integers(1, 24), micro_batches=st.integers(1, 60))
def test_v_half_and_v_min_keep_a_half_and_a_third_of_1f1b(pipeline, ranks, micro_batches):
    for schedule, bound in (("v-half", ranks / 2 + 3 / 2), ("v-min", ranks / 3 + 4 / 3)):
        programs = compute_programs(over(pipeline, schedule, ranks, micro_batches))
        assert max(map(in_flight_of, programs)) / 2 <= bound


@given(
    schedule=st.sampled_from(sorted(CHUNKS)),
    ranks=st.integers(1, 5),
    micro_batches=st.integers(1, 12),
)
def test_any_number_of_micro_batches_can_run_in_ascending_order(
    pipeline, schedule, ranks, micro_batches
):
    plan = over(pipeline, schedule, ranks, micro_batches)
    validate(plan, [lower(plan, rank) for rank in range(ranks)])
    fewer = [lower(plan, rank, max(1, micro_batches - 2)) for rank in range(ranks)]
    validate(plan, fewer, max(1, micro_batches - 2))
    for program in compute_programs(plan):
        for stage in set(program.body.column("stage").tolist()):
            for kind in set(program.body.column("kind").tolist()):
                mine = [a.micro_batch for a in program.body if a[:2] == (kind, stage)]
                assert mine == list(range(micro_batches))


@given(ranks=st.integers(1, 5), micro_batches=st.integers(1, 12))
def test_no_rank_keeps_more_than_the_first_of_1f1b(pipeline, ranks, micro_batches):
    for schedule in "zb-h1", "zb-v":
        programs = compute_programs(over(pipeline, schedule, ranks, micro_batches))
        most = CHUNKS[schedule] * min(ranks, micro_batches)
        assert max(map(in_flight_of, programs)) <= most


@pytest.mark.parametrize("schedule", SPLIT)
def test_the_warm_up_is_the_forwards_before_the_first_backward(pipeline, schedule):
    plan = over(pipeline, schedule, 4, 9)
    for program in compute_programs(plan):
        for stage in set(program.body.column("stage").tolist()):
            kinds = [action.kind for action in program.body if action.stage == stage]
            assert kinds.index(Kind.BACKWARD_INPUT) == plan.warm_up[stage]


@pytest.mark.parametrize(
    ("theirs", "schedule"), [("ZBVZeroBubble", "zb-v"), ("DualPipeV", "dualpipev")]
)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 6), (4, 8), (4, 13)])
def test_same_order_as_torch(pipeline, theirs, schedule, ranks, micro_batches):
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    expected = visualizer.get_schedule_ops(theirs, ranks, micro_batches, num_stages_per_rank=2)
    programs = compute_programs(over(pipeline, schedule, ranks, micro_batches))
    names = {Kind.FORWARD: "F", Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}
    for program, listed in zip(programs, expected, strict=True):
        found = [f"{a.stage}{names[a.kind]}{a.micro_batch}" for a in program.body]
        assert found == [text for action in listed if action for text in halves_of(action)]


def halves_of(action):
    """Texts of a single action of torch's; whole backwards are two halves here."""
    text = str(action)
    if action.sub_actions:
        return [text for part in action.sub_actions for text in halves_of(part)]
    if "REDUCE" in text:
        return []
    return [text.replace("B", "I"), text.replace("B", "W")] if "B" in text else [text]


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipev", "v-half"])
def test_stages_that_do_not_lie_in_a_v_are_refused(pipeline, schedule):
    plan = pipeline(4, 4, schedule=schedule, ranks=[0, 1, 0, 1])
    with pytest.raises(ScheduleError, match=r"stages are on ranks 0, 1, 0, 1\n.*0, 1, 1, 0"):
        lower(plan, 0)


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipev", "v-half"])
def test_an_odd_number_of_stages_has_no_v(schedule):
    assert default_ranks(schedule, 6) == (0, 1, 2, 2, 1, 0)
    with pytest.raises(ScheduleError, match=r"5 stages cannot lie in a V"):
        default_ranks(schedule, 5)
