"""Interleaved 1F1B against its drawing, the published figures and torch's list."""

import textwrap
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from validator import validate

from pipectl.cluster import Cluster, Device, Node
from pipectl.errors import ScheduleError
from pipectl.link import Link
from pipectl.plan import Replication
from pipectl.schedule import Kind, compute_programs, default_warm_up, interleaved, lower
from pipectl.simulate import simulate

INTERLEAVED = """\
stage 0  01..2...3...aa.bb......ccdd
stage 1  .01......2aa3bb......ccdd
stage 2  ..01..aa.bb2..3...cc.dd
stage 3  ...0aa1bb......2cc3dd
"""


def rounds(pipeline, ranks, chunks, micro_batches, **more):
    stages = ranks * chunks
    return pipeline(
        stages,
        micro_batches,
        schedule="interleaved",
        ranks=[stage % ranks for stage in range(stages)],
        **more,
    )


def started_as_soon_as_possible(plan):
    """When every (kind, stage, micro-batch) ends, with a backward twice as long as a forward."""
    pending = [list(program.body) for program in compute_programs(plan)]
    ends, free, last = {}, [0] * len(pending), len(plan.stages) - 1
    while any(pending):
        for rank, rows in enumerate(pending):
            while rows:
                kind, stage, index = rows[0][:3]
                back = kind is Kind.BACKWARD
                needs = [(kind, stage + 1 if back else stage - 1, index)]
                if back and stage == last:
                    needs = [(Kind.FORWARD, stage, index)]
                if not back and stage == 0:
                    needs = []
                if not ends.keys() >= set(needs):
                    break
                rows.pop(0)
                start = max([free[rank], *(ends[need] for need in needs)])
                free[rank] = ends[kind, stage, index] = start + (2 if back else 1)
    return ends


def drawing(plan):
    lines = [[] for _ in plan.stages]
    for (kind, stage, index), end in started_as_soon_as_possible(plan).items():
        length, first = (2, "a") if kind is Kind.BACKWARD else (1, "0")
        lines[stage] += [(end - length, chr(ord(first) + index) * length)]
    text = []
    for line in lines:
        row = ""
        for start, mark in sorted(line):
            row = row.ljust(start, ".") + mark
        text.append(row)
    return "".join(f"stage {stage}  {row}\n" for stage, row in enumerate(text))


def test_it_is_the_drawn_table(pipeline):
    assert drawing(rounds(pipeline, 2, 2, 4)) == INTERLEAVED
    assert textwrap.indent(INTERLEAVED, "    ") in interleaved.__doc__


@pytest.mark.parametrize(
    ("ranks", "chunks", "micro_batches"), [(4, 2, 8), (4, 2, 16), (8, 2, 32), (4, 3, 12), (2, 4, 8)]
)
def test_bubble_and_micro_batches_in_flight_are_the_published_ones(
    pipeline, ranks, chunks, micro_batches
):
    plan = rounds(pipeline, ranks, chunks, micro_batches)
    busy = 3 * chunks * micro_batches
    end = max(started_as_soon_as_possible(plan).values())
    assert 1 - busy / end == pytest.approx((ranks - 1) / (chunks * micro_batches + ranks - 1))
    for rank, program in enumerate(compute_programs(plan)):
        sign = np.where(program.body.column("kind") == Kind.FORWARD, 1, -1)
        expected = (chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1
        assert np.cumsum(sign).max() == expected


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "latency", "bubble", "in_flight"),
    [(4, 8, 0, 0.158, 5.5), (4, 16, 0, 0.086, 5.5), (8, 32, 0, 0.099, 11.5),
     (4, 16, 0.5, 0.143, 5.5), (8, 32, 0.5, 0.158, 11.5)],
)  # fmt: skip
def test_simulated_with_messages_two_chunks_reach_the_known_bubbles(
    pipeline, ranks, micro_batches, latency, bubble, in_flight
):
    """Latency in forwards of a chunk: half of the published unit, the forward of a rank."""
    plan = rounds(pipeline, ranks, 2, micro_batches)
    link = Link(latency, 1e30)
    node = Node("n", ranks, ranks, Device("cpu"))
    cluster = Cluster("c", "test", (node,), within_node=link, between_nodes=link)
    assert simulate(plan, cluster).bubble == pytest.approx(bubble, abs=5e-4)
    sign = np.where(compute_programs(plan)[0].body.column("kind") == Kind.FORWARD, 1, -1)
    assert np.cumsum(sign).max() / 2 == in_flight


@given(ranks=st.integers(1, 5), chunks=st.integers(1, 3), micro_batches=st.integers(1, 12))
def test_any_number_of_micro_batches_works(pipeline, ranks, chunks, micro_batches):
    plan = rounds(pipeline, ranks, chunks, micro_batches)
    validate(plan, [lower(plan, rank) for rank in range(ranks)])
    in_flight = [
        int(np.cumsum(np.where(program.body.column("kind") == Kind.FORWARD, 1, -1)).max())
        for program in compute_programs(plan)
    ]
    most = [(chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1 for rank in range(ranks)]
    assert all(found <= bound for found, bound in zip(in_flight, most, strict=True))


@given(ranks=st.integers(1, 4), chunks=st.integers(1, 3), micro_batches=st.integers(1, 9))
def test_the_warm_up_is_the_forwards_before_the_first_backward(
    pipeline, ranks, chunks, micro_batches
):
    plan = rounds(pipeline, ranks, chunks, micro_batches)
    for program in compute_programs(plan):
        for stage in set(program.body.column("stage").tolist()):
            kinds = [action.kind for action in program.body if action.stage == stage]
            assert kinds.index(Kind.BACKWARD) == plan.warm_up[stage]


def test_one_chunk_is_1f1b_with_a_deeper_warm_up(pipeline):
    one = rounds(pipeline, 4, 1, 8)
    assert one.warm_up == (7, 5, 3, 1)
    same = pipeline(4, 8, warm_up=one.warm_up)
    assert compute_programs(one) == compute_programs(same)


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 8), (2, 3, 8)])
def test_same_order_as_torch(pipeline, ranks, chunks, micro_batches):
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    expected = visualizer.get_schedule_ops(
        "Interleaved1F1B", ranks, micro_batches, num_stages_per_rank=chunks
    )
    for rank, program in enumerate(
        compute_programs(rounds(pipeline, ranks, chunks, micro_batches))
    ):
        found = [f"{a.stage}{a.kind.name[0]}{a.micro_batch}" for a in program.body]
        listed = [str(action) for action in expected[rank] if action is not None]
        assert found == [text for text in listed if "REDUCE" not in text]


def test_stages_that_do_not_go_round_are_refused(pipeline):
    plan = pipeline(4, 4, schedule="interleaved", ranks=[0, 0, 1, 1])
    with pytest.raises(ScheduleError, match=r"stages are on ranks 0, 0, 1, 1\n"):
        lower(plan, 0)


def test_replicas_in_turn_each_compute_as_one_of_fewer_micro_batches(pipeline):
    """Also the forwards before the first backward are those of all replicas together."""
    one, two = rounds(pipeline, 2, 2, 4), rounds(pipeline, 2, 2, 8)
    stages = tuple(
        replace(stage, ranks=(2 * stage.ranks[0], 2 * stage.ranks[0] + 1)) for stage in two.stages
    )
    two = replace(two, stages=stages, node_of_rank=(0,) * 4, replication=Replication.WHOLE)
    for rank, program in enumerate(compute_programs(two)):
        found = [(a.kind, a.stage, a.micro_batch) for a in program.body]
        alone = compute_programs(one)[rank // 2].body
        assert found == [(a.kind, a.stage, 2 * a.micro_batch + rank % 2) for a in alone]
    known = default_warm_up("interleaved", 4, 8, ranks=2, replicas=(2, 2, 2, 2))
    assert known == tuple(2 * depth for depth in one.warm_up)
