"""What each rank computes, against drawn tables, closed forms and torch's own lists."""

import textwrap
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipectl.errors import ScheduleError
from pipectl.schedule import (
    Action,
    Kind,
    compute_actions,
    compute_programs,
    computing,
    default_warm_up,
    gpipe,
    lower_evaluation,
    lower_stretch,
    pipedream,
    pipedream_2bw,
)
from pipectl.schedule import one_f_one_b as one

GPIPE = """\
stage 0  0123.........aabbccdd
stage 1  .0123......aabbccdd
stage 2  ..0123...aabbccdd
stage 3  ...0123aabbccdd
"""

ONE_F_ONE_B = """\
stage 0  0123......aa4bb5cc6dd7ee.ff.gg.hh
stage 1  .012....aa3bb4cc5dd6ee7ff.gg.hh
stage 2  ..01..aa2bb3cc4dd5ee6ff7gg.hh
stage 3  ...0aa1bb2cc3dd4ee5ff6gg7hh
"""

PIPEDREAM_2BW = """\
stage 0  012....aa3bb4cc5dd6ee7ff8gg.hh.ii
stage 1  .01..aa2bb3cc4dd5ee6ff7gg8hh.ii
stage 2  ..0aa1bb2cc3dd4ee5ff6gg7hh8ii
"""

VERSIONS = """\
stage 0  00001234
stage 1  00012345
stage 2  00123456
stage 3  01234567
"""

VERSIONS_2BW = """\
stage 0  000000111
stage 1  000000111
stage 2  000000111
"""

APART = """\
rank 0  012345678
rank 1  ...abcdefghi
rank 2  .012345678
rank 3  ..abcdefghi
"""

VERSIONS_APART = """\
stage 0  000001234
stage 1  000123456
"""

EVALUATION = """\
stage 0  0123
stage 1  .0123
stage 2  ..0123
stage 3  ...0123
"""

DURATION = {Kind.FORWARD: 1, Kind.EVALUATE: 1, Kind.BACKWARD: 2}


def draw(plan):
    """Start every action as soon as its rank and its neighbours allow; a line for every stage."""
    pending = [list(program.body) for program in compute_programs(plan)]
    return drawing(pending, len(plan.stages))


def drawing(pending, stages):
    ends, lines, free = {}, [""] * stages, [0] * len(pending)
    while any(pending):
        for rank, rows in enumerate(pending):
            while rows and needs(rows[0], stages) <= ends.keys():
                action = rows.pop(0)
                need = needs(action, stages)
                start = max([free[rank], *(ends[key] for key in need)])
                line = lines[action.stage].ljust(start, ".") + mark(action)
                lines[action.stage], free[rank] = line, len(line)
                ends[action.kind, action.stage, action.micro_batch] = len(line)
    return "".join(f"stage {stage}  {line}\n" for stage, line in enumerate(lines))


def needs(action, stages):
    if action.kind is Kind.BACKWARD and action.stage == stages - 1:
        return {(Kind.FORWARD, action.stage, action.micro_batch)}
    neighbour = action.stage + (1 if action.kind is Kind.BACKWARD else -1)
    if neighbour in range(stages):
        return {(action.kind, neighbour, action.micro_batch)}
    return set()


def mark(action):
    first = "a" if action.kind is Kind.BACKWARD else "0"
    return chr(ord(first) + action.micro_batch) * DURATION[action.kind]


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "table", "module"),
    [("gpipe", 4, GPIPE, gpipe), ("1f1b", 8, ONE_F_ONE_B, one)],
)
def test_schedule_is_the_drawn_table(pipeline, schedule, micro_batches, table, module):
    plan = pipeline(4, micro_batches, schedule=schedule)
    assert draw(plan) == table
    assert textwrap.indent(table, "    ") in module.__doc__


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "steps", "table", "versions", "module"),
    [("pipedream", 4, 1, 8, ONE_F_ONE_B, VERSIONS, pipedream),
     ("pipedream-2bw", 3, 3, 3, PIPEDREAM_2BW, VERSIONS_2BW, pipedream_2bw)],
)  # fmt: skip
def test_steps_that_overlap_are_the_drawn_table(
    pipeline, schedule, stages, micro_batches, steps, table, versions, module
):
    plan = pipeline(stages, micro_batches, schedule=schedule)
    pending = [list(program.body) for program in compute_programs(plan, steps * micro_batches)]
    assert drawing(pending, stages) == table
    assert textwrap.indent(table, "    ") in module.__doc__
    assert used_versions(plan, steps) == versions
    assert textwrap.indent(versions, "    ") in module.__doc__


def test_backwards_on_ranks_of_their_own_are_the_drawn_table(pipeline):
    warm_up = default_warm_up("pipedream", 2, 1, apart=(True, True))
    plan = pipeline(2, 1, schedule="pipedream", warm_up=warm_up)
    ranks = [{"ranks": (0,), "backward_ranks": (1,)}, {"ranks": (2,), "backward_ranks": (3,)}]
    stages = tuple(replace(s, **held) for s, held in zip(plan.stages, ranks, strict=True))
    plan = replace(plan, stages=stages, node_of_rank=(0,) * 4)
    drawn, versions = drawing_of_messages([list(lower_stretch(plan, r, 9)) for r in range(4)])
    assert drawn == APART
    assert versions == [line.split()[-1] for line in VERSIONS_APART.splitlines()]
    for table in (APART, VERSIONS_APART):
        assert textwrap.indent(table, "    ") in pipedream.__doc__


def drawing_of_messages(pending):
    """Start every action when what its rank awaits was sent; and the weights that forwards have."""
    lines, sent, arrived, versions = [""] * len(pending), {}, Counter(), {}
    while any(pending):
        for rank, rows in enumerate(pending):
            while rows:
                action, line = rows[0], lines[rank]
                place = action.channel, action.micro_batch
                if action.kind is Kind.RECEIVE_WAIT and place not in sent:
                    break
                rows.pop(0)
                if action.kind in (Kind.FORWARD, Kind.BACKWARD):
                    first = "0" if action.kind is Kind.FORWARD else "a"
                    lines[rank] += chr(ord(first) + action.micro_batch)
                elif action.kind is Kind.SEND_START:
                    sent[place] = len(line)
                elif action.kind is Kind.RECEIVE_WAIT:
                    lines[rank] = line.ljust(sent[place], ".")
                    arrived[rank, action.channel] += 1
                if action.kind is Kind.FORWARD:
                    weights = max(c for r, c in arrived if r == rank)  # the last kind of channel
                    used = arrived[rank, weights] - 1 - action.weight_version
                    versions[rank] = versions.get(rank, "") + str(used)
    drawn = "".join(f"rank {rank}  {line}\n" for rank, line in enumerate(lines))
    return drawn, [versions[rank] for rank in sorted(versions)]


def used_versions(plan, steps):
    """The updates before each forward, less the age of its weights."""
    lines = []
    for rank in range(plan.ranks):
        rows, line = list(lower_stretch(plan, rank, steps)), f"stage {rank}  "
        for place, action in enumerate(rows):
            if action.kind is Kind.FORWARD:
                made = sum(before.kind is Kind.UPDATE for before in rows[:place])
                line += str(made - action.weight_version)
        lines.append(line + "\n")
    return "".join(lines)


def test_evaluation_is_the_drawn_table():
    evaluations = [list(lower_evaluation([], [stage], stage, 4).body) for stage in range(4)]
    assert drawing(evaluations, 4) == EVALUATION
    assert textwrap.indent(EVALUATION, "        ") in computing.evaluating.__doc__


def test_evaluation_of_several_stages_goes_micro_batch_by_micro_batch():
    actions = list(lower_evaluation([], [2, 0], 0, 2).body)
    assert actions == [
        Action(Kind.EVALUATE, stage, index) for index in range(2) for stage in (0, 2)
    ]


def test_dapple_policies():
    assert one.policy_a(4, 8) == (4, 3, 2, 1)
    assert one.policy_b(4, 8) == (7, 5, 3, 1)
    assert one.policy_a(4, 2) == (2, 2, 2, 1)
    assert one.policy_b(4, 4) == (4, 4, 3, 1)


def test_replicas_in_turn_need_a_micro_batch_for_each_behind_them():
    assert one.policy_a(3, 20, (4, 2, 1)) == (7, 3, 1)
    assert one.policy_b(3, 20, (4, 2, 1)) == (10, 4, 1)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_fewer_micro_batches_than_stages(pipeline, micro_batches):
    plan = pipeline(4, micro_batches, warm_up=(4, 3, 2, 1))
    first, *_, last = compute_programs(plan)
    kinds = [action.kind for action in first.body]
    assert kinds == [Kind.FORWARD] * micro_batches + [Kind.BACKWARD] * micro_batches
    assert [action.kind for action in last.body] == [Kind.FORWARD, Kind.BACKWARD] * micro_batches


def test_fewer_micro_batches_than_planned(pipeline):
    plan = pipeline(2, 8)
    assert compute_actions(plan, 0, 3) == compute_actions(pipeline(2, 3), 0)


def test_a_rank_with_two_stages_keeps_their_order(pipeline):
    plan = pipeline(2, 2, ranks=[0, 0], warm_up=(2, 1))
    actions = [(a.kind.name[0], a.stage, a.micro_batch) for a in compute_actions(plan, 0)]
    assert actions == [
        ("F", 0, 0),
        ("F", 1, 0),
        ("B", 1, 0),
        ("F", 0, 1),
        ("F", 1, 1),
        ("B", 1, 1),
        ("B", 0, 0),
        ("B", 0, 1),
    ]


def test_ranks_without_stages_compute_nothing(pipeline):
    programs = compute_programs(pipeline(2, 4, node_of_rank=[0, 0, 0]))
    assert [len(program.body) for program in programs] == [8, 8, 0]


@given(
    warm_up=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    micro_batches=st.integers(1, 9),
)
def test_any_warm_up_is_the_forwards_before_the_first_backward(pipeline, warm_up, micro_batches):
    plan = pipeline(len(warm_up), micro_batches, warm_up=warm_up)
    for stage, depth in enumerate(warm_up):
        actions = list(compute_actions(plan, stage))
        kinds = [action.kind for action in actions]
        backwards = [a.micro_batch for a in actions if a.kind is Kind.BACKWARD]
        assert kinds.index(Kind.BACKWARD) == min(depth, micro_batches)
        assert backwards == list(range(micro_batches))
        assert len(actions) == 2 * micro_batches


@pytest.mark.parametrize(("theirs", "ours"), [("GPipe", "gpipe"), ("1F1B", "1f1b")])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 6), (4, 8)])
def test_same_order_as_torch(pipeline, theirs, ours, stages, micro_batches):
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    expected = visualizer.get_schedule_ops(theirs, stages, micro_batches)
    programs = compute_programs(pipeline(stages, micro_batches, schedule=ours))
    ranks = stages - (ours == "1f1b")  # torch's 1F1B list is wrong for the last rank
    for rank in range(ranks):
        found = [f"{a.stage}{a.kind.name[0]}{a.micro_batch}" for a in programs[rank].body]
        listed = [str(action) for action in expected[rank] if action is not None]
        assert found == [text for text in listed if "REDUCE" not in text]


def test_unknown_schedule_is_named_with_the_known_ones(pipeline):
    plan = pipeline(2, 2, warm_up=(2, 1), schedule="2f2b")
    with pytest.raises(ScheduleError, match=r"'2f2b' is not known\n.*gpipe, 1f1b"):
        compute_actions(plan, 0)
