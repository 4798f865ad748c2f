"""Schedules of users: reading lists, their order, and programs made from them."""

import dataclasses

import numpy as np
import pytest
from validator import validate

from pipectl.cluster import assumed_cluster
from pipectl.errors import ScheduleError
from pipectl.plan import Plan
from pipectl.schedule import lower, program_hash
from pipectl.schedule.listed import KINDS, Listed, order_of
from pipectl.simulate import simulate

PLAIN = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
BACK_TO_FRONT = "0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0\n"
CROSSED = "0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1\n"


def planned(pipeline, text, **changes) -> Plan:
    listed = Listed.read(text, "my.csv")
    plan = pipeline(
        listed.stages,
        listed.micro_batches,
        ranks=list(listed.rank_of_stage),
        warm_up=listed.warm_up,
        size_bytes=10,
        **changes,
    )
    return dataclasses.replace(plan, schedule="my.csv", actions=listed.text)


def programs_of(plan, micro_batches=None):
    return [lower(plan, rank, micro_batches) for rank in range(plan.ranks)]


def words(plan, rank):
    letters = {kind: letter for letter, kind in KINDS.items()}
    return [
        f"{action.stage}{letters[action.kind]}{action.micro_batch}"
        for action in lower(plan, rank)
        if action.kind in letters
    ]


def test_lists_become_what_ranks_compute(pipeline):
    plan = planned(pipeline, PLAIN)
    assert [words(plan, rank) for rank in (0, 1)] == [line.split(",") for line in PLAIN.split()]
    assert plan.warm_up == (2, 1)
    validate(plan, programs_of(plan))


def test_comments_blanks_and_the_other_notation_are_read():
    text = "# mine\n 0F0, ,(0F1;0B0)OVERLAP_F_B,0B1,\n\n1F0,1B0,1F1,1B1"
    assert Listed.read(text, "x").text == tuple(PLAIN.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x: no action"),
        ("0F0,0B0\n0REDUCE_GRAD\n1F0,1B0", "x:2: a line without an action"),
        ("0F0,0SEND_F0,0B0", "x:1: action 2: '0SEND_F0' is not an action such as 2F0"),
        ("0F0,0B0\n1F0,1B0,1F0", "x:2: action 3, 1F0: is there before: line 2, action 1"),
        ("0F0,0B0,1F0\n1B0", "x:2: action 1, 1B0: stage 1 is on line 1 already"),
        ("0F0,0F1,0B0", "x: micro-batch 1 lacks one backward, whole or both halves in stage 0"),
        ("0F0,0I0", "lacks one backward, whole or both halves in stage 0: there is 0F0, 0I0"),
        ("0B0", "x: micro-batch 0 lacks a forward in stage 0: there is 0B0"),
        ("0F0,0B0\n2F0,2B0", "lacks a forward in stage 1: there is nothing"),
        ("0F1,0F0,0B0,0B1", "x:1: action 2, 0F0: comes after a later micro-batch"),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0",
            "line 1, action 2, 0B0 waits for 1B0 (line 2, action 4); "
            "line 2, action 2, 1F1 waits for 0F1 (line 1, action 3)",
        ),
        (
            "0B0,0F0",
            "x: ranks wait for each other: line 1, action 1, 0B0 waits for 0F0 (line 1, ac",
        ),
    ],
)
def test_faults_are_named_with_their_place(text, message):
    with pytest.raises(ScheduleError) as caught:
        order_of(Listed.read(text, "x"))
    assert message in caught.value.message


@pytest.mark.parametrize("text", [BACK_TO_FRONT, CROSSED])
@pytest.mark.parametrize("technique", ["", "recompute", "offload"])
def test_gradients_in_another_order_run_and_are_told(pipeline, text, technique):
    plan = planned(pipeline, text, skips=[])
    if technique:
        stages = tuple(dataclasses.replace(s, **{technique: True}) for s in plan.stages)
        plan = dataclasses.replace(plan, stages=stages)
    programs = programs_of(plan)
    validate(plan, programs)
    cluster = assumed_cluster("here", [2], 2, None)
    assert simulate(plan, cluster) == simulate(plan, cluster, programs)
    assert Listed.read(text, "x").unordered_stages() == ([0, 1] if text == BACK_TO_FRONT else [0])


@pytest.mark.parametrize(
    ("backwards", "unordered"),
    [("0I0,0I1,0W0,0W1", []), ("0I1,0I0,0W0,0W1", [0]), ("0I0,0I1,0W1,0W0", [0])],
)
def test_gradients_come_from_both_halves(backwards, unordered):
    assert Listed.read(f"0F0,0F1,{backwards}", "x").unordered_stages() == unordered


def test_fewer_micro_batches_than_the_lists_have(pipeline):
    plan = planned(pipeline, BACK_TO_FRONT)
    for count in (1, 2):
        programs = programs_of(plan, count)
        validate(plan, programs, count)
        assert (programs[0].column("micro_batch") < count).all()


def test_whole_backwards_beside_halves_are_both_halves(pipeline):
    plan = planned(pipeline, "0F0,0F1,0I0,0W0,0B1\n1F0,1B0,1F1,1I1,1W1")
    assert words(plan, 0) == ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]
    validate(plan, programs_of(plan))


def test_plans_with_other_lists_have_other_programs(pipeline):
    one, other = planned(pipeline, CROSSED), planned(pipeline, PLAIN)
    assert program_hash(one) != program_hash(dataclasses.replace(one, actions=other.actions))


def test_lists_of_another_plan_are_refused(pipeline):
    plan = dataclasses.replace(planned(pipeline, PLAIN), actions=("0F0,0B0",))
    with pytest.raises(ScheduleError, match="other stages or ranks"):
        lower(plan, 0)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("GPipe", 1),
        ("Interleaved1F1B", 2),
        ("LoopedBFS", 2),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
        ("DualPipeV", 2),
    ],
)
def test_lists_of_the_peer_are_taken_as_they_are(pipeline, name, chunks):
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops  # takes seconds

    lists = get_schedule_ops(name, 4, 8, num_stages_per_rank=chunks)
    text = "\n".join(",".join("" if item is None else str(item) for item in row) for row in lists)
    plan = planned(pipeline, text)
    assert len(validate(plan, programs_of(plan))) == 4 * chunks
    assert plan.stages[1].ranks == (1,)
    assert simulate(plan, assumed_cluster("here", [4], 4, None)).bubble < 0.5
    assert np.all(order_of(Listed.read(text, "x")).forward(0, np.arange(8)) >= 0)


def test_a_cell_that_is_too_long_is_named_with_its_line():
    with pytest.raises(ScheduleError, match=r"my\.csv:2: field larger than field limit"):
        Listed.read('0F0,0B0\n"' + "1F0 " * 40_000, "my.csv")


def test_a_plan_of_more_micro_batches_than_its_lists_is_refused(pipeline):
    plan = planned(pipeline, "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    longer = dataclasses.replace(plan, micro_batches=4, batch_size=2 * plan.batch_size)
    with pytest.raises(ScheduleError, match="its lists have 2 micro-batches, the plan 4"):
        lower(longer, 0)
