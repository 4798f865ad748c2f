"""Schedules of users: reading lists, their order, programs and plans made from them."""

import dataclasses
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from pipectl.cluster import assumed_cluster
from pipectl.errors import InfeasibleError, ScheduleError, UsageError
from pipectl.plan import Plan
from pipectl.schedule import lower
from pipectl.schedule.listed import KINDS, Listed, order_of
from pipectl.schedule.registry import make_listed, read_listed
from pipectl.simulate import simulate
from tests.planner.gate.checked_plans import cluster_of, planned
from tests.planner.gate.graphs import chain
from tests.schedule.validator import validate

PLAIN = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
BACK_TO_FRONT = "0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0\n"
CROSSED = "0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1\n"
FOLDED = "0F0,0F1,3F0,3F1,3B1,3B0,0B1,0B0\n1F0,1F1,2F0,2F1,2B1,2B0,1B1,1B0\n"


def planned_by_hand(pipeline, text) -> Plan:
    listed = Listed.read(text, "my.csv")
    plan = pipeline(
        listed.stages,
        listed.micro_batches,
        ranks=list(listed.rank_of_stage),
        warm_up=listed.warm_up,
        size_bytes=10,
    )
    return dataclasses.replace(plan, schedule="my.csv", actions=listed.text)


def programs_of(plan, micro_batches=None):
    return [lower(plan, rank, micro_batches) for rank in range(plan.ranks)]


@pytest.mark.parametrize(
    ("text", "computed"),
    [
        (PLAIN, PLAIN),
        ("# mine\n 0F0, ,(0F1;0B0)OVERLAP_F_B,0B1,\n\n1F0,1B0,1F1,1B1", PLAIN),
        (
            "0F0,0F1,0I0,0W0,0B1\n1F0,1B0,1F1,1I1,1W1",
            "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1",
        ),
    ],
    ids=["plain", "comments, blanks and the other notation", "whole backwards beside halves"],
)
def test_lists_become_what_ranks_compute(pipeline, text, computed):
    plan = planned_by_hand(pipeline, text)
    programs = programs_of(plan)
    letters = {kind: letter for letter, kind in KINDS.items()}
    found = [
        [f"{a.stage}{letters[a.kind]}{a.micro_batch}" for a in program if a.kind in letters]
        for program in programs
    ]
    assert found == [line.split(",") for line in computed.split()]
    assert plan.warm_up == (2, 1)
    validate(plan, programs)


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
        ('0F0,0B0\n"' + "1F0 " * 40_000, "x:2: field larger than field limit"),
        (
            "0B0,0F0",
            "x: ranks wait for each other: line 1, action 1, 0B0 waits for 0F0 (line 1, ac",
        ),
    ],
    ids=range(13),
)
def test_faults_are_named_with_their_place(text, message):
    with pytest.raises(ScheduleError) as caught:
        order_of(Listed.read(text, "x"))
    assert message in caught.value.message


@pytest.mark.parametrize("text", [BACK_TO_FRONT, CROSSED])
@pytest.mark.parametrize("technique", [{}, {"recompute": True}, {"offload": True}])
def test_gradients_in_another_order_run(pipeline, text, technique):
    plan = planned_by_hand(pipeline, text)
    stages = tuple(dataclasses.replace(stage, **technique) for stage in plan.stages)
    plan = dataclasses.replace(plan, stages=stages)
    for count in range(1, plan.micro_batches + 1):
        programs = programs_of(plan, count)
        validate(plan, programs, count)
        assert (programs[0].column("micro_batch") < count).all()
    cluster = assumed_cluster("here", [2], 2, None)
    assert simulate(plan, cluster) == simulate(plan, cluster, programs)


@pytest.mark.parametrize(
    ("text", "unordered"),
    [
        (BACK_TO_FRONT, [0, 1]),
        (CROSSED, [0]),
        ("0F0,0F1,0I0,0I1,0W0,0W1", []),
        ("0F0,0F1,0I1,0I0,0W0,0W1", [0]),
        ("0F0,0F1,0I0,0I1,0W1,0W0", [0]),
    ],
)
def test_gradients_in_another_order_are_told_from_both_halves(text, unordered):
    assert Listed.read(text, "x").unordered_stages() == unordered


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actions": ("0F0,0B0",)}, "other stages or ranks"),
        ({"micro_batches": 4, "batch_size": 4}, "its lists have 2 micro-batches, the plan 4"),
    ],
)
def test_lists_of_another_plan_are_refused(pipeline, changes, message):
    plan = dataclasses.replace(planned_by_hand(pipeline, PLAIN), **changes)
    with pytest.raises(ScheduleError, match=message):
        lower(plan, 0)


def test_a_plan_has_the_stages_and_ranks_of_the_lists():
    plan = planned(chain(8), cluster_of(2), 4, listed=Listed.read(FOLDED, "my.csv"))
    assert [stage.ranks for stage in plan.stages] == [(0,), (1,), (1,), (0,)]
    assert [len(stage.nodes) for stage in plan.stages] == [2, 2, 2, 2]
    assert (plan.schedule, plan.micro_batches, plan.micro_batch_size) == ("my.csv", 2, 2)
    assert "gradients of stage 0 and 3 more in another order" in plan.assumptions[-1]


@pytest.mark.parametrize(
    ("batch", "ranks", "asked", "message"),
    [
        (1, 2, {}, "has 2 micro-batches, into which a batch of 1"),
        (4, 1, {}, r"my\.csv has 2 ranks, but there are 1"),
        (4, 2, {"memory_limit_bytes": 1000}, r"my\.csv needs .* more than the memory limit"),
    ],
)
def test_what_does_not_fit_is_said(batch, ranks, asked, message):
    listed = Listed.read(FOLDED, "my.csv")
    with pytest.raises(InfeasibleError, match=message):
        planned(chain(8), cluster_of(ranks), batch, listed=listed, **asked)


def fold(ranks, stages, micro_batches):
    """All forwards, then all backwards, on one rank each."""
    return [[f"{r}{k}{m}" for k in "FB" for m in range(micro_batches)] for r in range(ranks)]


def test_a_package_offers_one_by_name(monkeypatch):
    entry = EntryPoint("fold", f"{__name__}:fold", "pipectl.schedules")
    monkeypatch.setattr(EntryPoint, "load", lambda self: fold)
    monkeypatch.setattr(
        "pipectl.schedule.registry.entry_points",
        lambda group, name="": EntryPoints([entry]).select(name=name) if name else [entry],
    )
    listed = make_listed("fold", 2, 2, 3)
    assert (listed.stages, listed.micro_batches, listed.warm_up) == (2, 3, (3, 3))
    with pytest.raises(UsageError, match="its function fails: TypeError"):
        make_listed("fold", "two", 2, 3)


def test_files_of_spreadsheets_begin_with_a_mark(tmp_path):
    (tmp_path / "x.csv").write_text(FOLDED, encoding="utf-8-sig")
    assert read_listed(tmp_path / "x.csv", "x.csv") == Listed.read(FOLDED, "x.csv")
